"""Who may import whom, and what no source file may hold.

Each check is a function of (path, source), so that the last tests here can show that it fails when it should.
"""

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

SRC = Path(__file__).parents[1] / "src" / "partita"
FILES = {path.relative_to(SRC).as_posix(): path.read_text("utf-8") for path in sorted(SRC.rglob("*.py"))}

# Room or file → (rank, the rooms it knows besides its own; "*" is every room). A file imports strictly lower ranks of
# other rooms, and ranks up to its own inside its room. The longest entry that matches a file is its rule.
RULES = {
    "target": (0, ""),
    "samplers": (0, ""),
    "models": (0, ""),
    "data": (0, ""),
    "structure/partitions.py": (0, ""),
    "structure/masks.py": (0, ""),
    "structure/history.py": (0, ""),
    "structure": (1, "target"),  # gradient.py, and __init__.py, which shows the room's names
    "answers/diagnostics.py": (0, ""),
    "answers/scores.py": (0, ""),
    "answers/predictive.py": (1, "target"),
    "answers/summary.py": (1, ""),
    "engine": (2, "*"),
    "runs/store": (0, ""),  # knows tensors and files
    "runs": (3, "*"),
    "answers": (2, "target"),  # reads a run's fields, imports nothing of runs
    "laws": (5, "*"),
    "rivals": (5, "*"),
    "bench": (5, "*"),
    "__init__.py": (6, "*"),  # the public names
    "demo.py": (7, "*"),
    "tables.py": (7, "*"),
    "commands.py": (8, "*"),
    "cli.py": (9, "*"),
    "__main__.py": (10, "*"),
}
ALONE = {"laws/exact.py", "laws/mixtures.py"}  # the known answers share no code with what they judge


def nodes(tree: ast.AST, into_functions: bool = True) -> Iterator[ast.AST]:
    """Every node below `tree`, without what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            child = ast.Module(child.orelse, [])
        yield child
        if into_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from nodes(child, into_functions)


def imported(path: str, source: str, files: set[str]) -> set[str]:
    """The files of partita that `source` imports: `from .room import name` is room/name.py where that file exists."""

    def file(parts: tuple[str, ...]) -> str:
        package = "/".join((*parts, "__init__.py"))
        return "/".join(parts) + ".py" if parts and package not in files else package

    found = set()
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
            found |= {file(parts[1:]) for parts in names if parts[0] == "partita"}
        elif isinstance(node, ast.ImportFrom):
            here = ("partita", *PurePosixPath(path).parent.parts)
            base = here[: len(here) - node.level + 1] if node.level else ()
            parts = (*base, *node.module.split(".")) if node.module else base
            if parts and parts[0] == "partita":
                inner = {alias.name: file((*parts[1:], alias.name)) for alias in node.names}
                found |= {inner[name] if inner[name] in files else file(parts[1:]) for name in inner}
    return found - {path}


def rule(path: str) -> tuple[int, str] | None:
    matches = [key for key in RULES if path == key or path.startswith(key + "/")]
    return RULES[max(matches, key=len)] if matches else None


def wrong_imports(path: str, source: str, files: set[str]) -> list[str]:
    """Lines that say which import goes against the rules."""
    mine, my_room = rule(path), path.split("/")[0]
    if mine is None:
        return [f"{path} has no rule: give it a rank in RULES"]
    wrong = []
    for other in sorted(imported(path, source, files)):
        theirs, room = rule(other), other.split("/")[0]
        if theirs is None:
            wrong.append(f"{path} imports {other}, which has no rule")
        elif path in ALONE:
            wrong.append(f"{path} imports {other}, and may import nothing of partita")
        elif room == my_room and theirs[0] > mine[0]:
            wrong.append(f"{path} (rank {mine[0]}) imports {other} (rank {theirs[0]}) of its own room")
        elif room != my_room and path != "__init__.py":
            known = mine[1] == "*" or room in mine[1].split()
            if not known or theirs[0] >= mine[0]:
                wrong.append(f"{path} (rank {mine[0]}) imports {other} (rank {theirs[0]})")
    return wrong


def too_long(path: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    sampler = path.startswith("samplers/") and path not in ("samplers/__init__.py", "samplers/schedules.py")
    most = 79 if sampler else 350
    return [f"{path} has {lines} lines, at most {most}"] if lines > most else []


def forbidden(path: str, source: str) -> list[str]:
    """Pickle in any form, and seeding at import."""
    tree, wrong = ast.parse(source), []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            names = ["allow_pickle"]
        else:
            continue
        for name in names:
            pickles = name.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
            if pickles or name in ("torch.save", "torch.load", "allow_pickle"):
                wrong.append(f"{path}:{node.lineno} {name}")
    for node in nodes(tree, into_functions=False):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("manual_seed", "manual_seed_all"):
            wrong.append(f"{path}:{node.lineno} seeds at import")
    return wrong


def test_imports_follow_the_direction():
    assert "__init__.py" in FILES
    assert [line for path, source in FILES.items() for line in wrong_imports(path, source, set(FILES))] == []


def test_no_file_is_too_long():
    assert [line for path, source in FILES.items() for line in too_long(path, source)] == []


def test_no_pickle_and_no_seed_at_import():
    assert [line for path, source in FILES.items() for line in forbidden(path, source)] == []


TREE = {
    "__init__.py",
    *(f"{room}/__init__.py" for room in ("target", "structure", "samplers", "engine", "runs", "answers", "laws")),
    *("target/space.py", "structure/masks.py", "structure/gradient.py", "answers/scores.py", "answers/report.py"),
    *("runs/store/writer.py", "runs/loop.py", "runs/setup.py", "laws/exact.py", "laws/table.py", "cli.py", "demo.py"),
}


@pytest.mark.parametrize(
    "path, source",
    [
        ("samplers/sgld.py", "import partita.target.space"),
        ("samplers/sgld.py", "from ..target import space"),
        ("samplers/sgld.py", "from .. import target"),
        ("samplers/sgld.py", "def step():\n    from partita.structure.masks import OneGroup"),
        ("samplers/sgld.py", "import partita"),
        ("samplers/sgld.py", "if not TYPE_CHECKING:\n    from ..target import Posterior"),
        ("samplers/sgld.py", "if TYPE_CHECKING:\n    pass\nelse:\n    from ..target import Posterior"),
        ("structure/masks.py", "from .gradient import Structured"),
        ("structure/masks.py", "from . import Structured"),
        ("structure/gradient.py", "from partita.samplers import SGLD"),
        ("answers/predictive.py", "from ..runs import store"),
        ("engine/step.py", "from ..runs.store import Store"),
        ("runs/store/writer.py", "from partita.answers import report"),
        ("runs/store/writer.py", "from ..setup import Plan"),
        ("rivals/hmc.py", "from ..laws import table"),
        ("laws/exact.py", "from .table import law"),
        ("laws/mixtures.py", "from ..target import Density"),
        ("demo.py", "from .cli import app"),
        ("tools.py", ""),
        ("extras/tools.py", ""),
        ("cli.py", "from .extras import tools"),
    ],
)
def test_a_planted_import_is_found(path, source):
    assert len(wrong_imports(path, source, TREE | {path})) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("__init__.py", "from .cli import app\nfrom .laws import table"),
        ("structure/gradient.py", "from ..target import space\nfrom .masks import OneGroup"),
        ("structure/__init__.py", "from .gradient import Structured\nfrom . import masks"),
        ("answers/predictive.py", "from ..target.space import ParameterSpace\nfrom .scores import brier"),
        ("engine/step.py", "import partita.structure.gradient\nfrom partita.samplers import SGLD"),
        ("runs/loop.py", "from ..answers import scores"),  # the file, not what answers/__init__.py shows
        ("samplers/sgld.py", "if TYPE_CHECKING:\n    from ..target import Posterior"),
        ("samplers/sgld.py", "import typing\nif typing.TYPE_CHECKING:\n    from ..target import Posterior"),
        ("samplers/sgld.py", "import torch\nfrom torch import partita"),
        ("laws/table.py", "from .exact import gaussian\nfrom ..runs import store"),
        ("cli.py", "import partita as pt\nfrom . import demo"),
    ],
)
def test_a_right_import_passes(path, source):
    assert wrong_imports(path, source, TREE | {path}) == []


def test_planted_length_is_found():
    assert too_long("runs/store/writer.py", "\n" * 350) == []
    assert len(too_long("runs/store/writer.py", "\n" * 351)) == 1
    assert too_long("samplers/sgld.py", "\n" * 79) == []
    assert len(too_long("samplers/sgld.py", "\n" * 80)) == 1
    assert too_long("samplers/schedules.py", "\n" * 80) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from cloudpickle import dumps",
        "torch.save(x, 'a')",
        "def f():\n    return torch.load('a', weights_only=True)",
        "from torch import load",
        "np.load('a', allow_pickle=True)",
        "torch.manual_seed(0)",
        "class A:\n    seed = manual_seed(1)",
        "if True:\n    torch.cuda.manual_seed_all(1)",
    ],
)
def test_planted_pickle_and_seeds_are_found(source):
    assert len(forbidden("a.py", source)) == 1


def test_harmless_lookalikes_pass():
    source = '"""No pickle, no torch.load(x)."""\nnp.load(f, allow_pickle=False)\nload = safetensors.torch.load\n'
    assert forbidden("a.py", source + "def f(g):\n    g.manual_seed(0)") == []

"""Every Python block of the documents runs, every `partita` command in them exists, every link leads to a file."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from partita.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.name}:{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
]


def test_there_are_blocks():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("code", BLOCKS)
def test_block_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "block", "exec"), {"__name__": "block"})


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_commands_exist():
    known = {c.name or c.callback.__name__ for c in app.registered_commands}
    for page in PAGES:
        for command in re.findall(r"^partita (\w+)", page.read_text("utf-8"), re.MULTILINE):
            assert command in known, f"{page.name}: partita {command}"


def test_make_targets_exist():
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"^make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE):
            assert target in made, f"{page.name}: make {target}"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--version"], 0, "partita 0."),
        (["laws", "--only", "nothing like it"], 2, "no row of the table holds"),
        (["laws", "--only", "window/s_d", "--jobs", "1"], 0, "exact"),
        (["demos"], 2, "No such command"),
    ],
)
def test_command_line(arguments, code, says):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code
    assert says in result.output + (result.stderr if result.stderr_bytes else "")

"""Recipes: TOML to a run and back, settings from outside, and what is said of recipes that do not fit."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import partita as pt
from partita.runs.describe import describe
from partita.runs.recipe import Recipe, _lines, load, parse

TEXT = """
[model]
kind = "mlp"
inputs = 64
hidden = [4]
outputs = 10
[likelihood]
kind = "Categorical"
[prior]
kind = "Normal"
scale = 0.3
[data]
kind = "digits"
[sampler]
kind = "PSGLD"
step_size = 2e-3
[structure]
kind = "Structured"
[structure.partition]
kind = "by_name"
labels = {"0.*" = "first", "*" = "rest"}
[structure.mask]
kind = "Bernoulli"
rho = 0.3
[structure.history]
kind = "Window"
R = 8
[run]
steps = 20
chains = 2
batch_size = 10
device = "cpu"
"""


def tiny(width=3, dropout=0.0):
    """A model of the user's."""
    return nn.Sequential(nn.Linear(64, width), nn.Dropout(dropout), nn.Tanh(), nn.Linear(width, 10))


def rows(n=20):
    """Data of the user's."""
    x = torch.randn(n, 64)
    return (x, x[:, :10].argmax(1)), None


def one_pair():
    return rows()[0]


def without(section):
    tables = tomllib.loads(TEXT)
    del tables[section]
    return "\n".join(_lines(tables, ()))


def test_a_recipe_is_its_text_again():
    recipe = parse(TEXT)
    assert parse(recipe.text) == recipe
    assert parse(recipe.text).text == recipe.text
    assert parse(TEXT, ["run.steps=30"]) != recipe


def test_what_a_recipe_makes():
    recipe = parse(TEXT, ["posterior.temperature=0.5", "posterior.random=['0.*', '2.*']", "augment.kind=CropFlip"])
    posterior = recipe.posterior()
    assert posterior.space.dim == 65 * 4 + 5 * 10
    assert (posterior.temperature, posterior.prior, posterior.likelihood) == (0.5, pt.Normal(0.3), pt.Categorical())
    assert recipe.settings.pop("sampler") == pt.PSGLD(2e-3)
    found = recipe.settings
    structure = found.pop("structure")
    assert (structure.mask, structure.history) == (pt.masks.Bernoulli(0.3), pt.Window(8))
    assert structure.partition.groups(posterior.space).count == 2
    del found["sampler"]
    assert found == {"steps": 20, "chains": 2, "batch_size": 10, "device": "cpu", "augment": pt.data.CropFlip()}
    (x, _), (x_test, _) = recipe.data()
    assert (len(x), len(x_test)) == (1437, 360)


def test_a_recipe_can_be_made_of_objects():
    tables = tomllib.loads(TEXT) | {"sampler": describe(pt.SGHMC(0.1)), "prior": describe(pt.Laplace(pt.FanIn(2)))}
    recipe = Recipe(tables)
    assert parse(recipe.text).settings["sampler"] == pt.SGHMC(0.1)
    tables["sampler"]["time_step"] = 1.0  # the recipe has its own copy
    assert recipe.settings["sampler"] == pt.SGHMC(0.1)


def test_the_network_depends_on_the_seed_alone():
    before = torch.get_rng_state()
    recipe = parse(TEXT)
    first = recipe.posterior().space.values
    torch.randn(3)
    assert torch.equal(recipe.posterior().space.values, first)
    assert torch.equal(parse(TEXT, ["run.seed=0"]).posterior().space.values, first)
    assert not torch.equal(recipe.posterior(seed=1).space.values, first)
    assert torch.equal(recipe.posterior(1).space.values, parse(TEXT, ["run.seed=1"]).posterior().space.values)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randn(3)
    assert torch.equal(torch.get_rng_state(), after)


def test_it_runs_as_the_same_run_in_python():
    recipe = parse(TEXT, ["run.monitor=true", "run.monitor_every=10"])
    run = recipe.sample(progress=False)
    train, _ = recipe.data()
    mine = pt.sample(recipe.posterior(), train, **recipe.settings, progress=False)
    assert torch.equal(run.samples, mine.samples)
    assert [set(m) >= {"test/now/accuracy"} for m in run.metrics] == [True, True]
    assert recipe.watches
    assert not parse(TEXT).watches


def test_a_run_folder_holds_its_recipe(tmp_path):
    recipe = parse(TEXT)
    recipe.sample(out=tmp_path / "run", progress=False)
    assert parse((tmp_path / "run" / "recipe.toml").read_text("utf-8")) == recipe


def test_the_order_of_patterns_survives():
    """Of the patterns of a prior or a partition the first that matches decides."""
    scale = '"0.*" = {kind = "FanIn"}\n"*.bias" = 0.5\n"*" = {kind = "FanIn", gain = 2}\n'
    mixed = f'[prior]\nkind = "Normal"\n[prior.scale]\n{scale}'
    head, _, rest = TEXT.partition("[prior]")
    recipe = parse(head + mixed + rest[rest.index("[data]") :])
    again = parse(recipe.text)
    assert list(again.tables["prior"]["scale"]) == ["0.*", "*.bias", "*"]
    assert again.posterior().prior == pt.Normal({"0.*": pt.FanIn(), "*.bias": 0.5, "*": pt.FanIn(2)})


def test_models_and_data_of_others():
    name = __name__
    recipe = parse(TEXT, [f"model={{kind='{name}:tiny', width=5}}", f"data.kind={name}:rows", "data.n=12"])
    assert recipe.posterior().space.dim == 65 * 5 + 6 * 10
    (x, _), test = recipe.data()
    assert (len(x), test) == (12, None)
    assert torch.equal(recipe.data()[0][0], x)  # drawn at the run's seed
    tanh = parse(TEXT, ["model.activation=torch.nn:Tanh"]).posterior()
    assert isinstance(tanh.model[1], nn.Tanh)
    none = parse(TEXT, ["model={kind='convnet', channels=1, classes=10, image=[8, 8], width=4, norm='none'}"])
    assert not any(isinstance(m, nn.BatchNorm2d) for m in none.posterior().model.modules())


def test_arrays_from_a_file(tmp_path):
    x, y = np.ones((6, 64)), np.arange(6)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez(tmp_path / "b.npz", a=x, b=y, x_test=x[:2], y_test=y[:2], c=x[:3])

    def read(file, *sets):
        return parse(TEXT, [f"data={{kind='npz', path='{(tmp_path / file).as_posix()}'}}", *sets]).data()

    train, test = read("a.npz")
    assert (train[0].dtype, train[1].dtype, test) == (torch.float32, torch.int64, None)
    train, test = read("b.npz", "data.x=a", "data.y=b")
    assert (len(train[0]), len(test[1])) == (6, 2)
    assert len(read("b.npz", "data.x=a", "data.y=b", "data.x_test=c")[1][0]) == 3
    for sets, message in {
        ("a.npz", "data.x=z"): r"^data: npz got x='z', expected one of the file's arrays 'x', 'y'$",
        ("a.npz", "data.x_test=q"): r"^data: npz got x_test='q', expected one of the file's arrays 'x', 'y'$",
        ("none.npz",): r"^data: npz got path='.*none\.npz', expected a file written by numpy\.savez",
    }.items():
        with pytest.raises(ValueError, match=message):
            read(*sets)
    (tmp_path / "c.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"^data: npz got path='.*c\.npz', expected a file written by numpy\.savez"):
        read("c.npz")


SETS = {
    "run.steps=30": ("run", "steps", 30),
    "run.spread=1e-3": ("run", "spread", 1e-3),
    "run.device=cpu": ("run", "device", "cpu"),
    "run.device='cpu'": ("run", "device", "cpu"),
    " run.monitor = true ": ("run", "monitor", True),
    "model.hidden=[8, 8]": ("model", "hidden", [8, 8]),
    "posterior.temperature=2": ("posterior", "temperature", 2),
    "posterior.random=*.weight": ("posterior", "random", "*.weight"),
    "sampler.step_size={kind='Cosine', start=1, end=0.1}": (
        *("sampler", "step_size"),
        {"kind": "Cosine", "start": 1, "end": 0.1},
    ),
    'structure.partition.labels."0.weight"=w': (
        *("structure", "partition"),
        {"kind": "by_name", "labels": {"0.*": "first", "*": "rest", "0.weight": "w"}},
    ),
}


@pytest.mark.parametrize("one", SETS)
def test_settings_from_outside(one):
    section, key, value = SETS[one]
    assert parse(TEXT, [one]).tables[section][key] == value


def test_a_table_takes_the_place_of_a_number():
    sets = ["sampler.step_size.kind=Constant", "sampler.step_size.value=0.5"]
    assert parse(TEXT, sets).settings["sampler"] == pt.PSGLD(pt.schedules.Constant(0.5))


@pytest.mark.parametrize(
    "one", ["run.steps", "=3", "run..steps=3", "run.steps=", "run.a=[1", "run.a=b c", "run.a=1\nb=2", "a b=1"]
)
def test_settings_of_the_wrong_form(one):
    with pytest.raises(
        ValueError, match=r"^the setting '.*' is no key=value, expected for example run\.steps=4000"
    ) as e:
        parse(TEXT, [one])
    assert "\n" not in str(e.value)


REFUSED = {
    "a setting of a run": (["run.stepz=3"], r"^run\.stepz is no setting of a run, expected steps$"),
    "the target in a run": (["run.target=3"], r"^run\.target is no setting of a run, expected "),
    "steps": (["run.steps=4e3"], r"^run\.steps is 4000\.0, expected a whole number$"),
    "no steps": (["run={chains=2}"], r"^run has no steps, expected a whole number$"),
    "least steps": (["run.steps=0"], r"^run\.steps is 0, expected a whole number of at least 1$"),
    "burn_in": (["run.burn_in=20"], r"^run\.burn_in is 20, expected a whole number from 0 to steps - 1 = 19$"),
    "bool": (["run.chains=true"], r"^run\.chains is True, expected a whole number$"),
    "init": (["run.init=frsh"], r"^run\.init is 'frsh', expected 'fresh', 'module', 'prior', 'map'$"),
    "engine": (
        ["run.engine=graf"],
        r"^run\.engine is 'graf', expected one of \('auto', 'eager', 'compile', 'graph'\)$",
    ),
    "seed": (["run.seed=-1"], r"^run\.seed is -1, expected a whole number in \[0, 2\^32\)$"),
    "section": (["sampelr.kind=SGLD"], r"^\[sampelr\] is no section of a recipe, expected \[sampler\]$"),
    "no table": (["sampler=3"], r"^sampler is 3, expected a table \[sampler\]$"),
    "model": (
        ["model.kind=mpl"],
        r"^model\.kind is 'mpl', expected one of 'convnet', 'mlp', 'resnet' or .*\(nearest: 'mlp'\)$",
    ),
    "a setting of a model": (["model.hiden=3"], r"^model\.hiden is no setting of mlp, expected hidden$"),
    "hidden": (["model.hidden=3"], r"^model\.hidden is 3, expected an array$"),
    "widths": (["model.hidden=[3, 'a']"], r"^model\.hidden\[1\] is 'a', expected a whole number$"),
    "norm": (
        ["model={kind='resnet', norm='layer'}"],
        r"^model\.norm is 'layer', expected 'batch', 'group', 'frn'$",
    ),
    "data": (
        ["data.kind=digit"],
        r"^data\.kind is 'digit', expected one of 'digits', 'npz' or .*\(nearest: 'digits'\)$",
    ),
    "npz": (["data.kind=npz"], r"^data has no path, expected a string$"),
    "sampler": (["sampler.kind=PSGDL"], r"^sampler\.kind is 'PSGDL', .*\(nearest: 'PSGLD'\)$"),
    "other sampler": (
        ["sampler.kind=SGHMC"],
        r"^sampler\.step_size is no setting of SGHMC, expected one of 'adapt', .*'time_step'$",
    ),
    "its value": (["sampler.step_size=inf"], r"^sampler: PSGLD's step_size is inf, expected a number above 0"),
    "prior": (["prior.loc=true"], r"^prior\.loc is True, expected a number or a string$"),
    "posterior": (
        ["posterior.temprature=2"],
        r"^posterior\.temprature is no setting of a posterior, expected temperature$",
    ),
    "forward": (["posterior.forward='a:b'"], r"^posterior\.forward is no setting of a posterior, expected "),
    "date": (["run.seed=2024-01-01"], r"^run\.seed is datetime.*, expected a string, a number"),
}


@pytest.mark.parametrize("sets, message", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(sets, message):
    with pytest.raises(ValueError, match=message) as e:
        parse(TEXT, sets)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("section", ["model", "likelihood", "data", "sampler", "run"])
def test_sections_every_recipe_needs(section):
    with pytest.raises(ValueError, match=rf"^the recipe has no \[{section}\], expected one, for example [a-z]+ = "):
        parse(without(section))


@pytest.mark.parametrize("section", ["prior", "structure"])
def test_sections_a_recipe_may_have(section):
    assert section not in parse(without(section)).tables


def test_what_shows_only_when_it_is_made():
    with pytest.raises(ValueError, match=r"^model: mlp: layer sizes \[64, 0, 10\], expected whole numbers"):
        parse(TEXT, ["model.hidden=[0]"]).posterior()
    with pytest.raises(ValueError, match=r"^data: digits\(test=0\): expected between 1"):
        parse(TEXT, ["data.test=0"]).data()
    with pytest.raises(ValueError, match=rf"^data: {__name__}:one_pair returned a tuple of 2, expected \(\(x, y\), "):
        parse(TEXT, [f"data.kind={__name__}:one_pair"]).data()
    with pytest.raises(ValueError, match=r"^run\.monitor is true and the data have no test set, expected false"):
        parse(TEXT, [f"data.kind={__name__}:rows", "run.monitor=true"]).sample()
    with pytest.raises(ValueError, match=r"^seed is -1, expected a whole number"):
        parse(TEXT).posterior(-1)


def test_files(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("\ufeff" + TEXT, "utf-8")  # as Windows editors begin it
    assert load(file) == load(str(file)) == parse(TEXT)
    assert load(file, ["run.chains=3"]).settings["chains"] == 3
    file.write_text("[model]\nkind = 'mlp'\nhidden = [3\n[run]\n", "utf-8")
    with pytest.raises(ValueError, match=r"^.*mine\.toml is no TOML: .*line 4.*, expected") as e:
        load(file)
    assert "\n" not in str(e.value)
    file.write_bytes(b"[model]\nkind = '\xff'\n")
    with pytest.raises(ValueError, match=r"mine\.toml cannot be read, expected a TOML file in UTF-8"):
        load(file)
    with pytest.raises(
        ValueError, match=r"^there is no recipe 'digitz', expected a file or a bundled recipe: 'digits'$"
    ):
        load("digitz")
    with pytest.raises(ValueError, match=r"cannot be read, expected a TOML file"):
        load(tmp_path)


def test_bundled_recipes_fit():
    files = sorted((Path(pt.__file__).parent / "recipes").glob("*.toml"))
    assert files
    for file in files:
        recipe = load(file.stem)
        assert recipe == load(file)
        recipe.posterior()
        recipe.data()


plain = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
)
values = st.recursive(
    plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(min_size=1), st.dictionaries(st.text(), values, max_size=4), max_size=3))
def test_what_is_written_is_read(tables):
    again = tomllib.loads("\n".join(_lines(tables, ())))
    assert json.dumps(again) == json.dumps(tables)  # the order, too

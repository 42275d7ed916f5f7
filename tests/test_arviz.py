"""Export to ArviZ: the same numbers under the module's names, also after a round trip."""

import json
import sys

import numpy as np
import pytest
import torch

import partita as pt
from partita.answers.arviz import to_arviz

pytest.importorskip("arviz_base", reason="ArviZ is an extra")
import xarray as xr


@pytest.fixture(scope="module")
def sampled():
    x = torch.randn(30, 3)
    posterior = pt.Posterior(pt.models.mlp(3, (4,), 2), pt.Categorical())
    data = (x, (x[:, 0] > 0).long())
    run = pt.sample(
        posterior, data, sampler=pt.SGLD(1e-3), steps=60, burn_in=20, thin=2, chains=3, engine="eager", progress=False
    )
    return run, data


def test_the_posterior_has_the_modules_names_and_shapes(sampled):
    run, _ = sampled
    tree = to_arviz(run)
    assert set(tree.children) == {"posterior", "sample_stats"}
    expected = run.space.tree(run.samples)
    assert set(tree["posterior"].data_vars) == set(expected)
    for name, value in expected.items():
        got = tree["posterior"][name]
        assert got.dims[:2] == ("chain", "draw")
        np.testing.assert_array_equal(got.values, value.numpy())
    np.testing.assert_array_equal(tree["sample_stats"]["step"].values, np.tile(run.steps, (3, 1)))
    said = tree["posterior"].attrs
    assert said["inference_library"] == "partita"
    assert json.loads(said["settings"])["sampler"].startswith("SGLD")


def test_some_parameters_by_name(sampled):
    run, _ = sampled
    assert set(to_arviz(run, parameters=["*.bias"])["posterior"].data_vars) == {"0.bias", "2.bias"}
    with pytest.raises(ValueError, match="no parameter matches 'nothing'"):
        to_arviz(run, parameters=["nothing"])


def test_predictions_at_test_inputs(sampled):
    run, (x, y) = sampled
    tree = to_arviz(run, test=(x[:5], y[:5]))
    probs = run.predict(x[:5]).draws["probs"].reshape(3, -1, 5, 2)
    np.testing.assert_array_equal(tree["predictions"]["probs"].values, probs.numpy())
    np.testing.assert_array_equal(tree["predictions_constant_data"]["y"].values, y[:5].numpy())


def test_round_trips_through_a_dict_and_a_file(sampled, tmp_path):
    run, (x, y) = sampled
    tree = to_arviz(run, test=(x[:5], y[:5]))
    assert xr.DataTree.from_dict(tree.to_dict()).identical(tree)
    for name in tree.children:  # a file a group: scipy, the one backend at hand, writes no nested ones
        tree[name].to_dataset().to_netcdf(tmp_path / f"{name}.nc", engine="scipy")
        with xr.open_dataset(tmp_path / f"{name}.nc", engine="scipy") as back:
            xr.testing.assert_equal(back.load(), tree[name].to_dataset())
            assert set(back.attrs) == set(tree[name].attrs)


def test_coupled_chains_are_said_to_be():
    run = pt.sample(
        pt.Density(lambda t: -0.5 * (t * t).sum(), shapes={"a": (), "b": (2, 3)}),
        sampler=pt.SGLD(0.1),
        structure=pt.Structured(pt.partitions.each(), history=pt.Ensemble()),
        init=torch.zeros(7),
        spread=0.1,
        steps=40,
        engine="eager",
        progress=False,
    )
    with pytest.warns(UserWarning, match="coupled in 1 ensemble"):
        tree = to_arviz(run)
    assert tree["posterior"]["a"].shape == (4, 30)
    assert tree["posterior"]["b"].shape == (4, 30, 2, 3)


def test_without_arviz_one_line_says_what_to_install(sampled, monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"pip install 'partita\[arviz\]'") as caught:
        to_arviz(sampled[0])
    assert "\n" not in str(caught.value)

"""Parameter spaces: θ and named tensors, what is random, dtypes, and the messages when it does not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import partita as pt
from partita.target.space import ParameterSpace, layer_of

shapes = st.lists(st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=6)


def refused(match: str, *args: object, **kwargs: object) -> str:
    """The one-line message with which `pt.Posterior` refuses."""
    with pytest.raises(ValueError, match=match) as e:
        pt.Posterior(*args, **kwargs)  # type: ignore[arg-type]
    assert "\n" not in str(e.value)
    assert "expected" in str(e.value)
    return str(e.value)


# --------------------------------------------------------------------------------------------------------- round trips
@settings(max_examples=60, deadline=None)
@given(shapes, st.lists(st.integers(1, 3), max_size=2), st.data())
def test_tree_and_flatten_are_inverse(shapes: list[tuple[int, ...]], lead: list[int], data: st.DataObject) -> None:
    """In both directions, at any leading axes, scalars included, in the given order and each coordinate once."""
    kinds = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    dtypes = [data.draw(kinds) for _ in shapes]
    tensors = {f"p{i}": torch.randn(s).to(d) for i, (s, d) in enumerate(zip(shapes, dtypes))}
    space = ParameterSpace.of_tensors(tensors)
    assert space.dim == sum(t.numel() for t in tensors.values())
    assert space.values.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)

    theta = torch.randn(*lead, space.dim, dtype=space.values.dtype)
    tree = space.tree(theta)
    assert list(tree) == list(tensors)
    for (name, t), dtype in zip(tree.items(), dtypes):
        assert t.dtype == dtype
        assert t.shape == (*lead, *tensors[name].shape)
    assert space.flatten(tree).dtype == theta.dtype
    if set(dtypes) == {theta.dtype}:
        assert torch.equal(space.flatten(tree), theta)

    back = space.tree(space.flatten({k: t.expand((*lead, *t.shape)) for k, t in tensors.items()}))
    assert all(torch.equal(back[k], tensors[k].expand_as(back[k])) for k in tensors)  # half floats are exact in float32
    assert all(torch.equal(space.tree(space.values)[k], t) for k, t in tensors.items())


def test_the_order_is_the_modules_own() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    assert torch.equal(ParameterSpace.of_module(net).values, flat)


def test_the_gradient_of_a_split_reaches_every_coordinate() -> None:
    space = ParameterSpace.of_tensors({"a": torch.randn(2, 2), "b": torch.tensor(1.0), "c": torch.randn(3)})
    theta = torch.randn(space.dim, requires_grad=True)
    sum((t * (i + 1)).sum() for i, t in enumerate(space.tree(theta).values())).backward()
    assert theta.grad.tolist() == [1.0] * 4 + [2.0] + [3.0] * 3


def test_values_are_a_copy() -> None:
    net = nn.Linear(2, 2)
    space = ParameterSpace.of_module(net)
    kept = space.values.clone()
    with torch.no_grad():
        net.weight.zero_()
    assert torch.equal(space.values, kept)


def test_wrong_theta_and_trees_are_refused() -> None:
    space = ParameterSpace.of_tensors({"a": torch.zeros(2, 3), "b": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"theta has 7 entries in its last axis, expected D = 8"):
        space.tree(torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"missing \['b'\], unexpected \['c'\]"):
        space.flatten({"a": torch.zeros(2, 3), "c": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"'a' has shape \(3, 2\), expected \[\.\.\., 2, 3\]"):
        space.flatten({"a": torch.zeros(3, 2), "b": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"'b' has shape \(\), expected \[\.\.\., 2\]"):
        space.flatten({"a": torch.zeros(2, 3), "b": torch.zeros(())})


# ------------------------------------------------------------------------------------------------------ what is random
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.encoder(ids).mean(1))


def test_tied_parameters_count_once() -> None:
    space = ParameterSpace.of_module(Tied())
    assert space.dim == 15 + 5
    assert space.names == ("encoder.weight", "decoder.bias")


@pytest.mark.parametrize("random", ["decoder.weight", ["encoder.*", "decoder.weight"], "*.weight"])
def test_tied_parameters_are_found_under_either_name(random: str | list[str]) -> None:
    assert ParameterSpace.of_module(Tied(), random).names == ("encoder.weight",)


def test_both_users_of_a_tied_parameter_see_it() -> None:
    model = Tied()
    target = pt.Posterior(model, pt.Categorical())
    ids, twin = torch.randint(5, (4, 2)), Tied()
    theta = torch.randn(target.space.dim)
    tree = target.space.tree(theta)
    with torch.no_grad():
        twin.encoder.weight.copy_(tree["encoder.weight"])
        twin.decoder.bias.copy_(tree["decoder.bias"])
        torch.testing.assert_close(target.predict(theta, ids)["probs"], twin(ids).softmax(-1))
    given_back = target.module(theta)
    assert given_back.decoder.weight is given_back.encoder.weight


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    "random, names",
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]),
        ("3.*", ["3.weight", "3.bias"]),
        ("*.bias", ["0.bias", "2.bias", "3.bias"]),
        (["3.bias", "0.weight"], ["0.weight", "3.bias"]),  # the module's order, not the patterns'
        (("[02].weight", "*.weight"), ["0.weight", "2.weight", "3.weight"]),
        ((p for p in ["?.bias"]), ["0.bias", "2.bias", "3.bias"]),
    ],
)
def test_name_patterns_pick_what_is_random(random: object, names: list[str]) -> None:
    assert list(pt.Posterior(net(), pt.Categorical(), random=random).space.names) == names  # type: ignore[arg-type]


def test_what_is_not_random_stays_as_it_is() -> None:
    model = net()
    model[0].requires_grad_(False)
    assert ParameterSpace.of_module(model).names == ("2.weight", "2.bias", "3.weight", "3.bias")
    assert ParameterSpace.of_module(model, "0.*").names == ("0.weight", "0.bias")  # asked for by name
    target = pt.Posterior(model, pt.Categorical(), random="3.*")
    twin = target.module(torch.zeros(8))
    assert all(torch.equal(a, b) for a, b in zip(list(twin.parameters())[:4], list(model.parameters())[:4]))
    assert not any(p.any() for p in list(twin.parameters())[4:])


def test_select_returns_blocks_in_order() -> None:
    space = ParameterSpace.of_module(net())
    assert [b.name for b in space.select(["*.bias", "0.*"])] == ["0.weight", "0.bias", "2.bias", "3.bias"]
    with pytest.raises(ValueError, match=r"no parameter matches '2\.wieght', expected a name such as 2\.weight"):
        space.select("2.wieght")


def test_unknown_patterns_list_close_names() -> None:
    said = refused(r"no parameter matches '2\.wieght'", net(), pt.Categorical(), random="2.wieght")
    assert said.index("2.weight") < said.index("0.weight")
    refused(r"no parameter matches 'zzz'.*0\.weight", net(), pt.Categorical(), random=["3.*", "zzz"])


@pytest.mark.parametrize("random", [[], "", 3, ["0.*", 3], [None], nn.ReLU()])
def test_random_is_one_name_pattern_or_several(random: object) -> None:
    refused(r"random is .*|no parameter matches ''", net(), pt.Categorical(), random=random)


def test_no_random_parameter() -> None:
    refused(
        r"no random parameter: got a Sequential with 6 .*none trainable", net().requires_grad_(False), pt.Gaussian()
    )
    refused(r"no random parameter: got a ReLU with 0 parameters", nn.ReLU(), pt.Gaussian())


def test_lazy_parameters_are_refused() -> None:
    refused(r"'weight' is lazy and has no shape yet.*call the module once", nn.LazyLinear(2), pt.Gaussian())


@pytest.mark.parametrize("model", [None, nn.Linear, lambda x: x, "resnet"])
def test_only_modules_are_models(model: object) -> None:
    refused(r"model is .*expected an nn\.Module", model, pt.Gaussian())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    model = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    refused(r"model is a TopLevelTracedModule, expected the nn\.Module that it was made of", model, pt.Gaussian())


def test_integers_and_complex_numbers_are_not_random() -> None:
    model = net()
    model.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    assert "codes" not in pt.Posterior(model, pt.Categorical()).space.names
    refused(r"'codes' is torch\.int64, expected a real floating", model, pt.Categorical(), random="codes")
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    refused(r"'phase' is torch\.complex64, expected a real floating", model, pt.Categorical())


# ------------------------------------------------------------------------------------------------------ dtypes, extend
@pytest.mark.parametrize(
    "dtype, wide", [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_theta_is_at_least_float32_and_the_module_gets_its_own_dtype(dtype: torch.dtype, wide: torch.dtype) -> None:
    model = net().to(dtype)
    target = pt.Posterior(model, pt.Categorical(), pt.Normal(0.3))
    assert target.space.values.dtype == wide
    assert {b.dtype for b in target.space.blocks} == {dtype}
    x, y = torch.randn(6, 2, dtype=dtype), torch.randint(2, (6,))
    run = pt.sample(target, (x, y), sampler=pt.SGLD(1e-3), steps=6, burn_in=2, chains=2, init="prior", progress=False)
    assert run.samples.dtype == wide
    assert {p.dtype for p in run.module().parameters()} == {dtype}
    assert run.predict(x).probs.dtype == wide
    energy = target.likelihood_energy(run.samples[0, -1], (x, y), 6)
    assert energy.dtype == wide


def test_float64_energies_keep_their_digits() -> None:
    """A float64 module is computed in float64 throughout: energies a float32 could not tell apart are told apart."""
    model = nn.Linear(1, 2).double()
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    for likelihood, target in (
        (pt.Categorical(), y),
        (pt.Gaussian(1.0), x.expand(1, 2)),
        (pt.Bernoulli(), y[:, None] * 0),
    ):
        if isinstance(likelihood, pt.Bernoulli):
            model = nn.Linear(1, 1).double()
        posterior = pt.Posterior(model, likelihood)
        theta = posterior.space.values
        up = theta.clone()
        up[0] += 1e-11
        a, b = (posterior.likelihood_energy(t, (x, target), 1) for t in (theta, up))
        assert a.dtype == torch.float64
        assert 0 < abs(float(a - b)) < 1e-10


def test_extend_puts_more_tensors_at_the_end() -> None:
    space = ParameterSpace.of_module(net().double())
    more = space.extend({"likelihood.log_scale": torch.tensor(0.5), "likelihood.w": torch.ones(2, 2)})
    assert more.names == (*space.names, "likelihood.log_scale", "likelihood.w")
    assert more.dim == space.dim + 5
    assert more.values.dtype == torch.float64
    assert more.blocks[-1].dtype == torch.float64
    assert torch.equal(more.values, torch.cat([space.values, torch.tensor([0.5, 1, 1, 1, 1]).double()]))
    assert torch.equal(more.tree(more.values)["likelihood.log_scale"], torch.tensor(0.5).double())
    assert space.extend({}) is space
    assert len(space.blocks) == 6


class Named(nn.Module):
    """Its own parameters lie under the very name that a likelihood's parameters get."""

    def __init__(self, leaf: str = "weight") -> None:
        super().__init__()
        self.likelihood = nn.Module()
        self.likelihood.register_parameter(leaf, nn.Parameter(torch.ones(())))
        self.leaf = leaf

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self.likelihood, self.leaf)


def test_a_module_may_call_its_parameters_likelihood() -> None:
    target = pt.Posterior(Named(), pt.Gaussian("learn"))
    assert target.space.names == ("likelihood.weight", "likelihood.log_scale")
    x = torch.ones(3)
    assert torch.equal(target.predict(torch.tensor([4.0, 0.0]), x)["mean"], torch.full((3,), 4.0))
    refused(r"\['likelihood\.log_scale'\] are taken by the module.*expected", Named("log_scale"), pt.Gaussian("learn"))


# --------------------------------------------------------------------------------------------- layers, fan-in, γ of norms
@pytest.mark.parametrize(
    "name, layer",
    [
        ("0.weight", "0"),
        ("weight", ""),
        ("a.b.bias", "a.b"),
        ("lstm.weight_ih_l0", "lstm.l0"),
        ("lstm.bias_hh_l1_reverse", "lstm.l1_reverse"),
        ("conv.parametrizations.weight.original0", "conv"),
        ("weight_ih_l0", "l0"),
    ],
)
def test_the_layer_of_a_parameter(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_fan_in_and_out_axes() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(3, 4),
            "conv": nn.Conv2d(2, 4, 3),
            "up": nn.ConvTranspose2d(2, 5, 3),
            "table": nn.Embedding(9, 2),
        }
    )
    found = {b.name: (b.fan_in, b.out_axis) for b in ParameterSpace.of_module(model).blocks}
    assert found["linear.weight"] == (3, 0)
    assert found["conv.weight"] == (18, 0)
    assert found["up.weight"] == (18, 1)  # [in, out, 3, 3]
    assert found["linear.bias"] == found["up.bias"] == (1, 0)


class NormalLinear(nn.Linear):
    """A layer whose name has "norm" in it and whose weights are no scales."""


class RootNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_scales_of_normalisation_layers_are_known() -> None:
    model = nn.ModuleDict(
        {
            "bn": nn.BatchNorm1d(3),
            "ln": nn.LayerNorm((2, 3)),
            "gn": nn.GroupNorm(1, 3),
            "rms": nn.RMSNorm(3),
            "inorm": nn.InstanceNorm1d(3, affine=True),
            "own": RootNorm(),
            "normal": NormalLinear(2, 2),
            "linear": nn.Linear(2, 2),
        }
    )
    marked = [b.name for b in ParameterSpace.of_module(model).blocks if b.is_norm_scale]
    assert marked == ["bn.weight", "ln.weight", "gn.weight", "rms.weight", "inorm.weight", "own.weight"]

"""Any nn.Module, unmodified and never changed: a zoo of modules that break naive functional calls.

Each is sampled for a few steps under Joint and S_d, predicted with, and given back by run.module(), whose own forward
must reproduce the prediction of its draw.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import partita as pt
from partita.answers.predictive import predict
from partita.engine.chains import Energies
from partita.target.trees import map_tree

K, N = 3, 24  # classes, rows
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # some vmap fallbacks say so
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:the module writes into its own weights"),
]


# ------------------------------------------------------------------------------------------------------------ the zoo
class Attention(nn.Module):
    """A transformer encoder that is told which tokens are padding."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(8, K)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        h = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        return self.head(h.masked_fill(padding[..., None], 0).sum(1))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True), nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(4, 5, batch_first=True, **options), nn.LazyLinear(K)
        self(torch.zeros(1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Tied(nn.Module):
    """Encoder and decoder share one weight; the decoder comes second and has no parameter of its own but its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, K, bias=False), nn.Linear(4, K)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)) @ self.encoder.weight)


class MaxNorm(nn.Module):
    """Writes into its own weights: rows longer than max_norm are cut when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, K)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).sum(1))


class Clamped(nn.Module):
    """Writes into its own weights without a gradient, as monotone networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return self.head(torch.tanh(x @ self.weight.T))


class Counting(nn.Module):
    """Writes into a buffer at every call, and what it returns depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, K)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.a(x) / self.calls


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.drop(torch.tanh(self.a(x))), 0.5, self.training))


class Mixed(nn.Module):
    """One layer of another dtype, with casts around it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b, self.dtype = nn.Linear(4, 6).to(dtype), nn.Linear(6, K), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.to(self.dtype))).float())


class Own(nn.Module):
    """Parameters of its own, which no reset_parameters() reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gain, self.shift = nn.Linear(4, K), nn.Parameter(torch.ones(K)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.body(x) + self.shift


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, K), nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h if h.mean() > 0 else self.b(x) - h


class Remembers(nn.Module):
    """Leaves activations and Python state behind at every call, also in containers, and depends on some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.last, self.log, self.seen, self.calls = nn.Linear(4, K), None, [], {}, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.a(x)
        self.new = self.last.sum()
        self.log.append(self.last)
        self.seen = {"x": [self.last]}
        return self.last / self.calls


class Caches(nn.Module):
    """Registers a buffer when it is called, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.register_buffer("cached", h.detach().mean(), persistent=False)
        return h + self.cached


class Answers(nn.Module):
    """Returns an object, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, K)

    def forward(self, inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.a(inputs), loss=None)


def small(wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> nn.Sequential:
    return nn.Sequential(wrap(nn.Linear(4, 6)), nn.Tanh(), wrap(nn.Linear(6, K)))


def half_frozen() -> nn.Sequential:
    net = small()
    return net.requires_grad_(False) and net[2].requires_grad_() and net


def vectors(n: int) -> Tensor:
    return torch.randn(n, 4)


def images(n: int) -> Tensor:
    return torch.randn(n, 2, 6, 6)


def sequences(n: int) -> Tensor:
    return torch.randn(n, 5, 4)


def ids(n: int) -> Tensor:
    return torch.randint(1, 7, (n, 5))


def padded(n: int) -> dict[str, Tensor]:
    length = torch.randint(2, 6, (n, 1))
    return {"ids": ids(n), "padding": torch.arange(5) >= length}


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any] = vectors
    how: str = "vmap"
    forward: Callable[[nn.Module, Any], Any] | None = None
    call: Callable[[nn.Module, Any], Any] = lambda m, x: m(x)
    near: float = 2e-6


ZOO = {
    "mlp": Case(small),
    "batch norm": Case(lambda: pt.models.convnet(2, K, width=2, norm="batch"), images, near=1e-5),
    "batch norm without statistics": Case(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, K))
    ),
    "group norm": Case(lambda: pt.models.convnet(2, K, width=2, norm="group"), images),
    "attention, dict": Case(Attention, padded, call=lambda m, x: m(**x)),
    "attention, tuple": Case(
        lambda: Attention(norm_first=True),
        lambda n: tuple(padded(n).values()),
        forward=lambda m, x: m(padding=x[1], ids=x[0]),
        call=lambda m, x: m(*x),
    ),
    "self-attention": Case(SelfAttention, sequences),
    "lstm": Case(lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.5), sequences, "loop"),
    "gru": Case(lambda: Recurrent(nn.GRU, bidirectional=True), sequences, "loop"),
    "old weight norm": Case(lambda: small(torch.nn.utils.weight_norm)),
    "weight norm": Case(lambda: small(parametrizations.weight_norm)),
    "spectral norm": Case(lambda: small(parametrizations.spectral_norm)),
    "old spectral norm": Case(lambda: small(torch.nn.utils.spectral_norm)),
    "tied": Case(Tied),
    "max norm": Case(MaxNorm, ids),
    "sparse": Case(lambda: nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(20, K)), ids),
    "embedding bag": Case(lambda: nn.EmbeddingBag(7, K, max_norm=0.7, norm_type=1.0, mode="sum"), ids),
    "orthogonal": Case(lambda: nn.Sequential(nn.Linear(4, 4), parametrizations.orthogonal(nn.Linear(4, K)))),
    "clamped": Case(Clamped),
    "counting": Case(Counting),
    "dropout": Case(Dropped),
    "bfloat16 layer": Case(lambda: Mixed(torch.bfloat16), near=1e-2),
    "float64 layer": Case(lambda: Mixed(torch.float64)),
    "half frozen": Case(half_frozen),
    "own parameters": Case(Own),
    "branch": Case(Branch, how="loop"),
    "remembers": Case(Remembers),
    "caches": Case(Caches),
    "returns logits": Case(Answers, forward=lambda m, x: m(inputs=x).logits, call=lambda m, x: m(x).logits),
}
STRUCTURES = {
    "joint": pt.Joint(),
    "S_d": pt.Structured(pt.partitions.by_layer(), pt.masks.Bernoulli(0.5, count=2), history=pt.Reservoir(4, every=1)),
}


def build(case: Case) -> nn.Module:
    """The module in a state that is easily disturbed: in training, one child in eval, gradients present."""
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm is deprecated
        warnings.simplefilter("ignore", UserWarning)  # lazy modules, dropout of one layer
        module = case.build().train()
        case.call(module, case.inputs(N))  # it has been used: statistics, hooks and caches are where they leave them
        for child in list(module.children())[:1]:
            child.eval()
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 0.5)
    return module


def data(case: Case) -> tuple[Any, Tensor]:
    torch.manual_seed(11)
    return case.inputs(N), torch.randint(K, (N,))


def posterior(case: Case, module: nn.Module, **options: Any) -> pt.Posterior:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "BatchNorm couples")
        return pt.Posterior(module, pt.Categorical(), pt.Normal(0.5), forward=case.forward, **options)


def run_of(case: Case, module: nn.Module, structure: str = "joint", **options: Any) -> pt.Run:
    return pt.sample(
        posterior(case, module),
        data(case),
        sampler=pt.SGLD(1e-3),
        structure=STRUCTURES[structure],
        **{"steps": 10, "burn_in": 2, "thin": 2, "chains": 2, "batch_size": 8, "init": "fresh", "progress": False}
        | options,
    )


# ------------------------------------------------------------------------------------------------------ never changed
def tensors_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor reachable from a module's attributes, containers included."""
    if isinstance(value, Tensor):
        yield path, value
    elif id(value) in seen:
        return
    elif isinstance(value, (dict, list, tuple)):
        seen.add(id(value))
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(v, f"{path}/{k}", seen)
    elif isinstance(value, nn.Module):
        seen.add(id(value))
        yield from tensors_in(vars(value), path, seen)


def bits(t: Tensor) -> bytes:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def photograph(module: nn.Module) -> dict[str, Any]:
    """All that sampling could disturb, bit for bit: tensors, identities, gradients, flags, plain attributes, hooks."""
    shot: dict[str, Any] = {}
    for path, t in tensors_in(module, "", set()):
        grad = t.grad if t.is_leaf else None
        shot[path] = (id(t), bits(t), t.dtype, t.requires_grad, t.is_leaf, t._version, grad is not None and bits(grad))
    for name, m in module.named_modules():
        plain = {k: repr(v) for k, v in vars(m).items() if isinstance(v, (bool, int, float, str, type(None)))}
        shot[f"{name} attributes"] = (sorted(vars(m)), plain, len(m._forward_hooks), len(m._forward_pre_hooks))
    return shot


def test_a_photograph_shows_what_changed() -> None:
    """The check below can fail: each of these disturbs one thing, and each is seen."""
    for disturb in (
        lambda m: m.eval(),
        lambda m: m[0].running_mean.add_(1e-7),
        lambda m: m[1].weight.requires_grad_(False),
        lambda m: m(torch.randn(3, 4)),
        lambda m: setattr(m[1], "note", torch.ones(1)),
        lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.detach().clone())),
        lambda m: m[0].register_forward_hook(lambda *_: None),
        lambda m: setattr(m[0], "momentum", None),
        lambda m: setattr(m[1].weight, "grad", torch.ones(2, 4)),
    ):
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        before = photograph(net)
        assert photograph(net) == before
        disturb(net)
        assert photograph(net) != before


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ZOO)
def test_any_module_is_sampled_and_left_alone(name: str, structure: str) -> None:
    case = ZOO[name]
    module = build(case)
    before = photograph(module)
    run = run_of(case, module, structure)
    x = map_tree(lambda t: t[:5], data(case)[0])
    kept = run.samples.clone()
    prediction = run.predict(x)
    assert str(run.summary()).startswith("2 chains x 4 draws")
    assert photograph(module) == before
    assert torch.equal(run.samples, kept)

    assert run.settings["chains_run"] == case.how
    notes = [n for n in run.settings["notes"] if "one after another" in n]
    assert len(notes) == (case.how == "loop")
    assert all("\n" not in n for n in notes)

    probs = prediction.draws["probs"]
    assert probs.shape == (8, 5, K)
    assert not torch.equal(probs[0], probs[3])
    for chain, draw in ((0, 0), (1, 2), (1, -1)):
        twin = run.module(chain, draw)
        assert not any(m.training for m in twin.modules())
        assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in module.parameters()]
        with torch.no_grad():
            own = case.call(twin.eval(), x).softmax(-1)
            if name == "counting":
                assert int(twin.calls) == int(module.calls) + 1
        torch.testing.assert_close(probs[4 * chain + draw % 4], own, atol=case.near, rtol=case.near)
    assert photograph(module) == before


# ------------------------------------------------------------------------------------------------------- second paths
def parts(case: Case, dtype: torch.dtype = torch.float32) -> tuple[pt.Posterior, Tensor, tuple[Any, Tensor]]:
    """A checked posterior, four fresh states [4, D] and the data."""
    module = build(case).to(dtype) if dtype == torch.float64 else build(case)
    target = posterior(case, module)
    x, y = data(case)
    x = map_tree(lambda t: t.to(dtype) if t.is_floating_point() else t, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the module writes into its own weights")
        target.check((x, y), y)
    return target, target.start("fresh", 4), (x, y)


def gradients(case: Case, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """U_lik [2, 2], ∇U_lik [2, 2, D] and the gradient-free U_lik [2] of two chains with two compositions each."""
    target, theta, pair = parts(case)
    theta = theta.reshape(2, 2, -1)
    batch = map_tree(lambda t: t[:16].reshape(2, 8, *t.shape[1:]), pair)
    energies = Energies(target, N, how)
    return *energies.likelihood(theta, batch), energies.energy(theta[:, 0], batch)


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.how == "vmap"])
def test_vmap_and_loop_agree(name: str) -> None:
    near = 3e-2 if name == "bfloat16 layer" else 1e-4
    torch.manual_seed(3)
    fast = gradients(ZOO[name], "vmap")
    torch.manual_seed(3)
    for one, other in zip(fast, gradients(ZOO[name], "loop")):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=near, atol=near * float(other.abs().max()), check_dtype=False)


@pytest.mark.parametrize("name", [n for n in ZOO if n not in ("clamped", "bfloat16 layer", "float64 layer")])
def test_the_gradient_is_that_of_the_energy(name: str) -> None:
    """Directional finite differences in float64, in a random direction: no graph is cut, whatever the module does."""
    target, theta, batch = parts(ZOO[name], torch.float64)
    theta = theta[:1].double()
    d = torch.randn_like(theta) * 1e-7  # short, so that no kink of a ReLU lies in it
    energies = Energies(target, N, "loop")
    (_, g), up, down = energies.likelihood(theta[:, None], _one(batch)), theta + d, theta - d
    difference = (energies.energy(up, _one(batch)) - energies.energy(down, _one(batch))) / 2
    assert float((g[0] * d).sum()) == pytest.approx(float(difference), rel=1e-5)


@pytest.mark.parametrize("name", ["batch norm", "old weight norm", "max norm", "remembers"])
def test_the_energy_is_one_graph(name: str) -> None:
    """What the engine compiles: no break in it, the same numbers, and nothing left behind for the next eager call."""
    target, theta, batch = parts(ZOO[name])
    energy = lambda theta: torch.vmap(lambda t: target.likelihood_energy(t, batch, N))(theta)
    before = energy(theta)
    compiled = torch.compile(energy, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(theta), before)
    torch.testing.assert_close(compiled(theta + 1), energy(theta + 1))
    assert torch.equal(energy(theta), before)
    target.to(torch.device("cpu"))


def _one(batch: Any) -> Any:
    return map_tree(lambda t: t[None], batch)


# -------------------------------------------------------------------------------------------- what the copies must not do
def test_a_posterior_on_another_device_has_nothing_left_on_the_first() -> None:
    """On the meta device, which computes shapes alone and refuses to mix."""
    case = ZOO["batch norm"]
    target = posterior(case, build(case), batchnorm="frozen").to(torch.device("meta"))
    x, y = map_tree(lambda t: t.to("meta"), data(case))
    assert target.log_likelihood(target.space.values, (x, y)).device.type == "meta"
    assert target.prior_energy(target.space.values).device.type == "meta"
    assert {t.device.type for _, t in tensors_in(target.network.copy, "", set())} == {"meta"}


def test_changes_to_the_module_after_the_posterior_was_made_do_not_reach_the_run() -> None:
    case = ZOO["half frozen"]
    module = build(case)
    run = run_of(case, module)
    x = data(case)[0]
    before, twin = run.predict(x).probs, run.module()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    module.add_module("more", nn.Linear(K, K))
    assert torch.equal(run.predict(x).probs, before)
    assert torch.equal(run.module()(x), twin(x))
    assert not torch.equal(run.module()[0].weight, module[0].weight)


@pytest.mark.parametrize(
    "name", ["batch norm", "batch norm without statistics", "old weight norm", "lstm", "remembers"]
)
def test_the_same_posterior_samples_the_same_twice(name: str) -> None:
    """Nothing that a run does to the private copy is seen by the next: no cache, buffer or counter drifts."""
    case = ZOO[name]
    target = posterior(case, build(case))
    run = lambda: pt.sample(
        target, data(case), sampler=pt.SGLD(1e-3), steps=6, burn_in=2, chains=2, batch_size=8, progress=False
    )
    one, x = run(), data(case)[0]
    probs = one.predict(x).probs
    two = run()
    if one.settings["chains_run"] != two.settings["chains_run"]:  # convolutions are timed both ways, and both are right
        torch.testing.assert_close(one.samples, two.samples, rtol=1e-3, atol=1e-4)
        return
    assert torch.equal(one.samples, two.samples)
    assert torch.equal(two.predict(x).probs, probs)


@pytest.mark.parametrize("name", ZOO)
def test_a_state_dict_goes_back_into_the_callers_module(name: str) -> None:
    case = ZOO[name]
    module = build(case)
    target = posterior(case, module)
    twin = target.module(target.start("prior", 1)[0])
    module.load_state_dict(twin.state_dict())
    assert {n for n, _ in twin.named_parameters()} == {n for n, _ in module.named_parameters()}
    assert not {id(t) for _, t in tensors_in(twin, "", set())} & {id(t) for _, t in tensors_in(module, "", set())}


def test_a_returned_module_can_be_trained_on() -> None:
    run = run_of(ZOO["half frozen"], build(ZOO["half frozen"]))
    twin = run.module()
    kept = run.samples.clone()
    twin(torch.randn(5, 4)).sum().backward()
    assert [p.grad is not None for p in twin.parameters()] == [False, False, True, True]
    with torch.no_grad():
        twin[2].weight.zero_()
    assert torch.equal(run.samples, kept)


@pytest.mark.parametrize("name", ["remembers", "caches", "counting", "old weight norm"])
def test_calls_do_not_change_one_another(name: str) -> None:
    """The second call gives what the first gave, and the private copy is as it was."""
    target, theta, batch = parts(ZOO[name])
    before = photograph(target.network.copy)
    first = target.log_likelihood(theta[0], batch)
    torch.vmap(lambda t: target.log_likelihood(t, batch))(theta)
    assert torch.equal(target.log_likelihood(theta[0], batch), first)
    assert photograph(target.network.copy) == before


@pytest.mark.parametrize("name", ["clamped", "max norm"])
def test_predictions_do_not_write_into_draws(name: str) -> None:
    """Not even those of a posterior that has seen no data, as when a run was loaded."""
    case = ZOO[name]
    target = posterior(case, build(case))
    theta = target.start("prior", 3)
    kept = theta.clone()
    for how in ("vmap", "loop"):
        predict(target, theta, case.inputs(5), how=how)
    assert torch.equal(theta, kept)


def test_writing_into_weights_is_said() -> None:
    case = ZOO["clamped"]
    with pytest.warns(UserWarning, match=r"writes into its own weights \['weight'\].*copies") as said:
        run_of(case, build(case))
    assert [w.filename for w in said if "writes into" in str(w.message)] == [__file__]


def test_a_module_that_cannot_be_copied_is_refused_in_one_line() -> None:
    module = nn.Linear(4, K)
    module.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be copied \(TypeError: .*lock.*expected one that") as e:
        pt.Posterior(module, pt.Categorical())
    assert "\n" not in str(e.value)


# ------------------------------------------------------------------------------------------------------------- starts
class Resets(nn.Module):
    """What resets may look like: with arguments, none at all, integers, and a parent that overrules its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.bare = nn.Linear(4, 50), nn.Parameter(torch.full((400,), 7.0))
        self.other = nn.Bilinear(1, 1, 1)
        self.codes = nn.Parameter(torch.arange(3), requires_grad=False)
        self.other.reset_parameters = lambda std: 1 / 0  # needs an argument: not ours to call

    def reset_parameters(self) -> None:
        nn.init.constant_(self.child.bias, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) + self.bare.mean() + self.other.weight.sum() + self.other.bias


def test_fresh_is_each_layers_own_reset_and_the_prior_where_there_is_none() -> None:
    target = pt.Posterior(Resets(), pt.Categorical(), pt.Normal(0.01))
    torch.manual_seed(0)
    tree = target.space.tree(target.start("fresh", 3))
    weight = tree["child.weight"]
    assert float(weight.abs().max()) <= 0.5  # U(±1/√4), where the prior's sd is .01
    assert float(weight.std()) == pytest.approx(0.5 / 3**0.5, rel=0.1)
    assert torch.equal(tree["child.bias"], torch.full((3, 50), 0.25))
    assert float(tree["bare"].mean()) == pytest.approx(0, abs=0.002)
    assert float(tree["bare"].std()) == pytest.approx(0.01, rel=0.1)
    assert float(tree["other.weight"].abs().max()) < 0.05
    assert not torch.equal(weight[0], weight[1])
    assert torch.equal(target.start("module", 2)[1], target.space.values)


def test_sampling_leaves_the_callers_random_state_alone() -> None:
    target, pair = posterior(ZOO["batch norm"], build(ZOO["batch norm"])), data(ZOO["batch norm"])
    state = torch.get_rng_state()
    run = pt.sample(target, pair, sampler=pt.SGLD(1e-3), steps=4, init="prior", progress=False)
    run.predict(pair[0])
    run.summary()
    assert torch.equal(torch.get_rng_state(), state)

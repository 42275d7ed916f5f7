"""The one gradient formula: by hand, in its limits, by enumeration, and against the exact mean-field drift."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from partita.structure import Ensemble, Joint, Reservoir, Structured, Window, masks, partitions
from partita.structure.gradient import Bound, Gradient
from partita.structure.history import State
from partita.target.space import ParameterSpace

F64 = torch.float64
D = 4
LABELS = torch.tensor([0, 1, 1, 2])
SPACE = ParameterSpace.of_tensors({"theta": torch.zeros(D, dtype=F64)})
PARTITION = partitions.from_labels(LABELS)
CPU = torch.device("cpu")
Z = 5.0  # standard errors

L = torch.tensor(
    [[1.6, -0.5, 0.6, 0.3], [-0.5, 1.3, 0.4, -0.5], [0.6, 0.4, 1.8, 0.5], [0.3, -0.5, 0.5, 1.5]], dtype=F64
)
MU = torch.tensor([0.5, -1.0, 0.2, 2.0], dtype=F64)
OWN = (LABELS[:, None] == LABELS).to(F64)


def quadratic(phi: Tensor) -> tuple[Tensor, Tensor]:
    """½(φ - μ)'L(φ - μ)."""
    x = phi - MU
    return 0.5 * ((x @ L) * x).sum(-1), x @ L


def nonlinear(phi: Tensor) -> tuple[Tensor, Tensor]:
    """Σ sin(aφ) + x y² + xyzv: no symmetry a wrong formula could hide behind, and a product of all three groups."""
    a = torch.tensor([0.7, 1.3, -0.4, 2.0], dtype=F64)
    x, y, z, v = phi.unbind(-1)
    u = (a * phi).sin().sum(-1) + x * y * y + x * y * z * v
    return u, a * (a * phi).cos() + torch.stack([y * (y + z * v), x * (2 * y + z * v), x * y * v, x * y * z], -1)


WELLS = torch.tensor([0.3, 0.1, 0.8, 0.5], dtype=F64)


def prior(theta: Tensor) -> Tensor:
    """The gradient of U_prior = Σ c (θ - 1)⁴."""
    return 4 * WELLS * (theta - 1) ** 3


def no_prior(theta: Tensor) -> Tensor:
    return torch.zeros_like(theta)


@dataclass(frozen=True)
class Fixed:
    """A mask law that always gives these r [K, M]."""

    r: Any
    w: float

    def sample(self, C: int, M: int, device: torch.device) -> Tensor:
        return torch.tensor(self.r, device=device).expand(C, -1, -1)

    def weight(self, M: int) -> float:
        return self.w


def window(rows: Tensor) -> tuple[Window, State]:
    """A full history whose rows [C, R, D] are these."""
    history = Window(rows.shape[1], dtype="float64")
    state = history.init(rows[:, 0])
    state["rows"].copy_(rows)
    state["seen"].fill_(rows.shape[1])
    return history, state


def gradient(
    bound: Bound, theta: Tensor, state: State, chunk: int = 100, energy: Any = nonlinear, u0: Any = prior
) -> Gradient:
    return bound.gradient(theta, state, lambda phi, first: energy(phi), u0, chunk)


def starts(C: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(C, D, dtype=F64), torch.randn(C, 1, D, dtype=F64)


def test_the_energies_of_these_tests_have_these_gradients() -> None:
    theta = torch.randn(3, D, dtype=F64, requires_grad=True)
    quartic = lambda theta: ((WELLS * (theta - 1) ** 4).sum(-1), prior(theta))
    for energy in (quadratic, nonlinear, quartic):
        u, du = energy(theta)
        (expected,) = torch.autograd.grad(u.sum(), theta)
        torch.testing.assert_close(du, expected)


# ------------------------------------------------------------------------------------------------------------ by hand
HAND = {
    "boolean": Fixed([[True, False, True], [False, False, False], [False, True, True]], 0.7),
    "real": Fixed([[0.2, 1.5, -0.3], [0.9, 0.0, 1.0]], 1.9),
}


@pytest.mark.parametrize("mask", HAND.values(), ids=HAND)
@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("past", [1, 2])
def test_the_formula_by_hand(mask: Fixed, chunk: int, past: int) -> None:
    theta, row = starts()
    history, state = window(row)
    bound = Structured(PARTITION, mask, history, past).bind(SPACE, CPU)
    assert bound.passes == len(mask.r) * past
    assert bound.groups.count == 3
    before = theta.clone(), state["rows"].clone()
    found = gradient(bound, theta, state, chunk)
    g = prior(theta)
    energies = []
    for r_k in mask.r:  # with one row, all past draws of a mask are equal
        r = torch.tensor([float(r_k[m]) for m in LABELS], dtype=F64)
        u, du = nonlinear(r * theta + (1 - r) * row[:, 0])
        g = g + mask.w * r * du
        energies.append(u)
    torch.testing.assert_close(found.g, g, rtol=1e-6, atol=1e-6)  # r itself is float32
    torch.testing.assert_close(found.composed, torch.stack(energies).mean(0), rtol=1e-6, atol=1e-6)
    assert torch.equal(theta, before[0])
    assert torch.equal(state["rows"], before[1])


def test_what_is_evaluated_is_the_composition_chunk_by_chunk() -> None:
    theta, row = starts()
    history, state = window(row)
    seen = []

    def energy(phi: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(phi)
        return nonlinear(phi)

    bound = Structured(PARTITION, HAND["boolean"], history, past=2).bind(SPACE, CPU)
    gradient(bound, theta, state, 4, energy)
    assert [phi.shape[1] for phi in seen] == [4, 2]
    phi = torch.cat(seen, 1)
    r = torch.tensor(HAND["boolean"].r)[:, LABELS].repeat_interleave(2, 0)  # a mask's past draws stand side by side
    assert torch.equal(phi, torch.where(r, theta[:, None], row))  # to the bit: a whole value, never a mixture


def test_masks_are_drawn_once_a_step_and_for_each_chain() -> None:
    calls = []

    @dataclass(frozen=True)
    class Spy:
        def sample(self, C: int, M: int, device: torch.device) -> Tensor:
            calls.append((C, M))
            torch.rand(C)
            return torch.ones(C, 3, M, dtype=torch.bool, device=device)

        def weight(self, M: int) -> float:
            return 1 / 3

    theta, row = starts(C=5)
    history, state = window(row)
    before = torch.get_rng_state()
    bound = Structured(PARTITION, Spy(), history).bind(SPACE, CPU)
    assert torch.equal(torch.get_rng_state(), before)  # binding asks for a shape, and no random number is used up
    calls.clear()
    gradient(bound, theta, state, chunk=1)
    assert calls == [(5, 3)]


def test_chunks_do_not_change_the_masks() -> None:
    """Reads draw in another order, so the history's rows are equal here; the masks are drawn before all of them."""
    theta, row = starts()
    history, state = window(row.expand(-1, 6, -1))
    bound = Structured(PARTITION, masks.Bernoulli(0.4, count=5), history, past=3).bind(SPACE, CPU)
    results = []
    for chunk in (1, 2, 4, 15, 99):
        torch.manual_seed(7)
        results.append(gradient(bound, theta, state, chunk))
    for other in results[1:]:
        torch.testing.assert_close(other.g, results[0].g)
        torch.testing.assert_close(other.composed, results[0].composed)


# ------------------------------------------------------------------------------------------------------------- limits
LIMITS = {
    "rho = 1": (PARTITION, masks.Bernoulli(1.0), 1),
    "rho = 1, K = 2, J = 2": (PARTITION, masks.Bernoulli(1.0, count=2), 2),
    "conditional rho = 1": (PARTITION, masks.Bernoulli(1.0, nonzero=True), 1),
    "one group, conditional": (partitions.joint(), masks.Bernoulli(0.123, nonzero=True), 1),
    "one group, S": (partitions.joint(), masks.OneGroup(), 1),
    "one group, S 1 of 1": (partitions.joint(), masks.OneGroup(1), 1),
    "one stratum": (PARTITION, masks.Stratified(1), 1),
}


@pytest.mark.parametrize("partition, mask, past", LIMITS.values(), ids=LIMITS)
def test_limits_that_are_the_joint_gradient_to_the_bit(partition, mask, past) -> None:
    theta, _ = starts()
    history, state = window(torch.full((3, 4, D), math.nan, dtype=F64))  # the past must not matter at all
    joint = gradient(Joint().bind(SPACE, CPU), theta, {})
    found = gradient(Structured(partition, mask, history, past).bind(SPACE, CPU), theta, state)
    for a, b in zip(found, joint):
        assert torch.equal(a, b)
    assert torch.equal(joint.g, prior(theta) + nonlinear(theta)[1])
    assert torch.equal(joint.composed, nonlinear(theta)[0])


def test_joint() -> None:
    bound = Joint().bind(SPACE, CPU)
    assert (bound.passes, bound.history, bound.groups.count, bound.groups.name(0)) == (1, None, 1, "all")
    assert bound.init(torch.zeros(2, D)) == {}


def test_r_one_is_the_joint_gradient_for_real_masks_too() -> None:
    theta, _ = starts()
    history, state = window(torch.randn(3, 4, D, dtype=F64))
    found = gradient(Structured(PARTITION, masks.Gaussian(1.0, 0.0), history).bind(SPACE, CPU), theta, state)
    torch.testing.assert_close(found.g, gradient(Joint().bind(SPACE, CPU), theta, {}).g)


# ------------------------------------------------------------------------------------------- the past: averaged, fixed
def test_past_draws_average_and_reduce_only_their_own_variance() -> None:
    theta, _ = starts(1)
    C = 20_000
    history, state = window(torch.randn(1, 5, D, dtype=F64).expand(C, -1, -1))
    spread, mean = {}, {}
    for J in (1, 4):
        torch.manual_seed(J)
        bound = Structured(PARTITION, masks.OneGroup(), history, past=J).bind(SPACE, CPU)
        assert bound.passes == 3 * J
        g = gradient(bound, theta.expand(C, -1), state).g
        spread[J], mean[J] = g.var(0), g.mean(0)
    torch.testing.assert_close(spread[4], spread[1] / 4, rtol=0.06, atol=0)  # S: all its noise is the past's
    assert ((mean[1] - mean[4]).abs() < Z * (spread[1] * 1.25 / C).sqrt()).all()


def test_past_draws_are_held_fixed_even_where_they_are_present_states() -> None:
    """Ensemble draws may be the chain itself: φ then is θ, and still only r ⊙ ∇U may count."""
    theta, _ = starts(2)
    theta = theta[:1].expand(2, -1).clone().requires_grad_()  # both chains alike, so φ = θ whatever is drawn
    mask = Fixed([[True, False, False]], 1.0)
    bound = Structured(PARTITION, mask, Ensemble()).bind(SPACE, CPU)
    assert bound.history == Ensemble()
    g = gradient(bound, theta.detach(), bound.init(theta), u0=no_prior).g
    expected = torch.where(LABELS == 0, nonlinear(theta.detach())[1], 0.0)
    assert torch.equal(g, expected)


@pytest.mark.parametrize("history", [Window(3), Reservoir(3), Ensemble(2)], ids=lambda h: type(h).__name__)
def test_init_makes_the_state_the_gradient_reads(history: Any) -> None:
    theta, _ = starts(4)
    bound = Structured(PARTITION, masks.OneGroup(), history).bind(SPACE, CPU)
    state = bound.init(theta)
    g = gradient(bound, theta, state).g
    assert g.shape == theta.shape
    assert g.dtype == F64
    assert g.isfinite().all()
    if "rows" in state:  # one row, θ itself: S is the joint gradient there (up to the rows' float32)
        torch.testing.assert_close(g, gradient(Joint().bind(SPACE, CPU), theta, {}).g, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- unbiasedness
def near(g: Tensor, exact: Tensor) -> None:
    z = (g.mean(0) - exact) / (g.std(0) / math.sqrt(len(g)))
    assert z.abs().max() < Z, z


# w Σ_k of E r_i, of E r_i² and of E r_i r_j (two groups)
GAUSSIAN = {
    "S": (masks.OneGroup(), 1, 1, 0),
    "S 2 of 3": (masks.OneGroup(2), 1, 1, 0),
    "Bernoulli": (masks.Bernoulli(0.3, count=2), 1, 1, 0.3),
    "conditional": (masks.Bernoulli(0.3, count=2, nonzero=True), 1, 1, 0.3),
    "Stratified": (masks.Stratified(4), 1, 1, 1 / 4),
    "Uniform": (masks.Uniform(2), 1, 2 / 3, 1 / 2),
    "Uniform square": (masks.Uniform(2, "square"), 3 / 2, 1, 3 / 4),
    "Beta": (masks.Beta(0.5, 0.5), 1, 3 / 4, 1 / 2),
    "N(1, .5²)": (masks.Gaussian(1.0, 0.5), 1, 1.25, 1),
    "N(0, 1) square": (masks.Gaussian(0.0, 1.0, 2, "square"), 0, 1, 0),
}


@pytest.mark.parametrize("name", GAUSSIAN)
@pytest.mark.parametrize("past", [1, 2])
def test_the_mean_over_masks_and_past_draws_is_the_exact_gaussian_drift(name: str, past: int) -> None:
    """∇U_prior(θ) + w Σ_k E[r_k ⊙ L(φ_k - μ)] from moments of r and the history's mean m alone (brief 1.5)."""
    mask, first, own, cross = GAUSSIAN[name]
    C = 20_000
    theta, _ = starts(1, seed=3)
    rows = torch.randn(1, 5, D, dtype=F64) + 0.5
    m, x = rows[0].mean(0), theta[0]
    inside = own * x + (first - own) * m - first * MU  # E r(rx + (1-r)m - μ), r of the group itself
    across = cross * x + (first - cross) * m - first * MU  # E r_i(r_j x + (1-r_j)m - μ)
    exact = prior(theta)[0] + (L * OWN) @ inside + (L * (1 - OWN)) @ across
    history, state = window(rows.expand(C, -1, -1))
    bound = Structured(PARTITION, mask, history, past).bind(SPACE, CPU)
    torch.manual_seed(11)
    near(gradient(bound, theta.expand(C, -1), state, energy=quadratic).g, exact)


@pytest.mark.parametrize("mask", [masks.Bernoulli(0.4, count=2), masks.OneGroup(2), masks.Stratified(2)], ids=repr)
@pytest.mark.parametrize("past", [1, 3])
def test_the_mean_is_the_mean_field_gradient_of_a_nonlinear_energy(mask: Any, past: int) -> None:
    """By enumeration: every mask times every row of every group, each group's row independent of the others'."""
    C, R = 30_000, 3
    theta, _ = starts(1, seed=5)
    rows = torch.randn(1, R, D, dtype=F64)
    singles = {  # masks of one composition with their probabilities, times w K
        masks.Bernoulli: [(r, 0.4 ** sum(r) * 0.6 ** (3 - sum(r)) / 0.4) for r in itertools.product((0, 1), repeat=3)],
        masks.OneGroup: [(tuple(int(i == m) for i in range(3)), 1.0) for m in range(3)],
        masks.Stratified: [(r, 2 / 8) for r in itertools.product((0, 1), repeat=3)],
    }[type(mask)]
    exact = prior(theta)[0].clone()
    for r, weight in singles:
        keep = torch.tensor(r)[LABELS]
        for pick in itertools.product(range(R), repeat=3):
            past_draw = rows[0, torch.tensor(pick)[LABELS], torch.arange(D)]
            du = nonlinear(torch.where(keep == 1, theta[0], past_draw))[1]
            exact += weight / R**3 * keep * du
    history, state = window(rows.expand(C, -1, -1))
    torch.manual_seed(13)
    near(gradient(Structured(PARTITION, mask, history, past).bind(SPACE, CPU), theta.expand(C, -1), state).g, exact)


def test_an_ensembles_mean_gradient_uses_its_members_means() -> None:
    """Bernoulli: L_own(θ - μ) + L_cross(ρθ + (1-ρ)m - μ), m the mean of the members, the chain itself included."""
    theta = torch.tensor([[1.0, 0, 2, -1], [0, 3, 1, 1]], dtype=F64)
    bound = Structured(PARTITION, masks.Bernoulli(0.3), Ensemble(2)).bind(SPACE, CPU)
    C = 20_000
    torch.manual_seed(17)
    g = gradient(bound, theta.repeat(C, 1), {}, energy=quadratic, u0=no_prior).g.view(C, 2, D)
    for c in range(2):
        across = 0.3 * theta[c] + 0.7 * theta.mean(0) - MU
        near(g[:, c], (L * OWN) @ (theta[c] - MU) + (L * (1 - OWN)) @ across)


# ------------------------------------------------------------------------------------------------------ refusals, bind
def test_bind_puts_labels_on_the_device_and_refuses_a_law_that_does_not_fit() -> None:
    bound = Structured(PARTITION).bind(SPACE, torch.device("meta"))
    assert bound.groups.labels.device.type == "meta"
    assert bound.passes == 3
    assert Structured(PARTITION, masks.OneGroup(2), past=4).bind(SPACE, CPU).passes == 8
    with pytest.raises(ValueError, match="count=4, expected at most the number of groups, 3"):
        Structured(PARTITION, masks.OneGroup(4)).bind(SPACE, CPU)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"partition": "by_layer"}, ["partition='by_layer'", "pt.partitions.by_layer()"]),
        ({"partition": partitions.by_layer}, ["partition=<function by_layer", "pt.partitions.by_layer()"]),
        ({"mask": 0.5}, ["mask=0.5", "pt.masks.Bernoulli(0.5)"]),
        ({"mask": masks.Bernoulli}, ["mask=<class", "pt.masks.Bernoulli(0.5)"]),
        ({"history": 256}, ["history=256", "pt.Reservoir(256, every=10)"]),
        ({"history": Reservoir}, ["history=<class", "pt.Reservoir(256, every=10)"]),
        *[({"past": v}, [f"past={v!r}", "at least 1"]) for v in (0, -1, 1.0, "2", True)],
    ],
    ids=lambda v: str(v)[:30],
)
def test_a_structure_that_cannot_be_is_refused(arguments: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as e:
        Structured(**{"partition": PARTITION, **arguments})
    said = str(e.value)
    assert "\n" not in said
    assert all(w in said for w in words), said

"""MAP against the closed form, and step sizes against the exact heat of a Gaussian."""

import math

import pytest
import torch

import partita as pt
from partita.engine.step import Chains
from partita.runs.optimize import _last_cool, _take


def ridge(n=200, d=5, sigma=0.5, tau=0.7, seed=0):
    """A linear model, its data, and (weights, bias) of its exact MAP: (XᵀX/σ² + 1/τ²)⁻¹ Xᵀy/σ²."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    y = x @ torch.linspace(-1, 1, d)[:, None] + 0.3 + sigma * torch.randn(n, 1, generator=g)
    A = torch.cat([x, torch.ones(n, 1)], 1).double()
    exact = torch.linalg.solve(A.T @ A / sigma**2 + torch.eye(d + 1) / tau**2, A.T @ y.double() / sigma**2).flatten()
    target = pt.Posterior(torch.nn.Linear(d, 1), pt.Gaussian(sigma), prior=pt.Normal(tau))
    return target, (x, y), exact.float()


def test_optimize_reaches_the_map_of_ridge_regression():
    target, data, exact = ridge()
    found = pt.optimize(target, data, batch_size=200, chains=3, steps=800, lr=3e-2)
    assert found.theta.shape == (3, 6)
    assert (found.theta - exact).abs().max() < 1e-3
    energy = target.prior_energy(exact) + target.likelihood_energy(exact, data, 200)
    assert found.energy.shape == (800,)
    assert found.energy[-1].item() == pytest.approx(energy.item() / 200, rel=1e-4)
    assert found.energy[0] > found.energy[-1]
    module = found.module(2)
    assert torch.equal(torch.cat([module.weight.flatten(), module.bias]).detach(), found.theta[2])
    assert "energy per datum" in repr(found)


def test_optimize_comes_near_with_minibatches():
    target, data, exact = ridge()
    found = pt.optimize(target, data, batch_size=20, steps=1_000)
    scale = 0.5 / 200**0.5  # posterior sd
    assert (found.theta - exact).abs().max() < scale


def test_descend_is_adam_with_a_cosine():
    """Against torch.optim, step for step."""
    target, data, _ = ridge()
    start = torch.randn(2, 6)
    found = pt.optimize(target, data, batch_size=200, chains=2, steps=40, lr=0.05, init=start)
    theta = start.clone().requires_grad_()
    adam = torch.optim.Adam([theta], lr=0.05)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 40)
    for _ in range(40):
        adam.zero_grad()
        sum(target.prior_energy(t) + target.likelihood_energy(t, data, 200) for t in theta).div(200).backward()
        adam.step()
        cosine.step()
    torch.testing.assert_close(found.theta, theta.detach(), rtol=1e-4, atol=1e-5)


def test_optimize_a_density_and_repeat_it():
    bowl = pt.Density(lambda t: -((t - 3) ** 2).sum(), dim=4)
    go = lambda seed: pt.optimize(bowl, chains=2, steps=600, lr=0.1, seed=seed)
    assert (go(0).theta - 3).abs().max() < 1e-3
    assert torch.equal(go(1).theta, go(1).theta)
    with pytest.raises(ValueError, match="a Density has no module"):
        go(0).module()


def test_what_optimize_cannot_do_is_refused():
    bowl = pt.Density(lambda t: -((t - 3) ** 2).sum(), dim=4)
    for settings in ({"steps": 0}, {"steps": 1.5}, {"lr": 0.0}, {"lr": math.nan}, {"lr": "1"}):
        with pytest.raises(ValueError, match="expected a whole number of at least 1 and lr > 0"):
            pt.optimize(bowl, **settings)
    with pytest.raises(ValueError, match=r"diverged \(NaN or inf\) with lr=0.01, expected a smaller one"):
        pt.optimize(pt.Density(lambda t: torch.log(-t.abs().sum() - 1), dim=1), steps=3)


# -- find_step -------------------------------------------------------------------------------------------------------
# SGLD on N(0, 1/λ), T: θ⁺ = (1 - ελ/2) θ + N(0, εT) has Var θ = (T/λ) / (1 - ελ/4), so
#     heat = T + (ε/4) λ² Var θ = T / (1 - ελ/4) = 1.2 T   at   ελ = 4 (1 - 1/1.2) = 2/3
EXACT = 4 * (1 - 1 / 1.2)


def spacing(search):
    """How far apart neighbours of the chosen step are."""
    i = search.steps.index(search.step_size)
    return search.steps[i + 1] / search.step_size


@pytest.mark.parametrize("precision, T", ((1.0, 1.0), (25.0, 0.5)))
def test_find_step_finds_the_known_step_of_a_gaussian(precision, T):
    target = pt.Density(lambda t: -0.5 * precision * (t * t).sum(), dim=400, temperature=T)
    search = pt.find_step(target, sampler=pt.SGLD)
    exact = EXACT / precision
    assert exact / spacing(search) * 0.97 < search.step_size < exact * 1.03
    assert spacing(search) < 1.25
    assert list(search.steps) == sorted(search.steps)
    assert len(search.steps) == len(search.heat) == len(search.energy) == 24
    for size, heat in zip(search.steps, search.heat):
        lam = size * precision
        if 0.1 < lam < 1.0:  # warmed up, and not yet far from stationarity's validity
            assert heat == pytest.approx(1 / (1 - lam / 4), rel=0.03)
        if lam > 4.5:
            assert heat > 100
    marked = [line for line in str(search).splitlines() if line.endswith("<- chosen")]
    assert len(marked) == 1
    assert marked[0].startswith(f"{search.step_size:9.2e}")


def test_find_step_with_a_wider_limit_finds_a_larger_step():
    target = pt.Density(lambda t: -0.5 * (t * t).sum(), dim=400)
    for limit in (1.05, 1.5):
        search = pt.find_step(target, sampler=pt.SGLD, limit=limit, low=1e-2, high=4.0)
        exact = 4 * (1 - 1 / limit)
        assert exact / spacing(search) * 0.95 < search.step_size < exact * 1.04
        assert (search.steps[0], search.steps[-1]) == (1e-2, 4.0)


def test_find_step_does_not_take_a_chain_that_has_not_warmed_up_for_a_hot_one():
    """SGHMC starts at rest: tiny steps read far below T, and are no reason to stop there."""
    target = pt.Density(lambda t: -0.5 * (t * t).sum(), dim=400)
    search = pt.find_step(target, sampler=pt.SGHMC, steps=300)
    assert min(search.heat) < 0.1
    assert 0.2 < search.step_size < 1.0
    # the kinetic temperature of an exact Gaussian step, v⁺ = (1 - hγ) v - hθ + N(0, 2hγT), θ⁺ = θ + h v⁺
    h = search.step_size
    F = torch.tensor([[1 - h * h, h * (1 - h)], [-h, 1 - h]], dtype=torch.float64)
    q = torch.tensor([[h], [1.0]], dtype=torch.float64)
    cov = torch.linalg.solve(torch.eye(4) - torch.kron(F, F), (2 * h * q @ q.T).reshape(4)).reshape(2, 2)
    assert cov[1, 1] < 1.2 * 1.03
    assert search.heat[search.steps.index(h)] == pytest.approx(cov[1, 1].item(), rel=0.04)


def test_the_search_is_coarse_then_fine():
    """Half of the points span the range, the others lie between the chosen coarse one and the next."""
    target = pt.Density(lambda t: -0.5 * (t * t).sum(), dim=400)
    search = pt.find_step(target, sampler=pt.SGLD, low=1e-4, high=10.0, points=11, steps=100)
    coarse = [float(f"{x:.3g}") for x in torch.logspace(-4, 1, 6, dtype=torch.float64).tolist()]
    assert set(coarse) <= set(search.steps)
    fine = sorted(set(search.steps) - set(coarse))
    assert len(fine) == 5
    assert coarse[3] == 0.1
    assert all(0.1 < x < 1.0 for x in fine)


DIGITS = ((pt.SGLD, 300, 6e-4, 2.4e-3), (pt.PSGLD, 300, 0.02, 0.08), (pt.SGHMC, 500, 2e-3, 6e-3))


@pytest.mark.parametrize("sampler, steps, low, high", DIGITS)
def test_find_step_on_the_digits_is_sensible_and_repeatable(sampler, steps, low, high):
    """Bounds: long runs (6,000 steps) had heat 1.06, 1.14 T at ε = 7e-4, 1.2e-3 with SGLD; 1.08, 1.65 at .02, .05 with
    PSGLD; 1.09, 1.24, 1.59, 2.5 at h = 1.5e-3, 3e-3, 5e-3, 8e-3 with SGHMC."""
    data, _ = pt.data.digits()
    torch.manual_seed(0)
    target = pt.Posterior(pt.models.mlp(64, (32,), 10), pt.Categorical(), prior=pt.Normal(0.3))
    search = lambda seed: pt.find_step(
        target, data, sampler=sampler, steps=steps, map_steps=300, low=1e-4, high=0.3, points=16, seed=seed
    )
    found = [search(seed).step_size for seed in (0, 1)]
    assert all(low < s < high for s in found)
    assert max(found) / min(found) < 1.5


def test_find_step_keeps_the_settings_of_an_instance_and_its_own_ensembles(monkeypatch):
    target = pt.Density(lambda t: -0.5 * (t * t).sum(), dim=100)
    slow = pt.find_step(target, sampler=pt.SGHMC(1e-3, friction=8.0), steps=100)
    assert max(s for s, h in zip(slow.steps, slow.heat) if h < 10) < 0.5  # friction 8: unstable from h = 1/4 on
    structure = lambda size: pt.Structured(pt.partitions.each(), history=pt.Ensemble(size))
    for size in (None, 4):  # without ensembles of their own, one diverged chain takes all others with it
        search = pt.find_step(target, sampler=pt.SGLD, structure=structure(size), steps=60, points=16)
        assert max(search.heat) > 10
        assert search.step_size == pytest.approx(EXACT, rel=0.35)


def test_a_search_that_finds_nothing_says_where_it_looked():
    target = pt.Density(lambda t: -0.5e6 * (t * t).sum(), dim=10)
    with pytest.raises(ValueError, match=r"no step size from 1.0e-04 to 1.0e-01 stays below 1.2 T, expected one"):
        pt.find_step(target, sampler=pt.SGLD, low=1e-4, high=1e-1, steps=20, map_steps=2)
    calm = pt.Density(lambda t: -0.5 * (t * t).sum(), dim=10)
    search = pt.find_step(calm, sampler=pt.SGLD, low=1e-3, high=1e-2, points=6, steps=20)
    assert search.step_size == 1e-2  # the whole range is cool: there is nothing to refine
    assert len(search.steps) == 3


@pytest.mark.parametrize(
    "settings, match",
    (
        ({"limit": 1.0}, r"limit=1.0, expected a number above 1"),
        ({"limit": "2"}, r"limit='2', expected a number above 1"),
        ({"low": 1e-3}, r"low=0.001, high=None, expected both"),
        ({"low": 1.0, "high": 0.1}, r"low=1.0, high=0.1, expected both, 0 < low < high"),
        ({"low": 0.0, "high": 0.1}, r"0 < low < high"),
        ({"points": 3}, r"points=3, expected a whole number of at least 4"),
        ({"steps": 1}, r"steps=1, expected a whole number of at least 2"),
        ({"map_steps": 0}, r"map_steps=0, expected a whole number"),
        ({"sampler": "SGLD"}, r"sampler='SGLD', expected for example pt.SGLD"),
        ({"sampler": torch.optim.SGD}, r"expected for example pt.SGLD"),
        ({"seed": -1}, r"seed is -1, expected a whole number"),
    ),
)
def test_bad_settings_of_a_search_are_refused(settings, match):
    target = pt.Density(lambda t: -(t * t).sum(), dim=2)
    with pytest.raises(ValueError, match=match) as e:
        pt.find_step(target, **{"sampler": pt.SGLD, **settings})
    assert "\n" not in str(e.value)


def test_a_taken_chain_brings_its_state_along():
    """_take must pick what belongs to a chain and keep what all share."""
    C, D = 4, 4
    theta, V = torch.randn(C, D), torch.randn(C, D)
    shared, rows = torch.randn(D), torch.randn(C, 3, D)
    chains = Chains(theta, {"V": V, "n": torch.tensor(5.0), "scale": shared}, {"rows": rows})
    which = torch.tensor([2, 2, 0])
    taken = _take(chains, which)
    assert torch.equal(taken.theta, theta[which])
    assert torch.equal(taken.sampler["V"], V[which])
    assert torch.equal(taken.sampler["scale"], shared)
    assert taken.sampler["n"].item() == 5
    assert torch.equal(taken.history["rows"], rows[which])


def test_noise_in_the_curve_is_pooled():
    heat = lambda *values: [(i + 1.0, v, 0.0) for i, v in enumerate(values)]
    assert _last_cool(heat(0.1, 1.0, 1.1, 1.3, 1.6), 1.2) == 2
    assert _last_cool(heat(1.0, 1.25, 1.0, 1.1, 1.4), 1.2) == 3  # one unlucky point in front of cool ones
    assert _last_cool(heat(1.0, 1.25, 1.19, 1.4, math.inf), 1.2) == 0  # their mean is above
    assert _last_cool(heat(1.0, math.inf, 1.0, 1.0), 1.2) == 0  # one that diverged is no noise
    assert _last_cool(heat(1.3, 1.4), 1.2) == -1
    assert _last_cool(heat(1.0, 1.1), 1.2) == 1


def test_find_step_tells_the_heat_that_builds_up_later():
    """Noise of the gradient, sd s, heats SGHMC by hs²/2γ, at the pace of the friction: 500 small steps show a part of it.
    U = 0 but for that noise, so the heat is T + hs²/(2γ) at any h."""

    def noisy(theta):
        push = 60 * torch.randn(theta.shape, dtype=theta.dtype)
        return (push * theta).sum()

    target = pt.Density(noisy, dim=300)
    search = pt.find_step(target, sampler=pt.SGHMC, low=1e-5, high=1e-2, steps=500, limit=1.5)
    exact = lambda h: 1 + h * 60**2 / 2
    assert 0.5 < search.step_size / (2 * 0.5 / 60**2) < 2  # where exact(h) = 1.5
    for h, heat in zip(search.steps, search.heat):
        if 1e-4 * 8 < h < 5e-3:
            assert heat == pytest.approx(exact(h), rel=0.35)

"""What a run says of itself: temperature, mixing of coupled chains, and the verdict in plain words."""

import math
from dataclasses import replace

import pytest
import torch

import partita as pt
from partita.answers.summary import Mixing, measure
from partita.runs.monitors import TemperatureCheck

GAUSSIAN = pt.Density(lambda t: -0.5 * (t * t).sum(), dim=3)


# -- temperature -----------------------------------------------------------------------------------------------------
def check_of(theta, g):
    """theta, g [n, C, D] shown one state after another."""
    check = TemperatureCheck(theta[0])
    for t, h in zip(theta, g):
        check.see(t, h)
    return check


def test_the_temperature_check_is_the_covariance_of_state_and_gradient():
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 0, 1, 1])
    for n, offset in ((2, 0.0), (3, 5.0), (50, 1e4)):
        theta = torch.randn(n, 3, 5, dtype=torch.float64) + offset
        g = 0.3 * theta + torch.randn(n, 3, 5, dtype=torch.float64) - offset
        each = ((theta - theta.mean(0)) * (g - g.mean(0))).sum(0) / (n - 1)  # [C, D]
        expected = torch.stack([each[:, labels == m].mean(1) for m in (0, 1)], 1)
        torch.testing.assert_close(check_of(theta, g).groups(labels, 2), expected, rtol=1e-8, atol=1e-10)


def test_the_temperature_of_fewer_than_two_states_is_not_a_number():
    one = torch.randn(1, 2, 3)
    for check in (TemperatureCheck(one[0]), check_of(one, one)):
        assert check.groups(torch.tensor([0, 0, 1]), 2).isnan().all()


def test_sgld_on_a_gaussian_shows_the_temperature_of_its_finite_step_in_every_group():
    """E θg = λ Var θ = T / (1 - ελ/4), and T + (ε/4) E g² is the same number."""
    T, eps, scale = 0.5, 0.4, torch.tensor([1.0, 1.0, 4.0])
    target = pt.Density(lambda t: -0.5 * (scale * t * t).sum(), dim=3, temperature=T)
    groups = pt.partitions.from_labels([0, 0, 1])
    run = pt.sample(
        target,
        sampler=pt.SGLD(eps),
        structure=pt.Structured(groups, pt.masks.Bernoulli(1.0), pt.Window(1)),  # ρ = 1: the joint law, in two groups
        steps=2_000,
        burn_in=50,
        thin=1,
        chains=64,
    )
    exact = T / (1 - eps * torch.tensor([1.0, 4.0]) / 4)
    seen = run.temperature.mean(0)
    error = run.temperature.std(0) / 8
    low = torch.tensor([8.0, 2.0]) / 2_000  # a chain's own mean takes IAC/n of the variance with it
    assert (seen - exact * (1 - low)).abs().max() < 4 * error.max()
    assert (error < 0.01 * exact).all()  # so the test can tell .5 from .556
    torch.testing.assert_close(run.heat.mean(), (2 * exact[0] + exact[1]).float() / 3, rtol=0.01, atol=0)
    assert run.summary().temperature.shape == (2,)


def test_sghmc_heat_is_its_kinetic_temperature():
    run = pt.sample(
        pt.Density(lambda t: -0.5 * (t * t).sum(), dim=20, temperature=0.25),
        sampler=pt.SGHMC(0.05, friction=1.0),
        steps=1_500,
        chains=32,
    )
    assert run.heat.mean().item() == pytest.approx(0.25, rel=0.04)


# -- coupled chains --------------------------------------------------------------------------------------------------
def ar1(a, *shape):
    """Stationary AR(1) of variance 1 along the second axis."""
    x = torch.randn(*shape, dtype=torch.float64)
    x[:, 1:] *= math.sqrt(1 - a * a)
    for t in range(1, shape[1]):
        x[:, t] += a * x[:, t - 1]
    return x


@pytest.mark.parametrize("ensembles", (1, 3))
def test_the_ess_of_coupled_chains_is_var_over_the_variance_of_their_mean(ensembles):
    """Members s_t + e_ct: s shared (variance 1/2, IAC 9), e their own (variance 1/2, IAC 3). Then
    Var(estimate) = (½·9 + ½·3/size) / (ensembles · S), the shared part counted once."""
    torch.manual_seed(1)
    size, S, V = 6, 2_000, 60
    shared = ar1(0.8, ensembles, S, V).repeat_interleave(size, 0)
    x = (shared + ar1(0.5, ensembles * size, S, V)) * 0.5**0.5
    of_mean = (0.5 * 9 + 0.5 * 3 / size) / (ensembles * S)
    rhat, ess, iac, tail = measure(x, ensembles)
    assert bool(tail.isnan().all()) == (ensembles != len(x))
    assert ess.mean().item() == pytest.approx(1 / of_mean, rel=0.08)
    assert iac.mean().item() == pytest.approx(of_mean * ensembles * S / (0.5 + 0.5 / size), rel=0.08)
    assert rhat.median() < 1.02
    spread = x.mean((0, 1)).var()  # the variance the estimates really have, over V independent variables
    assert 0.45 < spread / of_mean < 1.7  # chi² of 59 degrees, 3 sd
    assert measure(x, ensembles * size)[1].mean() > 2 * ess.mean()  # as if independent: far too good


def test_independent_chains_are_measured_as_they_are():
    torch.manual_seed(0)
    x = ar1(0.5, 4, 500, 3)
    rhat, ess, iac, tail = measure(x, 4)
    assert torch.equal(tail, pt.diagnostics.ess(x, "tail"))
    assert torch.equal(ess, pt.diagnostics.ess(x))
    assert torch.equal(rhat, pt.diagnostics.rhat(x))
    assert torch.equal(iac, pt.diagnostics.iac(x))


def test_ensembles_apart_show_in_rhat_though_members_agree():
    torch.manual_seed(0)
    x = torch.randn(8, 200, 1)
    x[4:] += 3
    assert measure(x, 2)[0].item() > 1.5


def test_iac_is_told_in_steps():
    torch.manual_seed(0)
    x = ar1(0.8, 4, 3_000, 5)
    assert Mixing.of("x", x, 10, 4).iac_median == pytest.approx(90, rel=0.1)


# -- verdicts --------------------------------------------------------------------------------------------------------
def verdict(run):
    return "\n".join(run.summary().verdict)


def gaussian_run(**settings):
    settings = {"sampler": pt.SGLD(0.3), "steps": 1_500, "thin": 2, "chains": 4, **settings}
    return pt.sample(settings.pop("target", GAUSSIAN), **settings)


def test_chains_that_mixed_are_said_to_have_and_nothing_is_held_against_them():
    said = gaussian_run().summary().verdict
    assert len(said) == 1
    assert said[0].startswith("the parameters have mixed: R-hat at most 1.0")


def test_chains_stuck_in_different_modes_have_not_mixed():
    wells = pt.Density(lambda t: -10 * ((t * t - 4) ** 2).sum(), dim=1)
    said = verdict(gaussian_run(target=wells, sampler=pt.SGLD(2e-3), init=[[2.0], [-2.0]], chains=2))
    assert "these chains have not mixed" in said
    assert "100 % of the parameters" in said
    assert "have mixed" not in said


def test_chains_that_never_moved_are_said_not_to_have():
    said = verdict(gaussian_run(sampler=pt.SGLD(1e-30), init=torch.ones(3), steps=40))
    assert "R-hat of the parameters is undefined: they did not move" in said


def test_large_steps_run_hot():
    run = gaussian_run(sampler=pt.SGLD(1.6))
    assert run.summary().heat == pytest.approx(1 / (1 - 0.4), rel=0.05)
    assert "runs hot" in verdict(run)
    assert "take smaller steps" in verdict(run)


def test_unfinished_warming_up_runs_cold():
    run = gaussian_run(sampler=pt.SGHMC(1e-3), steps=60, thin=1, init="module")
    assert "runs cold" in verdict(run)


def structured(history):
    return pt.Structured(pt.partitions.each(), history=history)


def test_a_short_history_is_said_to_be_short():
    short = gaussian_run(structure=structured(pt.Window(20)))
    assert short.summary().history_span == 20
    assert "the history spans 20 steps" in verdict(short)
    assert "nearly the joint law" in verdict(short)
    for fine in (pt.Window(100, every=10), pt.Reservoir(50, every=2)):  # a reservoir's rows come from the whole run
        assert "the history spans" not in verdict(gaussian_run(structure=structured(fine)))


def test_the_span_of_a_history_is_what_it_can_have_seen():
    span = lambda h: gaussian_run(structure=structured(h), steps=60, burn_in=20).summary().history_span
    assert span(pt.Window(5, every=4)) == 20
    assert span(pt.Window(500)) == 60
    assert span(pt.Window(500, burn_in="drop")) == 50  # it starts anew in the middle of burn-in
    assert span(pt.Reservoir(5, every=4)) == 50
    assert span(pt.Reservoir(5, every=4, burn_in="keep")) == 60
    assert gaussian_run(structure=structured(pt.Ensemble()), steps=20, init="module").summary().history_span is None


class Coins:
    """A history whose past draws are 0 or 1 with probability a half."""

    every, warm_up, drops_burn_in, host = 1, 0, False, False

    def ensembles(self, C):
        return C

    def nbytes(self, C, D):
        return 0

    def span(self, steps):
        return None

    def init(self, theta):
        return {}

    def write(self, state, theta):
        return None

    def read(self, state, theta, labels, M, k, unread=None):
        return (torch.rand(theta.shape[0], k, M) < 0.5).to(theta.dtype)[:, :, labels]


def test_the_composition_gap_is_the_mean_energy_of_compositions_less_that_of_states():
    """U = 50 (θ₁ - θ₂)² at (0, 0) and (1, 1), where it is 0: half of all past values are the other one, which costs 50."""
    tied = pt.Density(lambda t: -50 * (t[0] - t[1]) ** 2, dim=2)
    init = torch.zeros(400, 2)
    init[200:] = 1.0
    run = pt.sample(tied, sampler=pt.SGLD(1e-14), structure=structured(Coins()), steps=1, chains=400, init=init)
    assert run.metrics[-1]["composition_gap"] == pytest.approx(25, rel=0.2)  # 4 sd of the mean of 800 coins
    assert "compositions cost" not in verdict(run)  # one draw says nothing yet


def test_a_partition_that_tears_the_network_apart_is_said_to():
    summary = gaussian_run(structure=structured(pt.Window(200, every=2))).summary()
    assert abs(summary.composition_gap) < 5
    torn = "\n".join(replace(summary, composition_gap=3.2, data=True).verdict)
    assert "compositions cost 3.20 nats a datum more than present states: the partition tears" in torn
    for fine in (0.5, -3.0, None):
        assert "compositions cost" not in "\n".join(replace(summary, composition_gap=fine, data=True).verdict)
    assert "compositions cost" not in "\n".join(replace(summary, composition_gap=3.2).verdict)  # a Density has no data


def test_an_early_stop_and_too_few_draws_are_told():
    run = gaussian_run(monitor=lambda m: "enough", monitor_every=1_000, burn_in=0)
    assert run.summary().verdict[0] == "the run ended early: stopped at step 1,000 by a monitor: enough"
    assert len(run.summary().verdict) >= 2
    few = gaussian_run(steps=4, burn_in=1, thin=1)
    assert few.summary().verdict == ["3 draws a chain are too few to judge: expected at least 4"]
    assert str(few.summary()).endswith("expected at least 4")


def test_coupled_chains_count_as_one():
    run = gaussian_run(structure=structured(pt.Ensemble()), init="module", chains=8, steps=800)
    summary = run.summary()
    assert (summary.chains, summary.ensembles) == (8, 1)
    assert "only one independent chain or ensemble" in verdict(run)
    assert "8 chains (1 independent ensembles) x 300 draws" in str(summary)
    two = gaussian_run(structure=structured(pt.Ensemble(4)), init="module", chains=8, steps=800)
    assert two.summary().ensembles == 2
    assert "only one independent" not in verdict(two)


def test_the_printed_summary_holds_the_numbers():
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    posterior = pt.Posterior(torch.nn.Linear(3, 2), pt.Categorical())
    run = pt.sample(posterior, (x, y), sampler=pt.SGLD(0.02), steps=300, chains=3)
    summary = run.summary()
    text = str(summary)
    assert [m.what for m in summary.mixing] == ["predictions", "parameters"]
    assert summary.mixing[0].variables == 32 * 2
    assert summary.mixing[1].variables == 8
    for part in (
        "3 chains x 225 draws",
        "predictions (64)",
        "parameters (8)",
        "temperature 1: E[(θ-θ̄)·g]",
        "step heat",
    ):
        assert part in text
    by_hand = pt.diagnostics.rhat(run.samples)
    assert summary.mixing[1].rhat_max == pytest.approx(by_hand.max().item())
    assert summary.mixing[1].ess_min == pytest.approx(pt.diagnostics.ess(run.samples).min().item())
    probs = run.predict(x[:32]).draws["probs"].log().reshape(3, 225, -1)
    assert summary.mixing[0].rhat_max == pytest.approx(pt.diagnostics.rhat(probs).max().item(), rel=1e-3)


def test_a_step_too_large_for_one_parameter_is_told_though_the_average_is_fine():
    """Heat of SGLD is T / (1 - ελ/4): 1.01 for nine parameters, 2.5 for the stiff one; on average 1.16."""
    stiff = torch.tensor([1.0] * 9 + [60.0])
    target = pt.Density(lambda t: -0.5 * (stiff * t * t).sum(), dim=10)
    run = pt.sample(target, sampler=pt.SGLD(0.04), steps=6_000, burn_in=1_000, thin=5, chains=8)
    exact = 1 / (1 - 0.04 * 60 / 4)
    assert run.hottest == pytest.approx(exact, rel=0.1)
    assert "the hottest parameter runs at temperature 2." in verdict(run)
    assert "the chain runs hot" not in verdict(run)
    few = replace(run.summary(), draws=40)
    assert "hottest parameter" not in "\n".join(few.verdict)


def test_notes_of_the_run_are_printed():
    assert "  what was said before" in str(replace(gaussian_run().summary(), notes=("what was said before",)))


def test_variables_stuck_at_a_value_of_their_own_are_unmixed_and_those_that_agree_say_nothing():
    torch.manual_seed(0)
    x = torch.randn(4, 200, 3)
    x[:, :, 1] = torch.arange(4.0)[:, None]  # each chain stuck elsewhere
    x[:, :, 2] = 7.0
    m = Mixing.of("parameters", x, 1, 4)
    assert m.rhat_max == math.inf
    assert (m.unmixed, m.ess_min) == (0.5, 1.0)
    assert math.isfinite(m.iac_max)

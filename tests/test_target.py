"""Likelihoods, priors, the energy and its scale, BatchNorm's policies: against torch.distributions and plain sums."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributions as D
from scipy import stats
from torch import Tensor, nn

import partita as pt
from partita.runs.inputs import make_batches
from partita.target.likelihoods import FromFunction, as_likelihood
from partita.target.posterior import forward_failed
from partita.target.space import ParameterSpace
from partita.target.trees import as_tensors

CPU = torch.device("cpu")


def refused(match: str, f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """One line, which says what came and what was expected."""
    with pytest.raises(ValueError, match=match) as e:
        f(*args, **kwargs)
    assert "\n" not in str(e.value)
    assert "expected" in str(e.value)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# --------------------------------------------------------------------------------------------------------- likelihoods
def test_categorical() -> None:
    logits, y = torch.randn(9, 4) * 3, torch.randint(4, (9,))
    expected = D.Categorical(logits=logits).log_prob(y)
    for labels in (y, y.to(torch.uint8), y.int()):
        torch.testing.assert_close(pt.Categorical().log_prob(logits, labels, {}), expected)
    torch.testing.assert_close(pt.Categorical().predict(logits, {})["probs"], logits.softmax(-1))


@pytest.mark.parametrize("ignore", [-100, 0, 3])
@pytest.mark.parametrize("shape", [(6, 5), (6, 2, 3)])
def test_categorical_over_tokens_sums_what_is_not_padding(ignore: int, shape: tuple[int, ...]) -> None:
    logits, y = torch.randn(*shape, 4), torch.randint(4, shape)
    if ignore < 0:
        y[torch.rand(shape) < 0.3] = ignore
    y[2] = ignore  # a row of nothing but padding
    kept = y != ignore
    each = D.Categorical(logits=logits).log_prob(torch.where(kept, y, 0)) * kept
    got = pt.Categorical(ignore=ignore).log_prob(logits, y, {})
    torch.testing.assert_close(got, each.flatten(1).sum(1))
    assert got[2] == 0
    pt.Categorical(ignore=ignore).check(logits, y)


@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_bernoulli(shape: tuple[int, ...]) -> None:
    logits, y = torch.randn(shape) * 3, torch.randint(2, shape)
    expected = D.Bernoulli(logits=logits).log_prob(y.float()).reshape(7, -1).sum(1)
    for labels in (y, y.float(), y.bool(), y.to(torch.uint8)):
        pt.Bernoulli().check(logits, labels)
        torch.testing.assert_close(pt.Bernoulli().log_prob(logits, labels, {}), expected)
    torch.testing.assert_close(pt.Bernoulli().predict(logits, {})["probs"], logits.sigmoid())
    assert bool(pt.Bernoulli().log_prob(torch.tensor([200.0]), torch.tensor([0]), {}).isfinite())


@pytest.mark.parametrize("shape", [(7,), (7, 3)])
@pytest.mark.parametrize("scale", [0.2, 3, np.float32(0.5), "learn"])
def test_gaussian(scale: Any, shape: tuple[int, ...]) -> None:
    likelihood = pt.Gaussian(scale, log_scale_loc=-1.0, log_scale_sd=0.5)
    log_scale = torch.tensor(-0.7)
    params = {"log_scale": log_scale} if scale == "learn" else {}
    sd = log_scale.exp() if scale == "learn" else torch.tensor(float(scale))
    mean, y = torch.randn(shape), torch.randn(shape)
    expected = D.Normal(mean, sd).log_prob(y).reshape(7, -1).sum(1)
    torch.testing.assert_close(likelihood.log_prob(mean, y, params), expected)
    torch.testing.assert_close(likelihood.log_prob(mean, y.double(), params), expected)  # NumPy's float64 targets
    said = likelihood.predict(mean, params)
    assert said["mean"] is mean
    torch.testing.assert_close(said["sd"], sd.expand(shape).float())
    if scale == "learn":
        torch.testing.assert_close(likelihood.prior_energy(params), -D.Normal(-1.0, 0.5).log_prob(log_scale))
    else:
        assert likelihood.parameters() == {}
        assert float(likelihood.prior_energy(params)) == 0


def test_half_precision_is_summed_in_float32() -> None:
    logits, y = (torch.randn(4, 300, 3) * 4).to(torch.bfloat16), torch.randint(3, (4, 300))
    for got, expected in (
        (pt.Categorical().log_prob(logits, y, {}), D.Categorical(logits=logits.float()).log_prob(y).sum(1)),
        (
            pt.Gaussian(0.1).log_prob(logits, logits.double() + 0.05, {}),
            D.Normal(logits.float(), 0.1).log_prob(logits.float() + 0.05).sum((1, 2)),
        ),
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)
    assert pt.Gaussian(0.1).predict(logits, {})["mean"].dtype == torch.float32


def test_a_learned_log_scale_is_in_theta_with_its_own_prior_and_is_sampled() -> None:
    likelihood = pt.Gaussian("learn", log_scale_loc=-1.0, log_scale_sd=0.5)
    model = nn.Linear(2, 1)
    target, known = (
        pt.Posterior(model, likelihood, pt.Normal(0.3)),
        pt.Posterior(model, pt.Gaussian(1.0), pt.Normal(0.3)),
    )
    assert target.space.names == ("weight", "bias", "likelihood.log_scale")
    assert float(target.space.values[-1]) == -1.0
    theta = torch.tensor([0.1, -0.4, 0.2, -0.6])
    extra = -D.Normal(-1.0, 0.5).log_prob(theta[-1])
    torch.testing.assert_close(target.prior_energy(theta), known.prior_energy(theta[:3]) + extra)

    x, y = torch.randn(64, 2), 0.05 * torch.randn(64, 1)
    run = pt.sample(
        target, (x, y), sampler=pt.PSGLD(3e-4), steps=500, burn_in=300, chains=2, init="map", progress=False
    )
    learned = run.samples[..., -1].exp()
    assert float(learned.mean()) == pytest.approx(0.05, rel=0.3)  # the prior alone says .37
    assert float(learned.std()) > 0
    assert torch.equal(run.predict(x[:3]).draws["sd"][:, 0, 0], learned.flatten())


def test_a_start_from_the_prior_draws_the_log_scale_too() -> None:
    target = pt.Posterior(nn.Linear(1, 1), pt.Gaussian("learn", log_scale_loc=2.0, log_scale_sd=0.5))
    start = target.start("prior", 2000)
    assert stats.kstest(start[:, -1].numpy(), stats.norm(2.0, 0.5).cdf).pvalue > 0.01
    assert set(target.start("fresh", 3)[:, -1].tolist()) == {2.0}


def test_a_plain_function_is_a_likelihood() -> None:
    model, x, y = nn.Linear(2, 3), torch.randn(8, 2), torch.randint(3, (8,))
    mine = pt.Posterior(model, lambda o, y: o.log_softmax(-1).gather(1, y[:, None])[:, 0])
    theirs = pt.Posterior(model, pt.Categorical())
    assert isinstance(mine.likelihood, FromFunction)
    theta = torch.randn(9)
    torch.testing.assert_close(mine.likelihood_energy(theta, (x, y), 80), theirs.likelihood_energy(theta, (x, y), 80))
    run = pt.sample(mine, (x, y), sampler=pt.SGLD(1e-3), steps=8, burn_in=2, thin=1, progress=False)
    prediction = run.predict(x)
    torch.testing.assert_close(prediction.draws["output"][0], run.module(0, 0)(x).detach())
    str(run.summary())
    refused(r"no 'probs', expected one of what it holds: output", lambda: prediction.probs)


def test_a_plain_function_may_use_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_sd = self.a(x).unbind(-1)
            return mean, log_sd

    target = pt.Posterior(Two(), lambda o, y: D.Normal(o[0], o[1].exp()).log_prob(y))
    x = torch.randn(8, 2)
    run = pt.sample(target, (x, torch.randn(8)), sampler=pt.SGLD(1e-3), steps=8, burn_in=2, thin=1, progress=False)
    draws = run.predict(x).draws
    assert {k: tuple(v.shape) for k, v in draws.items()} == {"output[0]": (24, 8), "output[1]": (24, 8)}
    str(run.summary())


@pytest.mark.parametrize(
    "function, came",
    [
        (lambda o, y: o.sum(), r"shape \(\)"),
        (lambda o, y: o.mean(), r"shape \(\)"),
        (lambda o, y: o[:, :1], r"shape \(8, 1\)"),
        (lambda o, y: o, r"shape \(8, 3\)"),
        (lambda o, y: o[:4, 0], r"shape \(4,\)"),
        (lambda o, y: 0.0, "float"),
        (lambda o, y: None, "NoneType"),
    ],
)
def test_anything_but_one_log_probability_per_datum_is_refused(function: Any, came: str) -> None:
    target = pt.Posterior(nn.Linear(2, 3), function)
    data = (torch.randn(8, 2), torch.zeros(8))
    refused(
        rf"returned {came} for 8 rows, expected \[B\] = \[8\].*neither summed nor averaged", target.check, data, data[1]
    )
    refused(rf"returned {came}", pt.sample, target, data, sampler=pt.SGLD(1e-3), steps=4)


CLASSES = torch.arange(6) % 3


@pytest.mark.parametrize(
    "likelihood, outputs, y, match",
    [
        (pt.Categorical(), 3, CLASSES + 1, r"indices from 1 to 3, expected 0 to 2 \(the network returns 3 logits\)"),
        (pt.Categorical(), 3, CLASSES - 1, r"indices from -1 to 1, expected 0 to 2"),
        (pt.Categorical(), 3, CLASSES.float(), r"dtype torch\.float32, expected integer class"),
        (pt.Categorical(), 3, CLASSES == 1, r"dtype torch\.bool, expected integer class"),
        (pt.Categorical(), 3, CLASSES[:, None], r"shape \(6, 1\), expected targets \[N\] for logits \[B, 3\]"),
        (pt.Categorical(), 3, torch.eye(3).long()[CLASSES], r"shape \(6, 3\), expected targets \[N\]"),
        (pt.Bernoulli(), 1, CLASSES, r"Bernoulli got targets of shape \(6,\), expected \[N, 1\].*\[B, 1\]"),
        (pt.Bernoulli(), 1, CLASSES[:, None], r"Bernoulli got targets from 0 to 2, expected 0 or 1"),
        (pt.Bernoulli(), 1, CLASSES[:, None] / 2, r"Bernoulli got targets from 0 to 1, expected 0 or 1"),
        (pt.Gaussian(), 1, torch.randn(6), r"Gaussian got targets of shape \(6,\), expected \[N, 1\]"),
        (pt.Gaussian(), 1, torch.randn(6, 2), r"Gaussian got targets of shape \(6, 2\), expected \[N, 1\]"),
        (pt.Gaussian(), 1, CLASSES[:, None], r"Gaussian got targets of dtype torch\.int64, expected a real floating"),
        (pt.Gaussian(), 1, CLASSES[:, None] * 1j, r"Gaussian got targets of dtype torch\.complex64, expected"),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood: Any, outputs: int, y: Tensor, match: str) -> None:
    target = pt.Posterior(nn.Linear(2, outputs), likelihood)
    refused(match, target.check, (torch.randn(6, 2), y), y)
    refused(match, pt.sample, target, (torch.randn(6, 2), y), sampler=pt.SGLD(1e-3), steps=4)


def test_every_target_is_looked_at_not_only_the_first() -> None:
    y = torch.zeros(500, dtype=torch.long)
    y[499] = 3
    refused(
        "from 0 to 3, expected 0 to 2",
        pt.sample,
        pt.Posterior(nn.Linear(2, 3), pt.Categorical()),
        (torch.randn(500, 2), y),
        sampler=pt.SGLD(1e-3),
        steps=4,
    )


def test_small_integers_are_not_taken_for_padding() -> None:
    """156 is what -100 becomes as a uint8."""
    y = torch.tensor([0, 1, 156, 2], dtype=torch.uint8)
    refused("class indices from 0 to 156, expected 0 to 2", pt.Categorical().check, torch.randn(4, 3), y)


def test_token_targets_that_do_not_fit_are_refused() -> None:
    logits = torch.randn(4, 5, 3)
    check = pt.Categorical().check
    refused(r"shape \(4,\), expected targets \[N, T\] for logits \[B, 5, 3\]", check, logits, torch.zeros(4).long())
    refused(r"shape \(4, 3\), expected targets \[N, T\]", check, logits, torch.zeros(4, 3).long())
    refused(r"shape \(4,\), expected targets \[N\] for logits \[B\]", check, torch.randn(4), torch.zeros(4).long())


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: pt.Gaussian(0), r"scale=0, expected a number above 0 or 'learn'"),
        (lambda: pt.Gaussian("learned"), r"scale='learned', expected"),
        (lambda: pt.Gaussian(math.nan), r"scale=nan, expected"),
        (lambda: pt.Gaussian(log_scale_sd=0), r"log_scale_sd=0, expected a number above 0"),
        (lambda: pt.Gaussian(log_scale_sd=math.nan), r"log_scale_sd=nan, expected"),
        (lambda: pt.Gaussian(log_scale_loc=None), r"log_scale_loc=None, expected a number"),
        (lambda: pt.Categorical(ignore=None), r"ignore=None, expected a whole number"),
        (lambda: as_likelihood(pt.Gaussian), r"likelihood is <class .*Gaussian.*expected pt\.Categorical\(\)"),
        (lambda: as_likelihood("categorical"), r"likelihood is 'categorical', expected"),
        (lambda: as_likelihood(nn.CrossEntropyLoss), r"CrossEntropyLoss.*expected"),
        (lambda: as_likelihood(D.Normal(0.0, 1.0)), r"a Normal without parameters.*expected the methods"),
        (lambda: pt.StudentT(df=0), r"df=0, expected a number above 0"),
        (lambda: pt.StudentT(df=math.inf), r"df=inf, expected a number above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], Any], match: str) -> None:
    refused(match, make)


# --------------------------------------------------------------------------------------------------- the energy's scale
def small(**options: Any) -> tuple[pt.Posterior, Tensor, tuple[Tensor, Tensor]]:
    target = pt.Posterior(pt.models.mlp(2, (4,), 3), pt.Categorical(), pt.Normal(0.5), **options)
    return target, 0.5 * torch.randn(target.space.dim), (torch.randn(12, 2), torch.randint(3, (12,)))


def direct(target: pt.Posterior, theta: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    """-Σ log p(y | x, θ) through an ordinary module."""
    return -D.Categorical(logits=target.module(theta)(data[0])).log_prob(data[1]).sum().detach()


def test_the_full_batch_gives_the_whole_sum() -> None:
    target, theta, data = small()
    torch.testing.assert_close(target.likelihood_energy(theta, data, 12), direct(target, theta, data))
    torch.testing.assert_close(
        target.prior_energy(theta), -D.Normal(0.0, 0.5).log_prob(theta).sum(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("B", [1, 2, 3])
def test_minibatches_give_the_whole_sum_on_average(B: int) -> None:
    """Exactly: over ALL batches of B of the 12 data."""
    target, theta, (x, y) = small()
    every = [list(rows) for rows in itertools.combinations(range(12), B)]
    mean = torch.stack([target.likelihood_energy(theta, (x[r], y[r]), 12) for r in every]).double().mean()
    torch.testing.assert_close(mean.float(), direct(target, theta, (x, y)))


def test_drawn_minibatches_give_the_whole_sum_on_average() -> None:
    target, theta, data = small()
    x, y = make_batches(data, 3, CPU).draw(4000)
    energy = torch.func.vmap(lambda x, y: target.likelihood_energy(theta, (x, y), 12))(x, y)
    standard_error = float(energy.std() / 4000**0.5)
    assert float(energy.mean()) == pytest.approx(float(direct(target, theta, data)), abs=4 * standard_error)
    assert standard_error < 0.05 * float(energy.mean())


def test_n_over_b_stands_in_one_place() -> None:
    """Twice the rows of one batch change nothing; N is linear; the prior sees neither."""
    target, theta, (x, y) = small()
    one = target.likelihood_energy(theta, (x, y), 100)
    torch.testing.assert_close(target.likelihood_energy(theta, (x.repeat(2, 1), y.repeat(2)), 100), one)
    torch.testing.assert_close(target.likelihood_energy(theta, (x, y), 300), 3 * one)
    assert target.log_likelihood(theta, (x, y)).shape == (12,)


def test_the_power_tempers_the_likelihood_alone_and_the_temperature_the_noise() -> None:
    target, theta, data = small()
    hot, _, _ = small(temperature=4.0)
    sharp, _, _ = small(likelihood_power=3.0)
    u, prior = target.likelihood_energy(theta, data, 50), target.prior_energy(theta)
    torch.testing.assert_close(sharp.likelihood_energy(theta, data, 50), 3 * u)
    assert torch.equal(sharp.prior_energy(theta), prior)
    assert torch.equal(hot.likelihood_energy(theta, data, 50), u)
    assert torch.equal(hot.prior_energy(theta), prior)

    def one_step(target: pt.Posterior) -> Tensor:
        """θ¹ of SGLD from θ⁰ = theta, full batch."""
        return pt.sample(
            target, data, sampler=pt.SGLD(1e-3), steps=1, burn_in=0, chains=1, batch_size=12, init=theta, progress=False
        ).samples[0, 0]

    g = theta.clone().requires_grad_()
    (target.likelihood_energy(g, data, 12) + target.prior_energy(g)).backward()
    drift = theta - 5e-4 * g.grad
    noise = one_step(target) - drift
    assert float(noise.std()) == pytest.approx(1e-3**0.5, rel=0.5)
    torch.testing.assert_close(one_step(hot) - drift, 2 * noise, rtol=1e-3, atol=1e-6)  # √T


@pytest.mark.parametrize("name", ["temperature", "likelihood_power"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "1", None, torch.ones(2)])
def test_temperatures_are_numbers_above_0(name: str, value: Any) -> None:
    refused(rf"{name} is .*, expected a number above 0", small, **{name: value})
    refused(rf"{name} is .*, expected", pt.Density, lambda t: -t.square().sum(), 2, **{name: value})


def test_numpy_numbers_are_numbers() -> None:
    target, _, _ = small(temperature=np.float32(0.5), likelihood_power=np.int64(2))
    assert (target.temperature, target.likelihood_power) == (0.5, 2.0)
    assert float(pt.Normal(np.float32(0.25)).bind(target.space).scale[0]) == 0.25


# -------------------------------------------------------------------------------------------------------------- priors
FAMILIES = {
    "normal": (lambda s, m: pt.Normal(s, loc=m), lambda s, m: D.Normal(m, s), lambda s, m: stats.norm(m, s)),
    "laplace": (lambda s, m: pt.Laplace(s, loc=m), lambda s, m: D.Laplace(m, s), lambda s, m: stats.laplace(m, s)),
    "student": (
        lambda s, m: pt.StudentT(5.0, s, loc=m),
        lambda s, m: D.StudentT(5.0, m, s),
        lambda s, m: stats.t(5.0, m, s),
    ),
    "cauchy": (
        lambda s, m: pt.StudentT(1.0, s, loc=m),
        lambda s, m: D.Cauchy(m, s),
        lambda s, m: stats.cauchy(m, s),
    ),
}


def space(n: int = 6) -> ParameterSpace:
    return ParameterSpace.of_tensors({"w": torch.randn(n), "b": torch.randn(2)})


@pytest.mark.parametrize("scale, loc", [(1.0, 0.0), (0.3, 0.0), (2.5, -0.7)])
@pytest.mark.parametrize("name", FAMILIES)
def test_prior_energies_are_those_of_torch_with_their_constants(name: str, scale: float, loc: float) -> None:
    prior, law, _ = FAMILIES[name]
    theta = 3 * torch.randn(8)
    expected = -law(torch.tensor(scale), torch.tensor(loc)).log_prob(theta).sum()
    torch.testing.assert_close(prior(scale, loc).bind(space()).energy(theta), expected)
    d = theta.clone().requires_grad_()
    e = theta.clone().requires_grad_()
    prior(scale, loc).bind(space()).energy(d).backward()
    law(torch.tensor(scale), torch.tensor(loc)).log_prob(e).sum().neg().backward()
    torch.testing.assert_close(d.grad, e.grad)


@pytest.mark.parametrize("scale, loc", [(1.0, 0.0), (2.5, -0.7)])
@pytest.mark.parametrize("name", FAMILIES)
def test_prior_samples_follow_the_prior(name: str, scale: float, loc: float) -> None:
    prior, _, law = FAMILIES[name]
    draws = prior(scale, loc).bind(space()).sample(1500)
    assert draws.shape == (1500, 8)
    assert bool(draws.isfinite().all())
    assert stats.kstest(draws.flatten().numpy(), law(scale, loc).cdf).pvalue > 0.01
    assert stats.kstest(draws.flatten().numpy(), law(scale * 1.1, loc).cdf).pvalue < 0.01  # and the test sees 10 %
    assert abs(stats.spearmanr(draws[:, 0], draws[:, 1]).statistic) < 0.1


def test_scales_per_pattern_and_the_first_match_wins() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    where = ParameterSpace.of_module(model)
    bound = pt.Normal({"1.weight": 0.1, "*.weight": pt.FanIn(2.0), "0.*": 7, "*": 0.5}).bind(where)
    scale = {b.name: set(bound.scale[b.start : b.stop].tolist()) for b in where.blocks}
    assert scale == {"0.weight": {1.0}, "0.bias": {7.0}, "1.weight": {float(torch.tensor(0.1))}, "1.bias": {0.5}}
    theta = torch.randn(where.dim)
    expected = -D.Normal(0.0, bound.scale).log_prob(theta).sum()
    torch.testing.assert_close(bound.energy(theta), expected)
    assert torch.equal(pt.Posterior(model, pt.Categorical(), pt.Normal(0.5)).prior_scale(), torch.full((23,), 0.5))


def test_fan_in_scales_by_the_inputs_of_a_neuron() -> None:
    model = nn.ModuleList([nn.Linear(4, 3), nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(2, 5, 3)])
    where = ParameterSpace.of_module(model)
    bound = pt.Laplace(pt.FanIn(1.5)).bind(where)
    scale = {b.name: float(bound.scale[b.start]) for b in where.blocks}
    assert scale["0.weight"] == pytest.approx(1.5 / 2)
    assert scale["1.weight"] == scale["2.weight"] == pytest.approx(1.5 / 18**0.5)
    assert scale["0.bias"] == scale["1.bias"] == 1.5


@pytest.mark.parametrize(
    "scale, match",
    [
        ({"0.*": 1.0}, r"no prior scale for parameter '1\.weight': got the patterns \['0\.\*'\], expected one"),
        ({"2.*": 1.0, "*": 1.0}, r"no parameter matches '2\.\*', expected a name such as"),
        ({"*": -1.0}, r"prior scale for '0\.weight' is -1\.0, expected a number above 0 or pt\.FanIn"),
        ({"*": "1"}, r"prior scale for '0\.weight' is '1', expected"),
        (0.0, r"prior scale for '0\.weight' is 0\.0, expected"),
        (None, r"prior scale for '0\.weight' is None, expected"),
        (math.inf, r"is inf, expected"),
        (pt.FanIn(0.0), r"is FanIn\(gain=0\.0\), expected"),
        (torch.rand(30, 30), r"prior scale for '0\.weight' is tensor.*, expected"),
    ],
)
@pytest.mark.parametrize("family", [pt.Normal, pt.Laplace, lambda s: pt.StudentT(3.0, s)])
def test_scales_that_do_not_fit_are_refused(family: Any, scale: Any, match: str) -> None:
    refused(match, pt.Posterior, nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), pt.Categorical(), family(scale))


@pytest.mark.parametrize("loc", ["modul", None, math.nan, torch.zeros(40, 40)])
def test_centres_that_make_no_sense_are_refused(loc: Any) -> None:
    refused(
        "prior loc is .*, expected a number or 'module'",
        pt.Posterior,
        nn.Linear(1, 1),
        pt.Gaussian(),
        pt.Normal(1, loc),
    )


@pytest.mark.parametrize("prior", [pt.Normal, 0.3, D.Normal(0.0, 1.0), "normal"])
def test_what_is_no_prior_is_refused(prior: Any) -> None:
    refused(r"prior is .*, expected pt\.Normal\(", pt.Posterior, nn.Linear(1, 1), pt.Gaussian(), prior)


def test_the_prior_is_standard_normal_unless_said() -> None:
    target = pt.Posterior(nn.Linear(2, 1), pt.Gaussian(1.0))
    theta = torch.randn(3)
    torch.testing.assert_close(target.prior_energy(theta), -D.Normal(0.0, 1.0).log_prob(theta).sum())


def test_the_centre_is_0_the_modules_own_values_or_1_for_the_scales_of_norms() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.GroupNorm(1, 3))
    where = ParameterSpace.of_module(model)
    bound = pt.Normal(0.1).bind(where)
    for b in where.blocks:
        norm = b.name in ("1.weight", "2.weight")
        assert set(bound.loc[b.start : b.stop].tolist()) == {1.0 if norm else 0.0}
    assert set(pt.Normal(0.1, loc=0.5).bind(where).loc.tolist()) == {0.5}  # said is said
    assert torch.equal(pt.Laplace(0.1, loc="module").bind(where).loc, where.values)
    sample = bound.sample(4000)
    assert float((sample - bound.loc).mean(0).abs().max()) < 0.01


# ----------------------------------------------------------------------------------------------------------- BatchNorm
def norm_net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 2))
    for _ in range(3):
        net(2 + torch.randn(32, 3))  # statistics of its own
    return net


def quiet(model: nn.Module, **options: Any) -> pt.Posterior:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pt.Posterior(model, pt.Categorical(), pt.Normal(1.0), **options)


def test_batch_norm_is_warned_about_once_and_only_when_it_couples_the_data() -> None:
    data = (torch.randn(24, 3), torch.randint(2, (24,)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = pt.sample(
            pt.Posterior(norm_net(), pt.Categorical()), data, sampler=pt.SGLD(1e-4), steps=6, burn_in=2, progress=False
        )
        run.predict(data[0])
        run.summary()
    assert [str(w.message)[:42] for w in said] == ["BatchNorm couples the data of a batch, so "]
    assert said[0].filename == __file__
    assert "'frozen'" in str(said[0].message)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pt.Posterior(norm_net(), pt.Categorical(), batchnorm="frozen")
        pt.Posterior(nn.Linear(2, 2), pt.Categorical())


def test_frozen_batch_norm_is_a_product_likelihood() -> None:
    """Running statistics, so the log-likelihood of a row does not depend on the others; recalibrate's does."""
    model = norm_net()
    x, y = torch.randn(16, 3), torch.randint(2, (16,))
    frozen, coupled = quiet(model, batchnorm="frozen"), quiet(model)
    theta = torch.randn(frozen.space.dim)
    all_rows, few = frozen.log_likelihood(theta, (x, y)), frozen.log_likelihood(theta, (x[:4], y[:4]))
    torch.testing.assert_close(all_rows[:4], few)
    twin = frozen.module(theta).eval()
    torch.testing.assert_close(all_rows, D.Categorical(logits=twin(x)).log_prob(y))
    assert torch.equal(twin[1].running_mean, model[1].running_mean)
    a, b = coupled.log_likelihood(theta, (x, y)), coupled.log_likelihood(theta, (x[:4], y[:4]))
    assert float((a[:4] - b).abs().max()) > 0.01
    assert frozen.recalibrate(theta, [x]) == {}
    run = pt.sample(frozen, (x, y), sampler=pt.SGLD(1e-4), steps=6, burn_in=2, chains=2, progress=False)
    assert run.statistics == {}


def test_batch_statistics_are_those_of_the_batch() -> None:
    model = norm_net()
    target = quiet(model)
    x, y = torch.randn(16, 3), torch.randint(2, (16,))
    theta = torch.randn(target.space.dim)
    twin = target.module(theta).eval()
    twin[1].train()
    torch.testing.assert_close(target.log_likelihood(theta, (x, y)), D.Categorical(logits=twin(x)).log_prob(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tracked", [True, False])
def test_recalibration_is_pytorchs_own_cumulative_average(tracked: bool, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    model.extend([nn.BatchNorm1d(5, affine=tracked), nn.Linear(5, 2)])
    model(torch.randn(4, 2, 5, 5))
    if not tracked:
        model[1] = nn.BatchNorm2d(3, track_running_stats=False)
    model = model.to(dtype)
    target = quiet(model)
    theta = torch.randn(target.space.dim, dtype=dtype)
    batches = [1 + torch.randn(8, 2, 5, 5, dtype=dtype) for _ in range(3)]
    statistics = target.recalibrate(theta, iter(batches))

    twin = target.module(theta).train()
    for i in (1, 5):
        twin[i] = type(model[i])(model[i].num_features, momentum=None, affine=model[i].affine).to(dtype)
        if model[i].affine:
            twin[i].weight, twin[i].bias = target.module(theta)[i].weight, target.module(theta)[i].bias
    with torch.no_grad():
        for x in batches:
            twin(x)
    assert set(statistics) == {
        f"{i}.{k}" for i in (1, 5) for k in ("running_mean", "running_var", "num_batches_tracked")
    }
    for name, value in statistics.items():
        torch.testing.assert_close(value, twin.get_buffer(name))
    x = torch.randn(3, 2, 5, 5, dtype=dtype)
    expected = twin.eval()(x).softmax(-1)
    torch.testing.assert_close(target.predict(theta, x, statistics)["probs"], expected)
    torch.testing.assert_close(target.module(theta, statistics).eval()(x).softmax(-1), expected)


def test_a_run_recalibrates_each_kept_draw_on_its_own_data() -> None:
    model, x, y = norm_net(), 3 + torch.randn(24, 3), torch.randint(2, (24,))
    target = quiet(model)
    run = pt.sample(
        target, (x, y), sampler=pt.SGLD(1e-3), steps=6, burn_in=2, thin=2, chains=2, batch_size=8, progress=False
    )
    assert run.statistics["1.running_mean"].shape == (2, 2, 5)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    for c, s in itertools.product(range(2), range(2)):
        expected = target.recalibrate(run.samples[c, s], x[order].split(8))
        for name, value in expected.items():
            torch.testing.assert_close(run.statistics[name][c, s], value)
    assert float((run.statistics["1.running_mean"][0, 0] - run.statistics["1.running_mean"][1, 0]).abs().max()) > 0.1


def test_frozen_needs_statistics_and_the_policy_a_known_name() -> None:
    bare = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    refused(r"batchnorm='frozen' got .* without running statistics, expected", quiet, bare, batchnorm="frozen")
    refused(r"batchnorm is 'freeze', expected one of", quiet, bare, batchnorm="freeze")


def test_dropout_is_off_in_the_energy_and_in_predictions() -> None:
    model = norm_net().train()
    target = quiet(model, batchnorm="frozen")
    x, y = torch.randn(16, 3), torch.randint(2, (16,))
    theta = torch.randn(target.space.dim)
    one = target.log_likelihood(theta, (x, y))
    assert torch.equal(one, target.log_likelihood(theta, (x, y)))
    tree = target.space.tree(theta)
    h = nn.functional.linear(x, tree["0.weight"], tree["0.bias"])
    h = nn.functional.batch_norm(h, model[1].running_mean, model[1].running_var, tree["1.weight"], tree["1.bias"])
    logits = nn.functional.linear(h.tanh(), tree["4.weight"], tree["4.bias"])
    torch.testing.assert_close(one, D.Categorical(logits=logits).log_prob(y))


# ------------------------------------------------------------------------------------------------- inputs as users have
def test_numpy_data_of_any_layout_gives_what_tensors_give() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2)).astype(np.float32), rng.integers(3, size=20)
    fixed = x.copy()
    fixed.flags.writeable = False
    target = pt.Posterior(nn.Linear(2, 3), pt.Categorical())
    sampled = lambda a, b: pt.sample(
        target, (a, b), sampler=pt.SGLD(1e-3), steps=5, burn_in=1, chains=2, batch_size=5, progress=False
    )
    run = sampled(torch.tensor(x), torch.tensor(y))
    probs = run.predict(torch.tensor(x)).probs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for a in (x, fixed, x.astype(">f4"), x[::-1][::-1], np.asfortranarray(x)):
            assert torch.equal(sampled(a, y.astype(">i8")).samples, run.samples)
            assert torch.equal(run.predict(a).probs, probs)
    assert run.predict(x).scores(y) == run.predict(x).scores(torch.tensor(y))
    with torch.inference_mode():
        frozen = torch.tensor(x)
    assert torch.equal(sampled(frozen, torch.tensor(y)).samples, run.samples)
    reversed_ = as_tensors(x[::-1])
    assert torch.equal(reversed_, torch.tensor(x).flip(0))


@pytest.mark.parametrize(
    "came, match",
    [
        (np.array(["a", "b"]), r"x is an array of dtype <U1, expected numbers"),
        (np.array([None, 1]), r"x is an array of dtype object, expected numbers"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), r"dtype datetime64\[D\], expected numbers"),
        (np.zeros(3, dtype=np.longdouble), r"expected one that torch has too"),
        ([1.0, 2.0], r"x\[0\] is a float, expected a tensor, an array"),
        ({"ids": [torch.zeros(1), "a"]}, r"x\['ids'\]\[1\] is a str, expected a tensor"),
        (None, r"x is a NoneType, expected a tensor"),
    ],
)
def test_what_is_no_data_is_refused(came: Any, match: str) -> None:
    refused(match, as_tensors, came)


def test_a_forward_pass_that_fails_says_with_what() -> None:
    target = pt.Posterior(nn.Linear(2, 3), pt.Categorical())
    y = torch.zeros(5, dtype=torch.long)
    sample = lambda x: pt.sample(target, (x, y), sampler=pt.SGLD(1e-3), steps=4)
    refused(
        r"forward pass failed with RuntimeError: .*got x \[5, 4\] float32 for a module of float32",
        sample,
        torch.randn(5, 4),
    )
    refused(r"got x \[5, 2\] float64 for a module of float32, expected", sample, torch.zeros(5, 2).double())
    refused(
        r"TypeError: .*got x\['a'\] \[5, 2\] float32, x\['b'\] \[5\] int64", sample, {"a": torch.zeros(5, 2), "b": y}
    )
    assert str(forward_failed(RuntimeError(), torch.zeros(1), torch.float32)).startswith(
        "the forward pass failed with R"
    )


@pytest.mark.parametrize(
    "model, x, match",
    [
        (nn.Flatten(0), torch.randn(6, 2), r"the network returned \(12,\) for 6 rows, expected \[6, \.\.\.\]"),
        (nn.LSTM(2, 3, batch_first=True), torch.randn(6, 4, 2), r"returned a tuple, expected a tensor: pass forward="),
        (nn.LSTM(2, 3), torch.randn(6, 4, 2), r"returned a tuple, expected a tensor"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(model: nn.Module, x: Tensor, match: str) -> None:
    model.more = nn.Parameter(torch.ones(1))
    y = torch.zeros(6, dtype=torch.long)
    refused(match, pt.Posterior(model, pt.Categorical()).check, (x, y), y)


def test_forward_is_a_function() -> None:
    refused(r"forward is 'logits', expected a function", pt.Posterior, nn.Linear(1, 1), pt.Gaussian(), forward="logits")


# ------------------------------------------------------------------------------------------------------------- density
def test_a_density_has_its_energy_and_keeps_its_prior_whole() -> None:
    target = pt.Density(
        lambda t: -t.square().sum(),
        shapes={"a": (2, 2), "b": ()},
        log_prior=lambda t: -t.abs().sum(),
        likelihood_power=3.0,
    )
    theta = torch.randn(5)
    torch.testing.assert_close(target.likelihood_energy(theta, None, 1), 3 * theta.square().sum())
    torch.testing.assert_close(target.prior_energy(theta), theta.abs().sum())
    assert target.space.names == ("a", "b")
    assert target.has_prior
    assert not pt.Density(lambda t: t.sum(), 2).has_prior
    assert pt.Density(lambda t: t.sum(), 2, dtype=torch.float64).start("prior", 3).dtype == torch.float64


@pytest.mark.parametrize(
    "args, options, match",
    [
        ((lambda t: t,), {"dim": 2}, r"log_prob gave shape \(2,\) for theta \[2\], expected a scalar tensor"),
        ((lambda t: 1.0,), {"dim": 2}, r"log_prob gave float"),
        (("f",), {"dim": 2}, r"log_prob is 'f', expected a function"),
        ((torch.sum,), {}, r"dim=None and shapes=None, expected exactly one"),
        ((torch.sum, 2), {"shapes": {"a": (2,)}}, r"expected exactly one"),
        ((torch.sum, 0), {}, r"dim=0, expected a whole number of at least 1"),
        ((torch.sum, 2.0), {}, r"dim=2\.0, expected"),
        ((torch.sum, 2), {"log_prior": lambda t: t}, r"log_prior gave shape \(2,\) for theta \[2\], expected a scalar"),
        ((torch.sum, 2), {"log_prior": 3}, r"log_prior gave int"),
    ],
)
def test_densities_that_do_not_fit_are_refused(args: Any, options: Any, match: str) -> None:
    refused(match, pt.Density, *args, **options)


@pytest.mark.parametrize("make", [lambda: small()[0], lambda: pt.Density(torch.sum, 2)])
def test_unknown_starts_are_refused(make: Any) -> None:
    refused(r"init is 'zeros', expected 'fresh', 'module'", make().start, "zeros", 2)

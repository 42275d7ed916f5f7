"""What must also hold on a GPU (skipped without one)."""

import warnings

import pytest
import torch

import partita as pt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

STRUCTURES = {
    "joint": pt.Joint(),
    "S": pt.Structured(pt.partitions.by_layer(), history=pt.Window(16)),
    "S_d": pt.Structured(pt.partitions.each(), pt.masks.Bernoulli(0.5, count=2, nonzero=True), pt.Reservoir(16)),
    "S_d beta": pt.Structured(pt.partitions.by_neuron(), pt.masks.Beta(), pt.Window(16, dtype="bfloat16")),
}


def digits_run(structure, device="cuda", seed=0, steps=60):
    data, _ = pt.data.digits()
    posterior = pt.Posterior(pt.models.mlp(64, (16,), 10), pt.Categorical(), prior=pt.Normal(0.3))
    return pt.sample(
        posterior, data, sampler=pt.PSGLD(1e-3), structure=structure, steps=steps, device=device, seed=seed
    )


@pytest.mark.parametrize("name", STRUCTURES)
def test_same_seed_same_numbers(name):
    a, b = digits_run(STRUCTURES[name]), digits_run(STRUCTURES[name])
    assert a.samples.device.type == "cpu"
    assert torch.equal(a.samples, b.samples)
    assert not torch.equal(a.samples, digits_run(STRUCTURES[name], seed=1).samples)


def test_the_generators_of_the_caller_stay_as_they_were():
    data, _ = pt.data.digits()
    posterior = pt.Posterior(pt.models.mlp(64, (16,), 10), pt.Categorical(), prior=pt.Normal(0.3))
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    pt.sample(posterior, data, sampler=pt.SGLD(1e-5), steps=20, device="cuda")
    assert torch.equal(cpu, torch.get_rng_state())
    assert torch.equal(cuda, torch.cuda.get_rng_state())


def test_batchnorm_network_samples_and_predicts():
    (x, y), (x_test, y_test) = pt.data.digits()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = pt.Posterior(
            pt.models.convnet(1, 10, width=8, norm="batch", image=(8, 8)), pt.Categorical(), prior=pt.Normal(0.3)
        )
    run = pt.sample(posterior, (x, y), sampler=pt.SGLD(1e-5), steps=20, chains=2, device="cuda")
    assert run.predict(x_test).scores(y_test)["nll"] > 0
    assert "chains" in str(run.summary())


def test_a_gaussian_has_its_law():
    """S on a 2-D Gaussian: variances 1/L_jj (finite step, ensemble of 256, to 5 standard errors)."""
    from partita.laws import exact

    L = torch.tensor([[1.5, 0.8], [0.8, 1.0]])
    target = pt.Density(lambda th: -0.5 * th @ (L.to(th) @ th), dim=2)
    run = pt.sample(
        target,
        sampler=pt.SGLD(0.4),
        structure=pt.Structured(pt.partitions.each(), history=pt.Ensemble(16)),
        steps=600,
        burn_in=100,
        thin=1,
        chains=2048,
        init=torch.zeros(2),
        spread=1.0,
        device="cuda",
    )
    cov = torch.tensor(
        exact.stationary_cov(L.numpy(), [0, 1], exact.one_hot(2), exact.Overdamped(0.4), ensemble=16).cov
    )
    x = run.samples.double().reshape(128, 16, -1, 2)
    second = torch.einsum("ecsi,ecsj->eij", x, x) / (16 * x.shape[2])
    z = (second.mean(0) - cov) / (second.std(0) / 128**0.5)
    assert z.abs().max() < 5

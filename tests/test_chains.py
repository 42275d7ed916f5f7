"""Energies of many chains: vmap against the loop, whole against in pieces, and what the probe finds before a run."""

import pytest
import torch
from torch import nn

import partita as pt
from partita.engine.chains import Energies
from partita.runs.choose import bytes_per_pass, choose_chains
from partita.runs.setup import chunk_size, device_of

C, K, B = 5, 3, 6


def mlp():
    return pt.Posterior(pt.models.mlp(4, (7,), 3, activation=nn.Tanh), pt.Categorical(), prior=pt.Normal(0.5))


def conv():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    return pt.Posterior(net, pt.Categorical())


def regression():
    return pt.Posterior(pt.models.mlp(4, (7,), 1, activation=nn.Tanh), pt.Gaussian("learn"), prior=pt.StudentT(3.0))


def batch_for(name, rows=B, chains=C):
    x = torch.randn(chains, rows, 1, 4, 4) if name == "conv" else torch.randn(chains, rows, 4)
    y = torch.randn(chains, rows, 1) if name == "regression" else torch.randint(3, (chains, rows))
    return x, y


TARGETS = {"mlp": mlp, "conv": conv, "regression": regression}


@pytest.fixture(params=TARGETS)
def case(request):
    """A target, compositions φ [C, K, D] of it, and a batch for each chain."""
    torch.manual_seed(0)
    target = TARGETS[request.param]()
    return target, 0.3 * torch.randn(C, K, target.space.dim), batch_for(request.param)


def close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-4)


def test_vmap_equals_the_loop(case):
    target, phi, batch = case
    fast, loop = Energies(target, 100, "vmap"), Energies(target, 100, "loop")
    close(fast.likelihood(phi, batch), loop.likelihood(phi, batch))
    close(fast.likelihood(phi[:, :1], batch), loop.likelihood(phi[:, :1], batch))  # one composition goes another way
    torch.testing.assert_close(fast.energy(phi[:, 0], batch), loop.energy(phi[:, 0], batch))
    torch.testing.assert_close(fast.energy(phi[:, 0], batch), fast.likelihood(phi[:, :1], batch)[0].squeeze(1))


def test_energies_are_those_of_the_target_and_gradients_theirs(case):
    """A third path: finite differences of the target's own energy, chain by chain with that chain's batch."""
    target, phi, batch = case
    u, du = Energies(target, 100).likelihood(phi, batch)
    direction = nn.functional.normalize(torch.randn(phi.shape[-1]), dim=0)
    for c, k in ((0, 0), (3, 2)):
        mine = (batch[0][c], batch[1][c])
        at = lambda s, c=c, k=k, mine=mine: target.likelihood_energy(phi[c, k] + s * direction, mine, 100)
        assert u[c, k].item() == pytest.approx(at(0.0).item(), rel=1e-5)
        slope = (at(1e-2) - at(-1e-2)).item() / 2e-2
        assert (du[c, k] @ direction).item() == pytest.approx(slope, rel=5e-3, abs=0.05)


def test_prior_energy_and_gradient(case):
    target, phi, _ = case
    theta = phi[:, 0]
    energies = Energies(target, 100)
    u, du = energies.prior_energy(theta), energies.prior(theta)
    for c in range(C):
        here = theta[c].clone().requires_grad_()
        energy = target.prior_energy(here)
        torch.testing.assert_close(u[c], energy.detach())
        torch.testing.assert_close(du[c], torch.autograd.grad(energy, here)[0])


@pytest.mark.parametrize("width", (1, 2, 4, 5, 9))
def test_chains_in_pieces_equal_all_at_once(case, width):
    target, phi, batch = case
    whole, pieces = Energies(target, 100), Energies(target, 100, width=width)
    close(whole.likelihood(phi, batch), pieces.likelihood(phi, batch))
    torch.testing.assert_close(whole.energy(phi[:, 0], batch), pieces.energy(phi[:, 0], batch))


def test_width_bounds_how_many_chains_go_at_once():
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            seen.append(torch._C._functorch.get_unwrapped(self.weight).shape[0])
            return super().forward(x)

    target = pt.Posterior(Spy(4, 3), pt.Categorical())
    phi = torch.randn(C, 1, target.space.dim)
    Energies(target, 100, width=2).likelihood(phi, batch_for("mlp"))
    assert seen == [2, 2, 1]


def test_a_density_has_no_batch_and_may_have_no_prior():
    density = pt.Density(lambda t: -(t**4).sum(), dim=3)
    phi = torch.randn(C, K, 3)
    for how in ("vmap", "loop"):
        u, du = Energies(density, 1, how).likelihood(phi, None)
        torch.testing.assert_close(u, (phi**4).sum(-1))
        torch.testing.assert_close(du, 4 * phi**3)
    energies = Energies(density, 1)
    u, du = energies.prior_energy(phi[:, 0]), energies.prior(phi[:, 0])
    assert u.shape == (C,)
    assert not u.any()
    assert not du.any()


def test_a_part_that_does_not_depend_on_theta_has_gradient_zero():
    flat = pt.Density(lambda t: torch.zeros(()), dim=3, log_prior=lambda t: -0.5 * (t**2).sum())
    phi = torch.randn(C, 1, 3)
    for how in ("vmap", "loop"):
        energies = Energies(flat, 1, how)
        assert torch.equal(energies.likelihood(phi, None)[1], torch.zeros(C, 1, 3))
    torch.testing.assert_close(energies.prior(phi[:, 0]), phi[:, 0])
    run = pt.sample(flat, sampler=pt.SGLD(0.5), steps=800, burn_in=50, thin=5, chains=64)
    assert run.samples.var().item() == pytest.approx(1 / (1 - 0.5 / 4), rel=0.05)


def test_gradients_do_not_leak_into_the_state():
    target = mlp()
    phi = torch.randn(C, 1, target.space.dim)
    kept = phi.clone()
    u, du = Energies(target, 100).likelihood(phi, batch_for("mlp"))
    assert torch.equal(phi, kept)
    assert not any(t.requires_grad for t in (phi, u, du))


# -- the probe -------------------------------------------------------------------------------------------------------
def two(batch):
    return batch[0][:2], batch[1][:2]


def test_the_probe_chooses_vmap_where_it_works():
    energies, reason = choose_chains(mlp(), 100, two(batch_for("mlp")))
    assert (energies.how, reason) == ("vmap", None)
    energies, reason = choose_chains(mlp(), 100, two(batch_for("mlp")), "loop")
    assert (energies.how, reason) == ("loop", None)


class Branching(nn.Linear):
    """What no vmap can follow: a branch on the data."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > -1e9 else -y


class Peeking(nn.Linear):
    """Wrong under vmap without an error: it treats its weight differently when it cannot see it as a plain tensor."""

    def forward(self, x):
        return super().forward(x) * (2.0 if torch._C._functorch.is_batchedtensor(self.weight) else 1.0)


def test_the_probe_falls_back_to_the_loop_with_a_reason():
    for module, match in ((Branching(4, 3), "data-dependent|control flow|item"), (Peeking(4, 3), "% off under vmap")):
        target = pt.Posterior(module, pt.Categorical())
        energies, reason = choose_chains(target, 100, two(batch_for("mlp")))
        assert energies.how == "loop"
        assert reason is not None
        assert "\n" not in reason
        with pytest.raises(ValueError, match=match):
            choose_chains(target, 100, two(batch_for("mlp")), "vmap")


def test_a_run_that_loops_says_why_and_samples_the_same_law():
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    run = pt.sample(
        pt.Posterior(Branching(4, 3), pt.Categorical()),
        (x, y),
        sampler=pt.SGLD(1e-2),
        steps=12,
        chains=2,
        batch_size=20,
    )
    plain = pt.sample(
        pt.Posterior(nn.Linear(4, 3), pt.Categorical()),
        (x, y),
        sampler=pt.SGLD(1e-2),
        steps=12,
        chains=2,
        batch_size=20,
    )
    assert run.settings["chains_run"] == "loop"
    assert "one after another" in run.settings["notes"][0]
    assert plain.settings["notes"] == []
    torch.testing.assert_close(run.samples, plain.samples, rtol=1e-4, atol=1e-5)


def test_a_likelihood_that_ignores_theta_is_refused():
    other = nn.Linear(4, 3)
    closure = pt.Posterior(nn.Linear(4, 3), pt.Categorical(), forward=lambda m, x: other(x))
    fixed = pt.Posterior(nn.Linear(4, 3), pt.Categorical(), forward=lambda m, x: x[:, :3])
    for target in (closure, fixed):
        with pytest.raises(
            ValueError, match=r"does not depend on theta.*expected.*forward must call the module it is given"
        ):
            pt.sample(target, (torch.randn(20, 4), torch.randint(3, (20,))), sampler=pt.SGLD(1e-3), steps=4)


# -- memory ----------------------------------------------------------------------------------------------------------
def test_bytes_of_a_pass_grow_with_the_batch_by_what_is_saved():
    target = mlp()
    need = {
        rows: bytes_per_pass(target, 100, (torch.randn(rows, 4), torch.randint(3, (rows,)))) for rows in (8, 16, 32)
    }
    assert need[16] - need[8] == (need[32] - need[16]) // 2 > 0
    row = (need[32] - need[16]) // 16
    assert row >= 4 * (4 + 7 + 3)  # input, hidden layer and log-probabilities of a row at least
    assert row <= 4 * 4 * (4 + 7 + 3)
    assert need[8] - 8 * row >= 6 * 4 * target.space.dim


def test_chunks_fill_the_budget_and_do_not_exceed_it():
    for passes, chains, one in ((8, 4, 1000), (1, 64, 77), (50, 1, 10), (3, 512, 12_345)):
        for budget in (1, 999, 5_000, 40_000, 10**9):
            chunk, width = chunk_size(passes, chains, one, budget)
            at_once = chunk * (chains if width is None else width)
            assert 1 <= chunk <= passes
            assert width is None or 1 <= width < chains
            assert at_once * one <= budget or at_once == 1
            full = chunk == passes and width is None
            assert full or (at_once + (chains if width is None else 1)) * one > budget  # no more would fit


def test_device_names():
    assert device_of("auto", torch.device("cpu")).type in ("cpu", "cuda")
    assert device_of("cpu", torch.device("cuda")).type == "cpu"
    for name in ("gpu", 3.5, None, "meta"):
        with pytest.raises(ValueError, match="expected 'auto', 'cpu' or 'cuda'"):
            device_of(name, torch.device("cpu"))


def test_a_module_that_fails_only_under_nested_vmap_falls_back_where_a_step_has_several_passes():
    tied = nn.Module()
    tied.embedding = nn.Embedding(7, 4, max_norm=0.5)
    tied.decoder = nn.Linear(4, 7, bias=False)
    tied.decoder.weight = tied.embedding.weight
    posterior = pt.Posterior(tied, pt.Categorical(), forward=lambda m, x: m.decoder(m.embedding(x).mean(1)))
    data = (torch.arange(24).reshape(12, 2) % 7, torch.arange(12) % 7)
    two_masks = pt.Structured(pt.partitions.each(), pt.masks.Bernoulli(0.5, count=2))
    run = pt.sample(posterior, data, sampler=pt.SGLD(1e-4), structure=two_masks, steps=4, chains=2)
    assert bool(run.samples.isfinite().all())


def test_a_gradient_that_fails_is_refused_in_one_line():
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no\nbackward")

    posterior = pt.Posterior(nn.Linear(2, 2), pt.Categorical(), forward=lambda m, x: NoBackward.apply(m(x)))
    with pytest.raises(ValueError, match="gradient of the likelihood failed") as caught:
        pt.sample(posterior, (torch.zeros(4, 2), torch.zeros(4).long()), sampler=pt.SGLD(1e-4), steps=4)
    assert "\n" not in str(caught.value)

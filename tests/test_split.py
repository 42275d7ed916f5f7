"""share="split": masks that share a minibatch out give the gradient of masks that all see it, on average."""

import pytest
import torch

import partita as pt
from partita.runs.setup import prepare, seeded

Z = 5.0  # standard errors
N, CHAINS, DRAWS = 24, 2000, 4
X = torch.linspace(-2, 2, N * 3).reshape(N, 3).sin()
Y = (X[:, 0] > 0).long()  # x and y sorted, as data often come

MASKS = {
    "S": pt.masks.OneGroup(),
    "Stratified": pt.masks.Stratified(2),
    "Bernoulli": pt.masks.Bernoulli(0.5, count=4),
    "Beta": pt.masks.Beta(count=2),
}


def gradients(mask, share: str, rows: int, how: str) -> torch.Tensor:
    """g [chains · draws, D] at one θ with one filled history, in which groups have moved."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        target = pt.Posterior(
            pt.models.mlp(3, (2,), 2, activation=torch.nn.Tanh), pt.Categorical(), prior=pt.Normal(1.0)
        )
    structure = pt.Structured(pt.partitions.by_layer(), mask, pt.Window(8), share=share)
    with seeded(0 if share == "batch" else 1, "cpu", target) as device:
        plan = prepare(
            target,
            (X, Y),
            structure,
            None,
            chains=CHAINS if how == "vmap" else 100,
            batch_size=rows,
            init="module",
            device=device,
            how=how,
        )
        states = plan.step.init(plan.theta)
        rows_of = torch.randn(8, target.space.dim, generator=torch.Generator().manual_seed(2))
        states.history["rows"].copy_(target.space.values + 0.5 * rows_of)
        states.history["seen"].fill_(8)
        chains = len(plan.theta)
        return torch.cat([plan.step.gradient(states, plan.step.batches.draw(chains)).g for _ in range(DRAWS)])


@pytest.mark.parametrize("rows", [N, 8])
@pytest.mark.parametrize("name", MASKS)
def test_split_is_unbiased(name, rows):
    both = [gradients(MASKS[name], share, rows, "vmap") for share in ("batch", "split")]
    a, b = (g.double() for g in both)
    error = ((a.var(0) / len(a)) + (b.var(0) / len(b))).sqrt()
    assert float(((a.mean(0) - b.mean(0)).abs() / error).max()) < Z
    assert float(a.mean(0).abs().max() / error.max()) > 20  # there is something to be wrong about


def test_split_in_the_loop_is_split_under_vmap():
    a, b = (gradients(MASKS["Stratified"], "split", 8, how).double() for how in ("vmap", "loop"))
    error = ((a.var(0) / len(a)) + (b.var(0) / len(b))).sqrt()
    assert float(((a.mean(0) - b.mean(0)).abs() / error).max()) < Z


def test_split_with_a_loader_that_does_not_shuffle_is_refused():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    target = pt.Posterior(pt.models.mlp(3, (2,), 2), pt.Categorical())
    structure = pt.Structured(pt.partitions.by_layer(), share="split")
    with (
        pytest.warns(UserWarning, match="does not shuffle"),
        pytest.raises(
            ValueError, match=r"share='split' got a DataLoader that does not shuffle, expected one that does"
        ),
    ):
        pt.sample(target, loader, sampler=pt.SGLD(1e-4), structure=structure, steps=4)


def test_a_map_start_sees_all_the_data_of_a_split_step():
    """The first half of the rows says nothing: a search on one piece alone would stay at the prior's mode, 0."""
    x = torch.cat([torch.zeros(32, 1), torch.linspace(-2, 2, 32)[:, None]])
    posterior = pt.Posterior(torch.nn.Linear(1, 1, bias=False), pt.Gaussian(0.1), prior=pt.Normal(1.0))
    structure = pt.Structured(pt.partitions.each(), pt.masks.Stratified(2), share="split")
    run = pt.sample(
        posterior,
        (x, 2 * x),
        sampler=pt.SGLD(1e-9),
        structure=structure,
        steps=2,
        chains=1,
        batch_size=64,
        init="map",
        thin=1,
    )
    assert float((run.samples - 2).abs().max()) < 0.05

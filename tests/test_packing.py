"""Packed tensors are the plain ones: values, shapes, energies, gradients; only memory and precision differ."""

import pytest
import torch
from torch import nn

import partita as pt
from partita.engine.chains import Energies
from partita.target.packing import Packing


def nets():
    torch.default_generator.manual_seed(0)
    yield "mlp", pt.models.mlp(6, (5,), 3), torch.randn(8, 6), torch.arange(8) % 3
    image = torch.randn(8, 3, 8, 8)
    yield "resnet", pt.models.resnet(3, 4, depth=8, width=8), image, torch.arange(8) % 4
    odd = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3, groups=1), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(256, 3).double()
    )
    yield "odd", Cast(odd), image, torch.arange(8) % 3


class Cast(nn.Module):
    """Mixed dtypes: a last layer in float64."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net[3](self.net[:3](x).double())


@pytest.fixture(params=["mlp", "resnet", "odd"])
def case(request):
    with torch.random.fork_rng():
        return next(c for c in nets() if c[0] == request.param)


def test_the_tree_of_psi_is_the_tree_of_theta(case):
    _, net, _, _ = case
    space = pt.Posterior(net, pt.Categorical()).space
    packing = Packing.of(space, None)
    theta = space.values
    assert torch.equal(theta[packing.order][packing.back], theta)
    plain, packed = space.tree(theta), packing.tree(theta[packing.order])
    assert set(plain) == set(packed)
    for name, t in plain.items():
        assert torch.equal(packed[name], t)
        assert packed[name].dtype == t.dtype
        if t.dim() == 4:
            assert packed[name].is_contiguous(memory_format=torch.channels_last)


def test_half_rounds_matrices_and_leaves_vectors(case):
    _, net, _, _ = case
    space = pt.Posterior(net, pt.Categorical()).space
    packing = Packing.of(space, torch.bfloat16)
    for name, t in packing.tree(space.values[packing.order]).items():
        plain = space.tree(space.values)[name]
        assert t.dtype == (torch.bfloat16 if plain.dim() > 1 else plain.dtype)
        assert torch.equal(t.to(plain.dtype), plain.to(t.dtype).to(plain.dtype))


def test_energy_and_gradient_are_those_of_theta(case):
    _, net, x, y = case
    posterior = pt.Posterior(net, pt.Categorical())
    plain = Energies(posterior, 100, "loop")
    packed = Energies(posterior, 100, "loop", packed=posterior.packed(None))
    theta = posterior.space.values
    (u, g), (v, h) = (e.value_and_gradient(theta, (x, y)) for e in (plain, packed))
    torch.testing.assert_close(v, u, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h, g, rtol=1e-4, atol=1e-5 * float(g.abs().max()))


def test_likelihood_parameters_are_packed_too():
    posterior = pt.Posterior(nn.Linear(2, 1), pt.Gaussian())
    x, y = torch.randn(4, 2), torch.randn(4, 1)
    plain, packed = (Energies(posterior, 10, "loop", packed=p) for p in (None, posterior.packed(None)))
    for a, b in zip(*(e.value_and_gradient(posterior.space.values + 0.1, (x, y)) for e in (plain, packed))):
        torch.testing.assert_close(a, b)

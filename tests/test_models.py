"""The small networks: sizes, names, shapes, and what they refuse."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from partita.models import convnet, mlp, resnet


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_mlp_has_the_papers_weights():
    assert size(mlp(784, (50, 50), 10, bias=False)) == 42_200
    assert size(mlp(784, (50, 50), 10)) == 42_310


def test_mlp_names_and_layers():
    model = mlp(4, [3], 2, activation=lambda: nn.LeakyReLU(0.2))
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert isinstance(model[1], nn.LeakyReLU)
    assert model(torch.zeros(5, 4)).shape == (5, 2)
    assert len(mlp(4, (), 2)) == 1


@pytest.mark.parametrize("norm", ["batch", "group", None])
def test_convnet_takes_any_image_size(norm):
    model = convnet(3, 10, width=4, norm=norm)
    for height, width in [(1, 1), (8, 8), (32, 17)]:
        assert model(torch.randn(2, 3, height, width)).shape == (2, 10)


def test_convnet_takes_flat_rows_under_the_same_names():
    flat, plain = convnet(1, 10, image=(8, 8)).eval(), convnet(1, 10).eval()
    flat.load_state_dict(plain.state_dict())
    x = torch.randn(5, 64)
    assert torch.equal(flat(x), plain(x.view(5, 1, 8, 8)))
    assert next(iter(plain.state_dict())) == "conv1.weight"


def test_convnet_runs_under_vmap():
    models = [convnet(1, 3, width=4, norm="group") for _ in range(2)]
    params, buffers = stack_module_state(models)
    x = torch.randn(5, 1, 6, 6)
    out = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(params, buffers)
    torch.testing.assert_close(out, torch.stack([m(x) for m in models]))


@pytest.mark.parametrize(
    "channels, norm, shortcut, count",
    [
        (3, "batch", "A", 269_722),  # He et al.'s 0.27 million
        (1, "batch", "A", 269_722 - 2 * 16 * 9),
        (3, "batch", "conv", 269_722 + 16 * 32 + 32 * 64 + 2 * (32 + 64)),
        (3, "group", "A", 269_722),
        (3, "frn", "A", 269_722 + 16 + 6 * (16 + 32 + 64)),  # a threshold for each channel of each normalisation
    ],
)
def test_resnet20_has_its_published_size(channels, norm, shortcut, count):
    model = resnet(channels, norm=norm, shortcut=shortcut)
    assert size(model) == count
    assert model(torch.randn(2, channels, 16, 16)).shape == (2, 10)


def test_resnet_depth_and_width():
    convolutions = lambda m: sum(isinstance(c, nn.Conv2d) for c in m.modules())
    assert convolutions(resnet(depth=20)) == 19  # and the linear layer
    assert convolutions(resnet(depth=32)) == 31
    assert resnet(depth=8, width=8)(torch.randn(2, 3, 9, 9)).shape == (2, 10)


@pytest.mark.parametrize("norm", ["frn", "group"])
def test_resnet_rows_are_independent_and_run_under_vmap(norm):
    model = resnet(1, 3, depth=8, width=8, norm=norm)
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(model(x)[:2], model(x[:2]), rtol=1e-4, atol=1e-5)
    params = {k: torch.stack([v, v + 0.01]) for k, v in model.named_parameters()}
    out = vmap(lambda p: functional_call(model, p, (x,)))(params)
    torch.testing.assert_close(out[0], model(x), rtol=1e-4, atol=1e-5)


def test_filter_response_norm_is_its_formula():
    from partita.models.resnet import FilterResponseNorm

    norm, x = FilterResponseNorm(2), torch.randn(3, 2, 4, 5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.5, -0.5]))
    for i in range(3):
        for c in range(2):
            nu2 = (x[i, c] ** 2).mean()
            expected = norm.weight[c] * x[i, c] / (nu2 + 1e-6).sqrt() + norm.bias[c]
            torch.testing.assert_close(norm(x)[i, c], expected)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: mlp(4, 50, 2), r"hidden=50, expected a sequence"),
        (lambda: mlp(4, (50, 0), 2), r"\[4, 50, 0, 2\], expected whole numbers"),
        (lambda: mlp(4, (5.0,), 2), r"5\.0.*expected whole numbers"),
        (lambda: mlp(4, (5,), 2, activation=nn.ReLU()), r"activation=ReLU\(\), expected"),
        (lambda: mlp(4, (5,), 2, activation=torch.relu), r"activation=.*expected"),
        (lambda: convnet(0, 10), r"channels=0, expected"),
        (lambda: convnet(1, 10, width=2.5), r"width=2\.5, expected"),
        (lambda: convnet(1, 10, norm="layer"), r"norm='layer', expected 'batch'"),
        (lambda: convnet(1, 10, image=8), r"image=8, expected \(height, width\)"),
        (lambda: resnet(0), r"channels=0, expected"),
        (lambda: resnet(depth=19), r"depth=19, expected 6n \+ 2"),
        (lambda: resnet(norm="layer"), r"norm='layer', expected 'frn', 'group' or 'batch'"),
        (lambda: resnet(norm="group", width=12), r"width=12 with norm='group', expected a multiple of 8"),
        (lambda: resnet(shortcut="B"), r"shortcut='B', expected 'A' or 'conv'"),
        (lambda: convnet(1, 10, image=(8, 0)), r"image width=0, expected"),
    ],
)
def test_wrong_arguments_say_what_was_expected(call, says):
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("norm", ["frn", "group", "batch"])
def test_nan_in_is_nan_out(norm):
    """An activation that picks the larger of two must not pick its threshold over NaN: overflow would look confident."""
    net = resnet(3, 4, depth=8, width=8, norm=norm)
    assert net(torch.full((2, 3, 8, 8), math.nan)).isnan().all()

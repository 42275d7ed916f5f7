"""The small networks: sizes, names, shapes, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from partita.models import convnet, mlp


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
        (lambda: convnet(1, 10, image=(8, 0)), r"image width=0, expected"),
    ],
)
def test_wrong_arguments_say_what_was_expected(call, says):
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)

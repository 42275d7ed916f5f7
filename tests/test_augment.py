"""Crops and flips: every image is a shifted, perhaps mirrored copy of itself, each by its own draw."""

import pytest
import torch
from torch.nn import functional as F

import partita as pt


def candidates(image, pad, flip):
    """All the images that a crop of `pad` and a flip can make of one, {(dy, dx, mirrored): image}."""
    H, W = image.shape[-2:]
    wide = F.pad(image, (pad,) * 4)
    made = {}
    for dy in range(2 * pad + 1):
        for dx in range(2 * pad + 1):
            crop = wide[:, dy : dy + H, dx : dx + W]
            made[dy, dx, False] = crop
            if flip:
                made[dy, dx, True] = crop.flip(-1)
    return made


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("pad", [0, 2])
def test_every_image_is_a_crop_of_itself_and_all_crops_occur(pad, flip):
    torch.manual_seed(0)
    x = torch.randn(2, 400, 3, 4, 5)
    out = pt.data.CropFlip(pad, flip)(x)
    assert out.shape == x.shape
    counts = {}
    for before, after in zip(x.flatten(0, 1), out.flatten(0, 1)):
        same = [k for k, v in candidates(before, pad, flip).items() if torch.equal(v, after)]
        assert len(same) == 1
        counts[same[0]] = counts.get(same[0], 0) + 1
    kinds = (2 * pad + 1) ** 2 * (1 + flip)
    assert len(counts) == kinds
    expected = 800 / kinds
    chi2 = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi2 < kinds + 5 * (2 * kinds) ** 0.5


def test_a_run_augments_inside_its_step():
    seen = []

    def record(x):
        seen.append(tuple(x.shape))
        return x * 0

    x, y = torch.randn(20, 1, 4, 4), torch.randint(3, (20,))
    posterior = pt.Posterior(pt.models.convnet(1, 3, width=4, norm="group"), pt.Categorical())
    run = pt.sample(posterior, (x, y), sampler=pt.SGLD(1e-4), steps=4, chains=2, batch_size=8, augment=record)
    assert seen == [(2, 8, 1, 4, 4)] * 4
    assert run.samples.isfinite().all()


@pytest.mark.parametrize("x, says", [(torch.zeros(3, 4), r"shape \(3, 4\)"), ((1, 2), "a tuple")])
def test_other_things_than_images_are_refused(x, says):
    with pytest.raises(ValueError, match=rf"CropFlip got {says}, expected images"):
        pt.data.CropFlip()(x)


def test_pad_is_a_whole_number():
    with pytest.raises(ValueError, match=r"pad=1\.5, expected a whole number"):
        pt.data.CropFlip(1.5)

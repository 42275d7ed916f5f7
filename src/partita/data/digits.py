"""The bundled digits: 1,797 grey images of 8x8 pixels, ten classes, nothing to download.

They are the test part of "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak (1998), UCI Machine
Learning Repository, doi 10.24432/C50P49, licensed under CC BY 4.0; `digits.npz` holds scikit-learn's copy
(`load_digits`) as unsigned bytes: images [1797, 64] with values 0..16, labels [1797].
"""

import io
from importlib import resources

import numpy as np
import torch
from torch import Tensor


def digits(test: int = 360, seed: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The digits in two parts, `(x, y), (x_test, y_test)`: x float32 [n, 64], y int64 [n].

    Every class has its share of the `test` images, to within one; which images those are, and the order in both parts,
    depend on `seed` alone. x is shifted and scaled by ONE mean and ONE standard deviation, those of the training part.

    Data: E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0.
    """
    packed = resources.files("partita.data").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    if not 0 < test < len(labels):
        raise ValueError(f"digits(test={test!r}): expected between 1 and {len(labels) - 1} test images")

    order = np.random.default_rng(seed).random(len(labels)).argsort()
    images, labels = images[order], labels[order]
    held_out = _stratified(labels, test)
    kept = images[~held_out]
    x = torch.from_numpy(((images - kept.mean()) / kept.std()).astype(np.float32))
    y = torch.from_numpy(labels.astype(np.int64))
    part = torch.from_numpy(held_out)
    return (x[~part], y[~part]), (x[part], y[part])


def _stratified(labels: np.ndarray, count: int) -> np.ndarray:
    """Mark `count` entries, from each class its share (largest remainders), the first of each class: bool [n]."""
    sizes = np.bincount(labels)
    share = sizes * count / len(labels)
    take = np.floor(share).astype(int)
    take[np.argsort(take - share, kind="stable")[: count - take.sum()]] += 1
    marked = np.zeros(len(labels), dtype=bool)
    for label, n in enumerate(take):
        marked[np.flatnonzero(labels == label)[:n]] = True
    return marked

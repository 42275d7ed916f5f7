"""Numbers in files: inputs from CSV or NPZ, predictions into either."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from partita.answers.predictive import Prediction


def inputs(path: Path) -> Tensor:
    """x of an NPZ file, or the numbers of a CSV file, one input a row; a first line without any number is a header."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}, expected a .csv or .npz file of inputs")
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as found:
            if "x" not in found.files:
                raise ValueError(f"{path} holds {', '.join(found.files) or 'nothing'}, expected an array x")
            x = torch.from_numpy(np.ascontiguousarray(found["x"]))
        return x.to(torch.get_default_dtype()) if x.is_floating_point() else x
    if path.suffix != ".csv":
        raise ValueError(f"{path} is a {path.suffix or 'nameless'} file, expected .csv or .npz")
    with path.open(newline="", encoding="utf-8-sig") as f:
        lines = [row for row in csv.reader(f) if row]
    header = bool(lines) and not any(_numbers([cell]) or not cell.strip() for cell in lines[0])
    lines = lines[header:]
    for i, row in enumerate(lines):
        if not _numbers(row) or len(row) != len(lines[0]):
            raise ValueError(
                f"row {i + 1 + header} of {path} is {','.join(row)[:60]!r}, expected {len(lines[0])} numbers"
            )
    if not lines:
        raise ValueError(f"{path} has no rows, expected at least one")
    return torch.tensor([[float(v) for v in row] for row in lines])


def _numbers(row: list[str]) -> bool:
    try:
        return all(np.isfinite(float(v)) for v in row)
    except ValueError:
        return False


def answers(p: Prediction) -> dict[str, np.ndarray]:
    """Columns {name: [n]}: probabilities, entropy and mutual information, or mean, sd and a 95 % interval."""
    if "probs" in p.draws:
        columns = _columns("p", p.probs)
        return {**columns, **_columns("entropy", p.entropy()), **_columns("mutual_information", p.mutual_information())}
    low, high = p.interval()
    named = {"mean": p.mean, "sd": p.sd, "low95": low, "high95": high}
    return {k: v for name, t in named.items() for k, v in _columns(name, t).items()}


def _columns(name: str, t: Tensor) -> dict[str, np.ndarray]:
    flat = t.reshape(t.shape[0], -1).numpy()
    return {name if t.dim() == 1 else f"{name}{j}": flat[:, j] for j in range(flat.shape[1])}


def check_out(path: Path) -> None:
    """Refused before any work is done."""
    if path.suffix not in (".csv", ".npz"):
        raise ValueError(f"out is {path}, expected a .csv or .npz file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"out is {path}, expected a file in a folder that exists")


def write(path: Path, columns: dict[str, np.ndarray]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **columns)  # type: ignore[arg-type]
    else:
        with path.open("w", newline="", encoding="utf-8") as f:
            out = csv.writer(f)
            out.writerow(columns)
            out.writerows([f"{v:.7g}" for v in row] for row in zip(*columns.values()))

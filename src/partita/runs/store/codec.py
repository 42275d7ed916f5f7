"""The safetensors format, written here because the store needs what the library leaves open: which tensor lies where,
keys in the order they came, and a header that is judged before anything is made of it.

    8 bytes, little endian: length of the header | header, JSON, padded with spaces | data
    header: {"__metadata__": {str: str}, name: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...}

Larger items lie first, so that every tensor is aligned. The header's keys keep the caller's order.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.runs.store.disk import StoreError

MOST_HEADER = 64 * 2**20
DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CARRIERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}  # numpy knows no bfloat16: bytes travel as integers


@dataclass(frozen=True)
class Entry:
    """One tensor: begin and end in bytes from the start of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """What a header says: where the data starts in the file, and the tensors in the order of the header."""

    start: int
    tensors: dict[str, Entry]
    metadata: dict[str, str]


def as_bytes(tensor: Tensor) -> np.ndarray:
    """uint8 [bytes] of a tensor, sharing its memory where it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def as_tensor(raw: np.ndarray, entry: Entry) -> Tensor:
    """The tensor whose bytes these are, sharing their memory."""
    if not raw.size:
        return torch.empty(entry.shape, dtype=entry.dtype)
    carrier = raw.view(CARRIERS[entry.dtype.itemsize])
    return torch.from_numpy(carrier).view(entry.dtype).reshape(entry.shape)


def order(tensors: dict[str, Tensor]) -> list[str]:
    """The names as the data lie: larger items first."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def header(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, align: int = 8) -> bytes:
    """Length and header; the data start at a multiple of `align`."""
    places, at = {}, 0
    for name in order(tensors):
        size = tensors[name].numel() * tensors[name].dtype.itemsize
        places[name] = [at, at + size]
        at += size
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or not isinstance(name, str) or name == "__metadata__":
            raise StoreError(f"tensor {name!r} is {tensor.dtype}, expected a name and one of {', '.join(DTYPES)}")
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places[name]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > MOST_HEADER:
        raise StoreError(f"the header of {len(tensors):,} tensors is {len(text):,} bytes, expected at most 64 MiB")
    return len(text).to_bytes(8, "little") + text


def encode(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> list[Any]:
    """The pieces of a whole file."""
    return [header(tensors, metadata), *(as_bytes(tensors[name]) for name in order(tensors))]


def decode(raw: bytearray, who: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, in the order they came in, and the metadata of a whole file; the tensors share its memory."""
    start = 8 + header_length(bytes(raw[:8]), len(raw), who)
    layout = parse(bytes(raw[:start]), len(raw), who)
    data = np.frombuffer(raw, np.uint8, offset=start) if len(raw) > start else np.empty(0, np.uint8)
    return {name: as_tensor(data[e.begin : e.end], e) for name, e in layout.tensors.items()}, layout.metadata


def header_length(first: bytes, size: int, who: str) -> int:
    """The length of the header, when the file of `size` bytes can hold it."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, MOST_HEADER):
        came = f"{size:,} bytes with a header of {length:,}" if len(first) == 8 else f"{size:,} bytes"
        raise StoreError(f"{who} is {came}, expected a whole safetensors file with a header of at most 64 MiB")
    return length


def parse(raw: bytes, size: int, who: str) -> Layout:
    """The layout that length and header `raw` of a file of `size` bytes describe; everything is checked."""
    try:
        table = json.loads(raw[8:], object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise StoreError(f"{who} has a header that is not JSON, expected a safetensors file") from None
    metadata = table.pop("__metadata__", {}) if isinstance(table, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise StoreError(f"{who} has a header that is no table of tensors, expected a safetensors file")
    tensors = {name: _entry(entry, f"tensor {name!r} in {who}") for name, entry in table.items()}
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise StoreError(f"tensor {name!r} in {who} begins at byte {entry.begin}, expected {at}")
        at = entry.end
    if len(raw) + at != size:
        raise StoreError(f"{who} is {size:,} bytes, expected {len(raw) + at:,}")
    return Layout(len(raw), tensors, metadata)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key came twice")
    return table


def _entry(entry: Any, who: str) -> Entry:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise StoreError(f"{who} is described by {str(entry)[:60]!r}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise StoreError(f"{who} has dtype {str(dtype)[:60]!r}, expected one of {', '.join(DTYPES)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise StoreError(f"{who} has {str(numbers)[:60]!r} for shape or offsets, expected whole numbers from 0")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise StoreError(f"{who} has offsets {str(offsets)[:60]}, expected {size:,} bytes for {dtype} {shape}"[:300])
    return Entry(DTYPES[dtype], tuple(shape), offsets[0], offsets[1])

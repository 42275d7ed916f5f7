"""The folder of a run: draws, checkpoints, what is fixed, what was watched. Nothing in it is ever half-written, no
acknowledged draw is lost, no damaged byte is returned, and a draw on disk reads like a tensor.

    run.json                   what the run is; "format": 1; the sha256 of itself, fixed.safetensors and recipe.toml
    recipe.toml                the experiment as text (optional)
    fixed.safetensors          tensors that are not random
    metrics.jsonl              one JSON line a record
    group-000/                 the chains that one process steps together, with one writer
        draws-<first>-<n>-<root>.safetensors    immutable (shards.py)
        ckpt-<next>-<sha256>.safetensors        the newest two (checkpoints.py)
        lease.json, lock                        who writes (lease.py)
"""

from partita.runs.store.checkpoints import newest as checkpoint
from partita.runs.store.disk import StoreError
from partita.runs.store.draws import Draws
from partita.runs.store.folder import about, create, fixed, note, notes, recipe, update
from partita.runs.store.reader import SampleReader
from partita.runs.store.writer import SampleWriter

__all__ = [
    "Draws",
    "SampleReader",
    "SampleWriter",
    "StoreError",
    "about",
    "checkpoint",
    "create",
    "fixed",
    "note",
    "notes",
    "recipe",
    "update",
]

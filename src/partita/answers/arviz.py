"""Export to ArviZ: posterior draws under the module's own names and shapes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from partita.answers.cite import version
from partita.answers.predictive import Prediction


def to_arviz(run: Any, parameters: Sequence[str] | None = None, test: tuple[Any, Any] | None = None) -> Any:
    """The run as ArviZ data: an xarray DataTree (ArviZ 1.x, or arviz-base alone), or an InferenceData (ArviZ 0.x).

    posterior                   {name: [chain, draw, *shape]} of all parameters, or those whose names match the patterns
    sample_stats                the step each draw was kept at
    predictions                 with test=(x, y): what each draw predicts, [chain, draw, *event]
    predictions_constant_data   the targets y

    There is no log-likelihood: of test data it would invite leave-one-out estimates, which are of training data.
    """
    make = _maker()
    C, S, _ = run.samples.shape
    if S == 0:
        raise ValueError("the run has 0 draws, expected at least 1 to export")
    blocks = run.space.blocks if parameters is None else run.space.select(parameters)
    posterior = {}
    for b in blocks:  # a block at a time: samples may lie on disk
        columns = torch.as_tensor(run.samples[:, :, b.start : b.stop]).reshape(C, S, *b.shape)
        posterior[b.name] = _numbers(columns.to(b.dtype))
    groups = {"posterior": posterior}
    if len(run.steps) == S:
        groups["sample_stats"] = {"step": np.tile(np.asarray(run.steps), (C, 1))}
    if test is not None:
        x, y = test
        groups["predictions"] = _by_chain(run.predict(x), C, S)
        groups["predictions_constant_data"] = {"y": np.asarray(y)}
    if run.ensembles != C:
        warnings.warn(
            f"these {C} chains are coupled in {run.ensembles} ensemble(s): ArviZ takes them for independent, so trust "
            "run.summary() for R-hat and ESS",
            stacklevel=2,
        )
    return make(groups, _attributes(run))


def _maker() -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    try:
        from arviz_base import from_dict
    except ImportError:
        try:
            from arviz import from_dict as old
        except ImportError:
            raise ImportError("to_arviz needs ArviZ: pip install 'partita[arviz]'") from None
        return lambda groups, attrs: old(**groups, attrs=attrs)
    return lambda groups, attrs: from_dict(groups, attrs={"/": attrs, "posterior": attrs})


def _attributes(run: Any) -> dict[str, Any]:
    """Text and numbers only, so that every file format takes them."""
    settings = json.dumps(run.settings, default=str)
    return {
        "inference_library": "partita",
        "inference_library_version": version(),
        "ensembles": run.ensembles,
        "stopped": run.stopped or "",
        "settings": settings,
    }


def _numbers(t: torch.Tensor) -> np.ndarray:
    """NumPy has no bfloat16."""
    return (t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy()


def _by_chain(prediction: Prediction, C: int, S: int) -> dict[str, np.ndarray]:
    kept = next(iter(prediction.draws.values())).shape[0]
    if kept != C * S:
        raise ValueError(f"test predictions were thinned to {kept:,} of {C * S:,} draws, expected all: pass fewer rows")
    return {k: _numbers(v).reshape(C, S, *v.shape[1:]) for k, v in prediction.draws.items()}

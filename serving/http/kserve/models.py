"""What is said of the one model: which it is, its tensors, its configuration, its statistics."""

from typing import Any

from starlette.requests import Request

from spmd.serving.engine.batches import sizes_of, why_not_joined
from spmd.serving.engine.infer import NAMES, TensorSpec
from spmd.serving.engine.statistics import Statistics, Tally
from spmd.serving.errors import ApiError
from spmd.serving.http.language import Loaded
from spmd.serving.http.requests import service_of

VERSION = "1"
"""Of the model: there is one."""


def asked_model(request: Request) -> Loaded:
    """The model that a path names, if it is ready.

    Raises:
      ApiError: it is not, or has another name or version.
    """
    loaded = service_of(request).require(request.path_params["model"])
    version = request.path_params.get("version", VERSION)
    if version != VERSION:
        raise ApiError(
            404,
            f"{loaded.name} has no version {version[:40]!r}; it has {VERSION}",
            code="model_not_found",
        )
    return loaded


def metadata_of(loaded: Loaded) -> dict[str, Any]:
    """Names, datatypes and shapes of its tensors; a language model has none."""
    infer = loaded.infer
    return {
        "name": loaded.name,
        "versions": [VERSION],
        "platform": "spmd",
        "inputs": [_tensor(spec) for spec in infer.inputs] if infer else [],
        "outputs": [_tensor(spec) for spec in infer.outputs] if infer else [],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": NAMES[spec.dtype], "shape": list(spec.shape)}


def config_of(loaded: Loaded) -> dict[str, Any]:
    """The model as Triton's model configuration describes one."""
    infer = loaded.infer
    sizes = sizes_of(infer) if infer else ()
    skipped = 1 if sizes else 0  # dims leave out the batch where there is one
    config: dict[str, Any] = {
        "name": loaded.name,
        "platform": "spmd",
        "backend": "spmd",
        "version_policy": {"specific": {"versions": [int(VERSION)]}},
        "max_batch_size": sizes[-1] if sizes else 0,
        "input": [_configured(spec, skipped) for spec in infer.inputs] if infer else [],
        "output": [_configured(spec, skipped) for spec in infer.outputs] if infer else [],
    }
    if sizes:
        config["dynamic_batching"] = {
            "preferred_batch_size": list(sizes),
            "max_queue_delay_microseconds": 0,
            "preserve_ordering": False,
        }
    note = why_not_joined(infer) if infer else ""
    if note:
        config["parameters"] = {"not_batched": {"string_value": note}}
    return config


def _configured(spec: TensorSpec, skipped: int) -> dict[str, Any]:
    dims = list(spec.shape[skipped:])
    return {"name": spec.name, "data_type": f"TYPE_{NAMES[spec.dtype]}", "dims": dims}


def statistics_of(loaded: Loaded, told: Statistics) -> dict[str, Any]:
    """What it has done, as Triton's extension for statistics has it."""
    nothing = _tally(Tally())
    success, infer = told.success, told.infer
    return {
        "name": loaded.name,
        "version": VERSION,
        "last_inference": told.last_ms,
        "inference_count": told.rows,
        "execution_count": told.calls.count,
        "inference_stats": {
            "success": _tally(success),
            "fail": _tally(told.fail),
            "queue": _tally(told.queue),
            "compute_input": nothing,  # reading and writing are not the model's
            "compute_infer": _tally(infer),
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": nothing,
                "compute_infer": _tally(tally),
                "compute_output": nothing,
            }
            for size, tally in sorted(told.batches.items())
        ],
    }


def _tally(tally: Tally) -> dict[str, int]:
    return {"count": tally.count, "ns": round(tally.seconds * 1e9)}

"""A Llama's bundle as the engine wants it."""

from __future__ import annotations

from typing import Any

from serving.bundle.bundle import Bundle
from serving.bundle.function import BundleError
from serving.engine.backend import Limits
from serving.engine.model_backend import ModelBackend
from spmd.mesh.topology import Topology

KIND = "llama"
EMBEDDING = "weights/embed_tokens/"


def model_backend(bundle: Bundle) -> ModelBackend:
    """What the engine runs: a Llama's bundle.

    Raises:
      BundleError: it is of something else.
    """
    contract = bundle.manifest.contract
    if contract.get("kind") != KIND:
        kind = repr(contract.get("kind"))[:40]
        raise BundleError(f"{bundle.manifest.name} is no language model: its kind is {kind}")
    try:
        shape, model = dict(contract["shape"]), contract["model"]
        limits = Limits(
            slots=int(shape["slots"]),
            max_length=int(shape["max_length"]),
            chunks=tuple(map(int, shape["chunks"])),
            decode_steps=int(shape["decode_steps"]),
            top_logprobs=int(shape["top_logprobs"]),
            vocab_size=int(model["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the contract of {bundle.manifest.name} is broken: {error}") from error
    return ModelBackend(bundle, limits, info(bundle))


def info(bundle: Bundle) -> dict[str, Any]:
    """Facts about a bundle for people and metrics.

    `weight_bytes` and `state_bytes` are of all devices together. A decode step reads, on one
    device, `read_weight_bytes`, all weights but for the embedding's table, and of `cache_bytes`
    what the active slots hold; `bandwidth` is how fast it reads, where that is known.
    """
    device = bundle.devices[0]
    read = [x for path, x in bundle.weights.items() if not path.startswith(EMBEDDING)]
    cache = [x for path, x in bundle.state.items() if path.startswith("state/cache/")]
    known = Topology.for_devices(bundle.devices)
    return {
        "read_weight_bytes": sum(x.addressable_shards[0].data.nbytes for x in read),
        "cache_bytes": sum(x.addressable_shards[0].data.nbytes for x in cache),
        "bandwidth": None if device.platform == "cpu" else known.hbm_bandwidth,
        "name": bundle.manifest.name,
        "mesh": str(bundle.mesh),
        "devices": bundle.mesh.size,
        "device_kind": str(device.device_kind),
        "weight_bytes": sum(x.nbytes for x in bundle.weights.values()),
        "state_bytes": sum(x.nbytes for x in bundle.state.values()),
    }

"""A language model's bundle as the engine wants it.

docs/language_models.md says what such a bundle holds.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd.mesh.topology import Topology
from spmd.models.decode import PAGES
from spmd.models.decode.packing import PLAIN, row_shapes, width
from spmd.models.decode.shape import most_drafts
from spmd.models.llama import lora
from spmd.models.llama.weights.files import WeightsError
from spmd.models.training.checkpoints.tables import nested
from spmd.ops import paged_triton
from spmd.serving.bundle.bundle import Bundle
from spmd.serving.bundle.function import BundleError, one_line
from spmd.serving.bundle.manifest import Manifest
from spmd.serving.engine.backend import Limits
from spmd.serving.engine.model_backend import ModelBackend

KIND = "language_model"
"""Of a contract."""

OLD_KIND = "llama"
"""What it was when functions were others."""

CACHE, ADAPTERS = "state/cache/", "state/adapters/"


def model_backend(bundle: Bundle) -> ModelBackend:
    """What the engine runs.

    Raises:
      BundleError: the bundle is none of a language model.
    """
    if not is_language_model(bundle.manifest):
        kind = repr(bundle.manifest.contract.get("kind"))[:40]
        raise BundleError(f"{bundle.manifest.name} is no language model: its kind is {kind}")
    try:
        if bundle.manifest.contract["kind"] == OLD_KIND:
            raise ValueError(f"its kind is {OLD_KIND}")
        limits = _limits(bundle)
        facts = info(bundle)
        names = set(bundle.programs)
        return ModelBackend(bundle, limits, facts, step_seconds(bundle, limits, facts), names)
    except (LookupError, TypeError, ValueError) as error:
        raise BundleError(
            f"the contract of {bundle.manifest.name} is broken, or older than this program "
            f"({one_line(error)}): export the model again"
        ) from error


def is_language_model(manifest: Manifest) -> bool:
    """Whether a bundle's functions are those of `spmd.models.decode.functions`."""
    return manifest.contract.get("kind") in (KIND, OLD_KIND)


def first_functions(manifest: Manifest) -> list[str]:
    """Functions with which all requests can be served; the others are the same for fewer rows.

    These are, for the longest tables, a step in which all slots decode, and the largest one: that
    which scores, if there is one, as it does what the other does, too (`ModelBackend`).
    """
    functions = manifest.functions
    if manifest.contract.get("kind") != KIND:
        return list(functions)
    shape = manifest.contract["shape"]
    tags = {name: entry.tags for name, entry in functions.items()}
    rows = sorted({int(mine["rows"]) for mine in tags.values() if mine.get("kind") == "step"})
    decoding = next((n for n in rows if n * shape["groups"] >= shape["slots"]), rows[-1])
    scores = any(mine.get("kind") == "score" for mine in tags.values())
    largest, longest = "score" if scores else "step", shape["max_length"]
    wanted = {("step", decoding, longest), (largest, rows[-1], longest)}
    sizes = {
        n: (mine.get("kind"), mine.get("rows"), mine.get("length")) for n, mine in tags.items()
    }
    return [name for name, size in sizes.items() if size[2] is None or size in wanted]


def served_functions(
    contract: Mapping[str, Any], tags: Mapping[str, Mapping[str, Any]], platform: str
) -> list[str]:
    """Of functions, by name with their tags, those that a server on a platform has use for.

    Shorter tables are for attention that takes as long as a table is. The kernel for GPUs reads
    what a slot holds, whatever its table could, so there the longest tables alone are enough.
    Several turns a call gain time where a step takes less than the call, so none on CPUs.
    """
    if contract.get("kind") == KIND and platform == "cpu":
        return [n for n, mine in tags.items() if not str(mine.get("kind")).endswith("turns")]
    if contract.get("kind") != KIND or platform != "cuda":
        return list(tags)
    model, shape = contract["model"], contract["shape"]
    heads = model.get("num_attention_heads")
    if not heads:
        return list(tags)
    keys = model.get("num_key_value_heads") or heads
    width = model.get("head_dim") or model["hidden_size"] // heads
    item = 4 if shape["cache_dtype"] == "float32" else 2
    if not paged_triton.takes(heads // keys, width, shape["page"], item):
        return list(tags)
    longest = shape["max_length"]
    return [name for name, mine in tags.items() if mine.get("length", longest) == longest]


def _limits(bundle: Bundle) -> Limits:
    shape, model = dict(bundle.manifest.contract["shape"]), bundle.manifest.contract["model"]
    limits = Limits(
        slots=int(shape["slots"]),
        max_length=int(shape["max_length"]),
        rows=tuple(map(int, shape["rows"])),
        groups=int(shape["groups"]),
        page=int(shape["page"]),
        pages=int(bundle.symbols[PAGES]),
        top_logprobs=int(shape["top_logprobs"]),
        vocab_size=int(model["vocab_size"]),
        drafts=most_drafts(int(shape.get("drafts", 0)), shape["page"], shape["max_length"]),
        turns=int(shape.get("turns", 1)),
        adapters=int(shape.get("adapters", 0)),
    )
    if min(limits.slots, limits.groups, limits.page, *limits.rows) < 1:
        raise ValueError("sizes have to be positive")
    if limits.slots % limits.groups or limits.rows[-1] < limits.slots // limits.groups:
        raise ValueError("slots do not fit groups and rows")
    # Who serves nobody, but draws for itself, need not load `allow`.
    loaded, written = (
        {entry.tags.get("kind") for entry in functions.values()}
        for functions in (bundle.functions, bundle.manifest.functions)
    )
    missing = ({"begin", "step"} - loaded) | ({"allow"} - written)
    if missing:
        raise ValueError(f"there is no function {min(missing)}")
    slots = limits.slots // limits.groups
    for entry in bundle.functions.values():
        kind, tags = str(entry.tags.get("kind")), entry.tags
        if kind.removeprefix(PLAIN) in ("step", "score", "turns"):
            rows, table = int(tags["rows"]), int(tags["length"]) // limits.page
            shapes = row_shapes(slots, rows, table, kind, limits.adapters)
            wanted: dict[str, Any] = {"inputs/rows": (limits.groups, width(shapes))}
            wanted |= {} if kind.endswith("turns") else {"inputs/alternatives": ()}
            if {leaf.path: leaf.shape for leaf in entry.inputs} != wanted:
                raise ValueError(f"{entry.name} takes other inputs than {wanted}")
    return limits


def put_adapter(bundle: Bundle, place: int, folder: str | None) -> None:
    """Reads an adapter, a folder of PEFT's, and writes it in a place, in between steps; None: none.

    Raises:
      BundleError: it cannot be read, or does not fit.
    """
    leaves = {
        p.removeprefix(ADAPTERS): x for p, x in bundle.state.items() if p.startswith(ADAPTERS)
    }
    try:
        found = lora.placed({} if folder is None else lora.read(folder), leaves, str(folder))
    except WeightsError as error:
        raise BundleError(str(error)) from error
    bundle.run("adapt", {"place": np.int32(place), "adapters": nested(found)})


def step_seconds(bundle: Bundle, limits: Limits, facts: Mapping[str, Any]) -> dict[int, float]:
    """What steps that are compiled by now are predicted to take, by rows of a group.

    Predictions take all rows to see all that their tables reach. What reading that takes is not
    counted: steps are the shortest, and prompts beside them the most to wait for, where sequences
    are short.

    Returns:
      Rows -> seconds; nothing where the devices' bandwidth is not known.
    """
    if facts["bandwidth"] is None:
        return {}
    slots = limits.slots // limits.groups
    seconds: dict[int, float] = {}
    for program in list(bundle.programs.values()):  # others arrive meanwhile
        tags = program.entry.tags
        if tags.get("kind") == "step" and int(tags["length"]) == limits.max_length:
            rows = int(tags["rows"])
            seen = min(min(slots, rows) * limits.max_length, limits.pages * limits.page)
            reading = seen * limits.groups * facts["token_bytes"] / facts["bandwidth"]
            seconds[rows] = max(0.0, float(program.emitted.seconds or math.inf) - reading)
    return seconds


def info(bundle: Bundle) -> dict[str, Any]:
    """Facts about a bundle for people and metrics.

    `weight_bytes` and `state_bytes` are of all devices together. A step reads, on one device,
    `read_weight_bytes`, all weights but for the embedding's table, and for each token that its
    sequences hold `token_bytes`, on average over the devices; `bandwidth` is how fast it reads,
    where that is known.
    """
    device = bundle.devices[0]
    unread = tuple(bundle.manifest.contract.get("unread", ()))
    read = [x for path, x in bundle.weights.items() if not path.startswith(unread)]
    read += [x for path, x in bundle.state.items() if path.startswith(ADAPTERS)]
    cache = [x for path, x in bundle.state.items() if path.startswith(CACHE)]
    shape = bundle.manifest.contract["shape"]
    tokens = shape["groups"] * bundle.symbols[PAGES] * shape["page"]
    known = Topology.for_devices(bundle.devices)

    def held(arrays: list[Any]) -> int:
        """Bytes on one device, also of arrays that a step under way has been given."""
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)

    return {
        "read_weight_bytes": held(read),
        "token_bytes": held(cache) / tokens,
        "bandwidth": None if device.platform == "cpu" else known.hbm_bandwidth,
        "name": bundle.manifest.name,
        "mesh": str(bundle.mesh),
        "devices": bundle.mesh.size,
        "device_kind": str(device.device_kind),
        "weight_bytes": sum(x.nbytes for x in bundle.weights.values()),
        "state_bytes": sum(x.nbytes for x in bundle.state.values()),
    }

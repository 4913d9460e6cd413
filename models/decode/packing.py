"""A step's inputs as one array and each of its reports as one, since each copy takes its time.

On an H200 a call of 64 sequences costs the host 3.1 ms with six arrays of inputs and four of
results, and 1.5 ms so. What is copied:

    rows (A, W)             of each group `tokens`, `slots`, ... one behind the other
    report (A, D, 2 + 2P)   of each token its id and log-probability, and those of the P likeliest

All is int32, in which the bits of float32 are. Groups stay a dim of their own, so that each device
gets its own. Shapes are in the names, as in `spmd.models.decode.steps`.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.models.sampling import Report

Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of what a group has of it, in the order in which they lie."""

PLAIN = "plain_"
"""With what the kinds of functions begin that leave out the adapters which there are."""


def row_shapes(slots: int, rows: int, table: int, kind: str = "step", adapters: int = 0) -> Shapes:
    """What a step takes of each group; `spmd.models.decode.steps.step` says what it is.

    Args:
        slots: B, of a group.
        rows: R, of a group.
        table: M, the pages of a slot's table.
        kind: of the function; those of `score` have targets to be scored.
        adapters: how many there is room for; if any, each slot names its own.
    """
    shapes = {
        "tokens": (rows,),
        "slots": (rows,),
        "positions": (rows,),
        "first": (slots + 1,),
        "table": (slots, table),
        "draws": (min(rows, slots),),
    }
    shapes |= {"adapters": (slots,)} if adapters and not kind.startswith(PLAIN) else {}
    return {**shapes, "targets": (rows,)} if kind == "score" else shapes


def width(shapes: Shapes) -> int:
    """W, how many numbers a group has."""
    return sum(map(math.prod, shapes.values()))


def pack_rows(fields: Mapping[str, Any], shapes: Shapes) -> Any:
    """On the host: arrays (A, ...) of `shapes` -> rows (A, W)."""
    groups = len(fields["tokens"])
    parts = [np.reshape(fields[name], (groups, math.prod(s))) for name, s in shapes.items()]
    return np.concatenate(parts, axis=1, dtype=np.int32)


def unpack_rows(rows_AW: Any, shapes: Shapes) -> dict[str, Any]:
    """On the devices: rows (A, W) -> arrays (A, ...) of `shapes`."""
    ends = list(itertools.accumulate(map(math.prod, shapes.values())))
    parts = zip(shapes.items(), [0, *ends], ends, strict=False)
    return {name: rows_AW[:, begin:end].reshape(-1, *shape) for (name, shape), begin, end in parts}


def taken(x_AIx: Any, index_AJ: Any) -> Any:
    """(A, J, x): entries of each group; an index outside takes the nearest one."""
    return jax.vmap(lambda x, index: jnp.take(x, index, axis=0, mode="clip"))(x_AIx, index_AJ)


def pack_report(report: Report) -> Any:
    """On the devices: a report (A, D, ...) -> one array (A, D, 2 + 2P)."""
    logprobs_AD, top_ADP = (
        jax.lax.bitcast_convert_type(x, jnp.int32) for x in (report.logprobs, report.top_logprobs)
    )
    parts = (report.ids[..., None], logprobs_AD[..., None], report.top_ids, top_ADP)
    return jnp.concatenate(parts, axis=-1)


def unpack_report(packed: Any) -> Report:
    """On the host: one array (..., 2 + 2P) -> a report (..., P)."""
    ids, logprobs = packed[..., 0], packed[..., 1].view(np.float32)
    top_ids, top_logprobs = np.split(packed[..., 2:], 2, axis=-1)
    return Report(ids, logprobs, top_ids, top_logprobs.view(np.float32))

"""The ops of a paged KV cache in plain JAX: kernels have to compute the same.

Shapes are in the names, as in `spmd.ops.paged`; T positions in all pages of a slot's table (M * P).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KEYS, VALUES = 0, -1  # one entry is both

MOST_ELEMENTS = 1 << 24  # how many keys and values are taken out of their pages at a time


def attend(
    q_ARKGD: Any, pool_ANPK2D: Any, table_ABM: Any, slots_AR: Any, positions_AR: Any,
    first_AB1: Any, *rest: Any, window: int | None = None,
) -> Any:  # fmt: skip
    """Returns what `paged_attention` does, a few rows at a time over all pages of their slots."""
    scales_ANPK2, sinks_KG = scales_and_sinks(rest)
    groups, rows = slots_AR.shape
    size, heads, _, width = pool_ANPK2D.shape[2:]
    reach = table_ABM.shape[2] * size

    def one(q_KGD: Any, group: Any, slot: Any, last: Any) -> Any:
        # Behind the last position pages may be anybody's: what lies there is masked below. N stands
        # in types alone, and in no number of the module: so a module is for any N, once the types
        # say another.
        pages = (pool.at[group, table_ABM[group, slot]] for pool in pools)
        taken = (x.get(mode="clip", wrap_negative_indices=False) for x in pages)
        kept = (x.reshape(reach, *x.shape[2:]) for x in taken)
        return _attend_row(q_KGD, last, window, sinks_KG, *kept)

    pools = (pool_ANPK2D, *scales_ANPK2)
    group_AR = jnp.broadcast_to(jnp.arange(groups, dtype=jnp.int32)[:, None], (groups, rows))
    slot_AR = jnp.clip(slots_AR, 0, table_ABM.shape[1] - 1)
    operands = (q_ARKGD, group_AR, slot_AR, last_positions(positions_AR, first_AB1))
    flat = [x.reshape(groups * rows, *x.shape[2:]) for x in operands]
    at_once = max(1, MOST_ELEMENTS // max(1, reach * heads * 2 * width))
    if at_once >= groups * rows:
        return jax.vmap(one)(*flat).reshape(q_ARKGD.shape)

    def some(taken: Any) -> Any:
        """Returns the results of some rows; zeros, not computed, if no row sees a position."""
        nothing = jnp.zeros_like(taken[0])
        return jax.lax.cond(jnp.any(taken[3] >= 0), lambda: jax.vmap(one)(*taken), lambda: nothing)

    count = -(-groups * rows // at_once)
    pieces = []
    for x in flat:  # rows -1 behind the others are padding
        widths = ((0, count * at_once - groups * rows), *((0, 0),) * (x.ndim - 1))
        pieces.append(jnp.pad(x, widths, constant_values=-1).reshape(count, at_once, *x.shape[1:]))
    heads_XKGD = jax.lax.map(some, pieces).reshape(-1, *q_ARKGD.shape[2:])
    return heads_XKGD[: groups * rows].reshape(q_ARKGD.shape)


def scales_and_sinks(rest: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the last operands apart: (scales, sinks), each with one item or none."""
    return [x for x in rest if x.ndim == 5], [x for x in rest if x.ndim == 2]


def last_positions(positions_AR: Any, first_AB1: Any) -> Any:
    """Returns (A, R): the last position that each row sees; -1 (none) for rows of padding."""
    return jnp.where(jnp.arange(positions_AR.shape[1]) < first_AB1[:, -1:], positions_AR, -1)


def _attend_row(
    q_KGD: Any, last: Any, window: int | None, sinks_KG: Any, kv_TK2D: Any, *scales_TK2: Any
) -> Any:
    dtype = q_KGD.dtype
    positions_T = jnp.arange(kv_TK2D.shape[0])
    visible_T = positions_T <= last
    if window is not None:
        visible_T &= positions_T > last - window
    keys_TKD, values_TKD = kv_TK2D[:, :, KEYS].astype(dtype), kv_TK2D[:, :, VALUES].astype(dtype)
    scores_KGT = jnp.einsum("kgd,tkd->kgt", q_KGD, keys_TKD, preferred_element_type=jnp.float32)
    for scale_TK2 in scales_TK2:
        scores_KGT *= scale_TK2[:, :, KEYS].T[:, None]
    scores_KGT = jnp.where(
        visible_T, scores_KGT * q_KGD.shape[-1] ** -0.5, np.finfo(np.float32).min
    )
    own_KG1 = [sink_KG.astype(jnp.float32)[..., None] for sink_KG in sinks_KG]
    weights_KGT = jax.nn.softmax(jnp.concatenate([scores_KGT, *own_KG1], -1))[..., : len(kv_TK2D)]
    for scale_TK2 in scales_TK2:
        weights_KGT *= jnp.where(visible_T, scale_TK2[:, :, VALUES].T, 0)[:, None]
    # What lies behind has no weight, but NaN is NaN without any.
    values_TKD = jnp.where(visible_T[:, None, None], values_TKD, 0)
    return jnp.einsum("kgt,tkd->kgd", weights_KGT.astype(dtype), values_TKD)


def update(pool_ANP: Any, new_AR: Any, table_ABM: Any, slots_AR: Any, positions_AR: Any) -> Any:
    """Returns what `paged_update` does, by a scatter, which XLA can do in place."""
    size = pool_ANP.shape[2]
    groups, slots, most = table_ABM.shape
    if groups * positions_AR.shape[1] == 1:
        # Of a scatter of one row XLA makes an update of a slice, for which its compiler for TPUs
        # copies a pool of one key head, and back. A second row, without a position, is not written.
        new_AR, slots_AR = (jnp.repeat(x, 2, axis=1) for x in (new_AR, slots_AR))
        positions_AR = jnp.pad(positions_AR, ((0, 0), (0, 1)), constant_values=-1)
    group_A1 = jnp.arange(groups)[:, None]
    slot_AR, column_AR = (
        jnp.clip(x, 0, end - 1) for x, end in ((slots_AR, slots), (positions_AR // size, most))
    )
    page_AR = table_ABM[group_A1, slot_AR, column_AR]
    inside_AR = (positions_AR >= 0) & (positions_AR < most * size) & (page_AR >= 0)
    # `drop` ignores pages that do not exist.
    page_AR = jnp.where(inside_AR, page_AR, np.iinfo(np.int32).max)
    # With heads apart from keys and values XLA for TPUs would transpose the pool, and back.
    flat_ANPXY, flat_ARXY = (
        x.reshape(*x.shape[:n], -1, *x.shape[n:][-1:]) for x, n in ((pool_ANP, 3), (new_AR, 2))
    )
    flat_ANPXY = flat_ANPXY.at[group_A1, page_AR, positions_AR % size].set(
        flat_ARXY, mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    return flat_ANPXY.reshape(pool_ANP.shape)

"""Attention over a KV cache in pages, and its update, for tokens of several sequences in one call.

Shapes are in the names:

    A groups (of slots and of the pages that they use)    B slots of a group    R rows of a group
    N pages of a group's pool    P positions of a page    M pages of a slot's table
    K key heads    G query heads of one key head    D head

A slot holds one sequence. Its position t is in page `table[b, t // P]`, for slot b, at t % P. A row
is one token of a slot. Rows are in the order of slots, and in a slot of consecutive positions: slot
b has the rows `first[b]` to `first[b + 1] - 1`. Rows from `first[B]` on are padding.

    first = [0, 1, 1, 4]:  row 0 is of slot 0, which decodes; slot 1 has none; rows 1, 2 and 3 are a
                           chunk of slot 2's prompt

The pages are those of Kwon et al., *Efficient memory management for large language model serving
with PagedAttention* (2023); chunks beside decoding rows those of Agrawal et al., *Taming
throughput-latency tradeoff in LLM inference with Sarathi-Serve* (2024).
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ArgumentError
from spmd.ir.dialect.composites import arguments_of
from spmd.ir.dialect.rule import REPLICATE, Rule, parse_rule
from spmd.ir.program import OpKind
from spmd.lowering.register import register_composite
from spmd.ops import paged_reference, paged_triton

ATTENTION = "spmd.paged_attention"
UPDATE = "spmd.paged_update"

TABLES = "table (A, B, M), slots (A, R), positions (A, R) of integers"


def paged_attention(
    q_ARKGD: Any,
    pool_ANPK2D: Any,
    table_ABM: Any,
    slots_AR: Any,
    positions_AR: Any,
    first_AB1: Any,
    *,
    scales: Any = None,
    sinks_KG: Any = None,
    window: int | None = None,
) -> jax.Array:
    """Returns `softmax(q k / sqrt(D)) v` of each row, over its slot's positions up to its own.

    Args:
      q_ARKGD: queries.
      pool_ANPK2D: keys (index 0 of the second last dim) and values (index 1). If that dim is 1,
        keys are the values, too, as the latents of DeepSeek's attention are.
      table_ABM: the pages of each slot, from 0 to N - 1; entries after its last one are not used.
      slots_AR: the slot of each row.
      positions_AR: each row's position, the last that it sees (attends to); its result is 0 at -1.
      first_AB1: each slot's first row, then the first row of padding. The results of padding are 0.
      scales: for an int8 pool (A, N, P, K, 2), by which its keys and values are multiplied.
      sinks_KG: scores of a key of each query head that has no value, as of `attention`.
      window: the most positions that a row sees, its own and those just before it; None is all.

    Returns:
      (A, R, K, G, D) in the dtype of the queries; scores and softmax are in float32. Values in a
      page at positions that no row sees have no effect, even if they are NaN.

    Raises:
      ArgumentError: shapes, dtypes or scales that do not fit, a window below 1; for NVIDIA GPUs,
        when compiled, also an int8 pool of more than 2 and up to 4 GiB on a device.

    Example:
      >>> heads_ARKGD = paged_attention(
      ...     q_ARKGD, pool_ANPK2D, table_ABM, slots_AR, positions_AR, first_AB1
      ... )
    """
    tables = (table_ABM, slots_AR, positions_AR)
    fits = q_ARKGD.ndim == 5 and pool_ANPK2D.ndim == 6 and _tables_fit(q_ARKGD, *tables)
    if fits:
        a, _, k, _, d = q_ARKGD.shape
        stored = (pool_ANPK2D.shape[0], *pool_ANPK2D.shape[3:])
        fits = stored in ((a, k, 2, d), (a, k, 1, d))
        fits = fits and first_AB1.shape == (a, table_ABM.shape[1] + 1) and _are_integers(first_AB1)
        fits = fits and (pool_ANPK2D.dtype == jnp.int8) == (scales is not None)
        fits = fits and (scales is None or scales.shape == pool_ANPK2D.shape[:-1])
        fits = fits and (sinks_KG is None or sinks_KG.shape == q_ARKGD.shape[2:4])
        fits = fits and (window is None or window > 0)
    if not fits:
        described = {"q": q_ARKGD, "pool": pool_ANPK2D, "first": first_AB1, "scales": scales}
        described |= {} if sinks_KG is None else {"sinks": sinks_KG}
        raise _refusal(
            "paged_attention", described, tables,
            f"q (A, R, K, G, D), pool (A, N, P, K, 2 or 1, D), {TABLES}, first (A, B + 1) of "
            "integers, scales (A, N, P, K, 2 or 1) of an int8 pool and of no other, sinks (K, G), "
            f"and a window of at least one position, not {window}",
        )  # fmt: skip
    integers = [x.astype(jnp.int32) for x in (*tables, first_AB1)]
    rest = [x for x in (scales, sinks_KG) if x is not None]
    attributes = {} if window is None else {"window": window}  # one without a value is none
    composite = jax.lax.composite(paged_reference.attend, ATTENTION)
    heads: jax.Array = composite(q_ARKGD, pool_ANPK2D, *integers, *rest, **attributes)
    return heads


def paged_update(
    pool_ANP: Any, new_AR: Any, table_ABM: Any, slots_AR: Any, positions_AR: Any
) -> jax.Array:
    """Returns the pool with each row's entry written at the row's position in its slot's pages.

    Args:
      pool_ANP: (A, N, P, ...): keys and values (A, N, P, K, 2, D), or their scales.
      new_AR: each row's entry, (A, R, ...) in the pool's dtype. No two are for the same place.
      table_ABM: as for `paged_attention`.
      slots_AR: the slot of each row.
      positions_AR: the position of each row; nothing is written for -1, nor for a position or a
        page that does not exist.

    Returns:
      An array like `pool_ANP`: in the same memory if that was donated.

    Raises:
      ArgumentError: shapes or dtypes that do not fit each other.

    Example:
      >>> pool_ANPK2D = paged_update(pool_ANPK2D, new_ARK2D, table_ABM, slots_AR, positions_AR)
    """
    tables = (table_ABM, slots_AR, positions_AR)
    fits = pool_ANP.ndim >= 3 and new_AR.ndim == pool_ANP.ndim - 1 and _tables_fit(new_AR, *tables)
    fits = fits and pool_ANP.dtype == new_AR.dtype
    if not fits or (pool_ANP.shape[0], *pool_ANP.shape[3:]) != (a := new_AR.shape)[:1] + a[2:]:
        raise _refusal(
            "paged_update", {"pool": pool_ANP, "new": new_AR}, tables,
            f"pool (A, N, P, ...) and new (A, R, ...) of one dtype, {TABLES}",
        )  # fmt: skip
    integers = [x.astype(jnp.int32) for x in tables]
    composite = jax.lax.composite(paged_reference.update, UPDATE)
    updated: jax.Array = composite(pool_ANP, new_AR, *integers)
    return updated


def _tables_fit(rows_AR: Any, table_ABM: Any, slots_AR: Any, positions_AR: Any) -> bool:
    shape = rows_AR.shape[:2]
    fits = table_ABM.ndim == 3 and table_ABM.shape[0] == shape[0]
    fits = fits and slots_AR.shape == positions_AR.shape == shape
    return fits and _are_integers(table_ABM, slots_AR, positions_AR)


def _are_integers(*arrays: Any) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.integer) for x in arrays)


def _refusal(what: str, arrays: dict[str, Any], tables: Any, required: str) -> ArgumentError:
    arrays = {**arrays, **dict(zip(("table", "slots", "positions"), tables, strict=True))}
    said = ", ".join(
        f"{name} {None if x is None else f'{x.dtype} {x.shape}'}" for name, x in arrays.items()
    )
    return ArgumentError(
        f"{what} cannot be computed", actual=said, required=required, fix="correct them"
    )


def _attention_rule(kind: OpKind) -> Rule:
    terms = ["a r k g d", "a n p k c d", "a b m", "a r", "a r", "a e"]
    terms += ["a n p k c" if x.rank == 5 else "k g" for x in kind.operands[6:]]
    text = f"{', '.join(terms)} -> {terms[0]}"
    return parse_rule(text, kind.operands, kind.results, kinds=dict.fromkeys("rdnpcbme", REPLICATE))


def _update_rule(kind: OpKind) -> Rule:
    # Of the dims behind the positions the first, the heads, may be split.
    entry = " ".join(f"x{i}" for i in range(kind.operands[0].rank - 3))
    text = f"a n p {entry}, a r {entry}, a b m, a r, a r -> a n p {entry}"
    whole = dict.fromkeys([*"nprbm", *entry.split()[1:]], REPLICATE)
    return parse_rule(text, kind.operands, kind.results, kinds=whole)


def _reach(kind: OpKind) -> int:
    """Returns the most positions that a row can see: M * P of its slot's table, or the window."""
    pool, table = kind.operands[1:3]
    reach = table.shape[2] * pool.shape[2]
    return min(reach, int(arguments_of(kind).get("window", reach)))


def _bytes_read(kind: OpKind) -> list[float]:
    """Returns the bytes read of each operand: all of it, but of pool and scales what rows see."""
    rows = kind.operands[0].shape[1]
    slots = kind.operands[2].shape[1]
    found = [float(t.bytes) for t in kind.operands]
    for i in (1, 6):
        if i < len(found) and kind.operands[i].rank > 2:
            shape = kind.operands[i].shape
            share = min(slots, rows) * _reach(kind) / max(1, shape[1] * shape[2])
            found[i] *= min(1.0, share)
    return found


# On TPUs: jax's kernel for rows of several slots at once. It wants sequences one behind the other,
# each with rows: slots without rows are left out. It knows no scales of keys and no sinks: these
# are left to the reference.

LANES = 128  # widths of a head are multiples of this
HEADS = (1, 2, 4, 8)  # numbers of key heads, beside multiples of the last

POSITIONS = 512
"""About how many positions a block has: their keys and values are 2 MiB for 8 bf16 heads of 128."""

ROWS = 32  # rows of a block


def attend_on_tpu(*operands: Any, window: int | None = None) -> Any:
    """Returns what `paged_reference.attend` does, by jax's TPU kernel, or NotImplemented."""
    q_ARKGD, pool_ANPK2D, table_ABM, _, positions_AR, first_AB1, *rest = operands
    count, pages, size, heads, kinds, width = pool_ANPK2D.shape
    fits = not rest and kinds == 2 and q_ARKGD.dtype == pool_ANPK2D.dtype
    fits = fits and q_ARKGD.dtype.name in ("bfloat16", "float32")
    fits = fits and width % LANES == 0 and (heads in HEADS or heads % HEADS[-1] == 0)
    if not fits or size % 8 or 0 in (*q_ARKGD.shape, *table_ABM.shape):
        return NotImplemented
    last_AR = paged_reference.last_positions(positions_AR, first_AB1)
    # The groups' pages are those of one pool: none of it is cut out.
    pool = pool_ANPK2D.reshape(count * pages, size, heads * 2, width)
    before_A11 = jnp.arange(count, dtype=jnp.int32)[:, None, None] * pages
    table_ABM = jnp.clip(table_ABM, 0, pages - 1) + before_A11
    groups = [
        _group(q_ARKGD[a], pool, table_ABM[a], last_AR[a], first_AB1[a], window)
        for a in range(count)
    ]
    # Of rows that no sequence has nothing is written.
    return jnp.where((last_AR >= 0)[..., None, None, None], jnp.stack(groups), 0)


def _group(
    q_RKGD: Any, pool: Any, table_BM: Any, last_R: Any, first_B1: Any, window: int | None
) -> Any:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    rows, heads, groups, width = q_RKGD.shape
    # A slot's keys end where its last row is, and its rows are at the positions up to there.
    counts_B = first_B1[1:] - first_B1[:-1]
    lengths_B = jnp.maximum(last_R[jnp.clip(first_B1[1:] - 1, 0, rows - 1)] + 1, 1)
    with_rows_B = jnp.argsort(counts_B == 0, stable=True)
    ends_B = jnp.cumsum(counts_B[with_rows_B])
    # A call without rows still fetches the first sequence's first page.
    sequences_1 = jnp.maximum(jnp.sum(counts_B > 0, keepdims=True), 1)
    heads_RND = kernel.ragged_paged_attention(
        q_RKGD.reshape(rows, heads * groups, width),
        pool,
        lengths_B[with_rows_B].astype(jnp.int32),
        table_BM[with_rows_B],
        jnp.concatenate([jnp.zeros_like(ends_B[:1]), ends_B]).astype(jnp.int32),
        sequences_1.astype(jnp.int32),
        sm_scale=width**-0.5,
        sliding_window=window,
        num_kv_pages_per_block=max(1, min(table_BM.shape[1], POSITIONS // pool.shape[1])),
        num_queries_per_block=min(rows, ROWS),
    )
    return heads_RND.reshape(q_RKGD.shape)


register_composite(
    ATTENTION,
    _attention_rule,
    decomposition=paged_reference.attend,
    kernels={"cuda": paged_triton.attend, "tpu": attend_on_tpu},
    # Two products of every row with all positions that it may see.
    flops=lambda kind: 4.0 * kind.operands[0].size * _reach(kind),
    bytes_read=_bytes_read,
    arithmetic="paged_attention",
)
register_composite(UPDATE, _update_rule, decomposition=paged_reference.update)

"""Attention of a part of the queries, one piece of the keys after another.

Where a sequence is split over P devices, device `own` has the `own`-th part of the queries, and it
meets the P pieces of keys that lie like the parts. In their order, and in zigzag order (each part
an early and a late half, see `attention_order`), it sees of the piece of device `other`

    other is   usual order   zigzag order
    own        as a causal mask of this part alone has it: its positions ascend
    before     all           all queries see the first half of the keys
    after      nothing       the second half of the queries sees all keys

So no kernel needs another mask than a causal one, and nothing is computed that is hidden anyway.
What pieces give is joined by
the logsumexp of their scores: the gradient needs just that of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.ops import attention_reference as reference

Kernel = Callable[..., Any]
"""`forward` or `gradient` of `attention_reference`, or a kernel with the same arguments."""


def piece(
    kernel: Kernel,
    q_BSND: Any,
    k_BTKD: Any,
    v_BTKD: Any,
    is_before: Any,
    out_BSND: Any,
    lse_BNS: Any,
    *segments: Any,
    zigzag: int = 1,
    **spec: Any,
) -> tuple[Any, Any]:
    """The outputs and the logsumexp over the pieces so far and over one more.

    Args:
      kernel: computes what is not hidden.
      q_BSND: this device's queries.
      k_BTKD, v_BTKD: a piece of the keys and values.
      is_before: whether the piece is of a device before this one, a boolean scalar.
      out_BSND, lse_BNS: float32, over the pieces so far.
      *segments: (B, S) and (B, T), if there are any.
      zigzag: the number of parts of a sequence in zigzag order; 1 for the usual one.
      **spec: as for `attention_reference.forward`.
    """
    middle_S, middle_T = q_BSND.shape[1] // 2, k_BTKD.shape[1] // 2
    seen = {**spec, "causal": False}

    def joined(q_from: int, k_to: int | None) -> tuple[Any, Any]:
        more_BSND, more_BNS = _either(kernel, reference.forward)(
            q_BSND[:, q_from:],
            k_BTKD[:, :k_to],
            v_BTKD[:, :k_to],
            *_cut(segments, q_from, k_to),
            **seen,
        )
        both_BNS = jnp.logaddexp(lse_BNS[..., q_from:], more_BNS)
        old, new = (
            jnp.swapaxes(jnp.exp(lse - both_BNS), 1, 2)[..., None]
            for lse in (lse_BNS[..., q_from:], more_BNS)
        )
        found = out_BSND[:, q_from:] * old + more_BSND.astype(jnp.float32) * new
        if not q_from:
            return found, both_BNS
        return out_BSND.at[:, q_from:].set(found), lse_BNS.at[..., q_from:].set(both_BNS)

    def before() -> tuple[Any, Any]:
        return joined(0, middle_T if zigzag > 1 else None)

    def after() -> tuple[Any, Any]:
        return joined(middle_S, None) if zigzag > 1 else (out_BSND, lse_BNS)

    if not spec["causal"]:
        return joined(0, None)
    found: tuple[Any, Any] = jax.lax.cond(is_before, before, after)
    return found


def piece_gradient(
    kernel: Kernel,
    q_BSND: Any,
    k_BTKD: Any,
    v_BTKD: Any,
    out_BSND: Any,
    lse_BNS: Any,
    dout_BSND: Any,
    is_before: Any,
    dq_BSND: Any,
    *segments: Any,
    zigzag: int = 1,
    **spec: Any,
) -> tuple[Any, Any, Any]:
    """The gradient of the queries over one more piece, and those of its keys and values.

    Args:
      kernel: computes what is not hidden.
      q_BSND, k_BTKD, v_BTKD, is_before, zigzag, **spec: as for `piece`.
      out_BSND, lse_BNS, dout_BSND: outputs and logsumexp over all pieces; gradient of the outputs.
      dq_BSND: float32, over the pieces so far.
      *segments: as for `piece`.
    """
    middle_S, middle_T = q_BSND.shape[1] // 2, k_BTKD.shape[1] // 2
    seen = {**spec, "causal": False}

    def added(q_from: int, k_to: int | None) -> tuple[Any, Any, Any]:
        dq, *dkv = _either(kernel, reference.gradient)(
            q_BSND[:, q_from:],
            k_BTKD[:, :k_to],
            v_BTKD[:, :k_to],
            out_BSND[:, q_from:],
            lse_BNS[..., q_from:],
            dout_BSND[:, q_from:],
            *_cut(segments, q_from, k_to),
            **seen,
        )
        rest = k_BTKD.shape[1] - dkv[0].shape[1]
        dk, dv = (jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))) for x in dkv)
        return dq_BSND.at[:, q_from:].add(dq.astype(jnp.float32)), dk, dv

    def before() -> tuple[Any, Any, Any]:
        return added(0, middle_T if zigzag > 1 else None)

    def after() -> tuple[Any, Any, Any]:
        nothing = dq_BSND, jnp.zeros_like(k_BTKD), jnp.zeros_like(v_BTKD)
        return added(middle_S, None) if zigzag > 1 else nothing

    if not spec["causal"]:
        return added(0, None)
    found: tuple[Any, Any, Any] = jax.lax.cond(is_before, before, after)
    return found


def _cut(segments: tuple[Any, ...], q_from: int, k_to: int | None) -> tuple[Any, ...]:
    if not segments:
        return ()
    queries_BS, keys_BT = segments
    return queries_BS[:, q_from:], keys_BT[:, :k_to]


def _either(kernel: Kernel, otherwise: Kernel) -> Kernel:
    """A kernel, with something in its place where it does not take the shapes."""

    def run(*operands: Any, **spec: Any) -> Any:
        found = kernel(*operands, **spec)
        return otherwise(*operands, **spec) if found is NotImplemented else found

    return run

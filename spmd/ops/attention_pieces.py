"""Attention of a part of the queries with one more piece of the keys.

Where a sequence is split over P devices, device `own` has the `own`-th part of the queries, and it
meets the P pieces of keys that lie like the parts. In their order, and in zigzag order (each part
an early and a late half, see `attention_order`), it sees of the piece of device `other`

    other is   usual order   zigzag order
    own        as a causal mask of this part alone has it: its positions ascend
    before     all           all queries see the first half of the keys
    after      nothing       the second half of the queries sees all keys

So no kernel needs another mask than a causal one, and nothing is computed that is hidden anyway.
What pieces give is joined by the logsumexp of their scores; the gradient takes that of all of them.

In zigzag order late queries see the first half of the keys in any case. What else is seen has the
same shape on all devices, so that each picks its operands and none branches: GPUs branch on the
host, which would have to wait for the devices. One kernel computes both, as sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd.ops import attention_reference as reference

Kernel = Callable[..., Any]
"""`forward` or `gradient` of `attention_reference`, or a kernel with the same arguments."""

Tensors = Sequence[Any]


def piece(kernel: Kernel, *operands: Any, zigzag: int = 1, **spec: Any) -> tuple[Any, Any]:
    """The outputs and the logsumexp over the pieces so far and over one more.

    Operands are this device's queries, a piece of keys and values, whether that is of a device
    before this one, the float32 outputs and logsumexp so far, and segments (B, S) and (B, T), if
    any.
    """
    q_BSND, k_BTKD, v_BTKD, is_before, out_BSND, lse_BNS, *segments = operands
    run = _either(kernel, reference.forward)

    def over(queries: Tensors, keys: Tensors) -> Tensors:
        (q, *own), (k, v, *theirs) = queries, keys
        return list(run(q, k, v, *own, *theirs, **{**spec, "causal": False}))

    queries, keys = [q_BSND, *segments[:1]], [k_BTKD, v_BTKD, *segments[1:]]
    so_far = [out_BSND, lse_BNS]
    if not spec["causal"]:
        out, lse = _joined(so_far, over(queries, keys))
    elif zigzag == 1:
        out, lse = jax.lax.cond(
            is_before, lambda: _joined(so_far, over(queries, keys)), lambda: so_far
        )
    else:
        (early, late), (first, second) = _halves(queries), _halves(keys)
        before, behind = _halves(so_far, lse=1)
        others = _pick(is_before, [early, first], [late, second])
        one, another = _apart(over(*map(_together, [late, first], others)))
        behind = _joined(behind, one)
        found = _joined(_pick(is_before, before, behind), another)
        halves = _pick(is_before, [found, behind], [before, found])
        out, lse = (jnp.concatenate(x, i + 1) for i, x in enumerate(zip(*halves, strict=True)))
    return out, lse


def _joined(so_far: Tensors, more: Tensors) -> Tensors:
    """Outputs and logsumexp over what two pairs of them are over."""
    (out, lse), (more_out, more_lse) = so_far, more
    both = jnp.logaddexp(lse, more_lse)
    old, new = (jnp.swapaxes(jnp.exp(x - both), 1, 2)[..., None] for x in (lse, more_lse))
    return [out * old + more_out.astype(jnp.float32) * new, both]


def piece_gradient(
    kernel: Kernel, *operands: Any, zigzag: int = 1, **spec: Any
) -> tuple[Any, Any, Any]:
    """The gradient of the queries over one more piece, and those of its keys and values.

    Operands are as for `piece`, with outputs and logsumexp over all pieces and the gradient of the
    outputs before `is_before`, and the queries' gradient over the pieces so far, in float32, after.
    """
    q_BSND, k_BTKD, v_BTKD, out_BSND, lse_BNS, dout_BSND, is_before, dq_BSND, *segments = operands
    run = _either(kernel, reference.gradient)

    def over(queries: Tensors, keys: Tensors) -> Tensors:
        (q, lse, out, dout, *own), (k, v, *theirs) = queries, keys
        found = run(q, k, v, out, lse, dout, *own, *theirs, **{**spec, "causal": False})
        return [found[0].astype(jnp.float32), *found[1:]]

    queries = [q_BSND, lse_BNS, out_BSND, dout_BSND, *segments[:1]]
    keys = [k_BTKD, v_BTKD, *segments[1:]]
    nothing = [jnp.zeros_like(x) for x in (k_BTKD, v_BTKD)]

    def added(dq: Any) -> Tensors:
        more, *terms = over(queries, keys)
        return [dq + more, *terms]

    if not spec["causal"]:
        dq, dk, dv = added(dq_BSND)
    elif zigzag == 1:
        dq, dk, dv = jax.lax.cond(is_before, added, lambda dq: [dq, *nothing], dq_BSND)
    else:
        (early, late), (first, second) = _halves(queries, lse=1), _halves(keys)
        others = _pick(is_before, [early, first], [late, second])
        one, another = _apart(over(*map(_together, [late, first], others)))
        zeros = [jnp.zeros_like(x) for x in another]
        here, there = _pick(is_before, [another, zeros], [zeros, another])
        dq = dq_BSND + jnp.concatenate([here[0], one[0] + there[0]], 1)
        sums = zip(one[1:], here[1:], there[1:], strict=True)
        dk, dv = (jnp.concatenate([x + y, z], 1) for x, y, z in sums)
    return dq, dk, dv


def _halves(tensors: Tensors, lse: int = -1) -> tuple[Tensors, Tensors]:
    """Both halves of the positions of some tensors, of which one may be a logsumexp (B, N, S)."""
    pairs = [jnp.split(x, 2, 2 if i == lse else 1) for i, x in enumerate(tensors)]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _together(one: Tensors, another: Tensors) -> Tensors:
    """Two batches as one, so that one kernel computes both."""
    return [jnp.concatenate(pair) for pair in zip(one, another, strict=True)]


def _apart(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Undoes `_together`."""
    pairs = [jnp.split(x, 2) for x in tensors]
    return [one for one, _ in pairs], [another for _, another in pairs]


def _pick(flag: Any, if_set: Any, otherwise: Any) -> Any:
    """One of two trees of arrays."""
    return jax.tree.map(lambda x, y: jnp.where(flag, x, y), if_set, otherwise)


def _either(kernel: Kernel, otherwise: Kernel) -> Kernel:
    """A kernel, with something in its place where it does not take the shapes."""

    def run(*operands: Any, **spec: Any) -> Any:
        found = kernel(*operands, **spec)
        return otherwise(*operands, **spec) if found is NotImplemented else found

    return run

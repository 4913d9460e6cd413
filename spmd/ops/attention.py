"""`attention`: softmax attention as one op (and one for its gradient), with fused kernels.

Shapes are in the names:

    B batch    S, T sequence (query, key)    N query heads    K key heads    D head
    G query heads of one key head (N = K * G)

Under `spmd.jit` its two composites, `spmd.attention` and `spmd.attention_grad`, are one op each;
`attention_split` says how devices split them. On one device they are computed by cuDNN's kernel on
NVIDIA GPUs, the splash kernel on TPUs, and `attention_reference` everywhere else, also for shapes
and dtypes that a kernel does not take. Plain `jax.jit` takes `attention_reference` for both.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from spmd.errors import ArgumentError
from spmd.lowering.register import register_composite
from spmd.ops import attention_cudnn, attention_reference, attention_splash
from spmd.ops import attention_order as order
from spmd.ops import attention_split as split
from spmd.ops.attention_reference import Mask, Spec

ANYWHERE = 0  # the `length` of queries that are not at positions 0, 1, ... of a whole sequence

Implementation = Literal["auto", "composite", "xla", "cudnn"]

Kernel = Callable[..., Any]


def attention(
    q_BSND: Any,
    k_BTKD: Any,
    v_BTKD: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    positions: Any = None,
    segment_ids: Any = None,
    sinks_N: Any = None,
    scale: float | None = None,
    logits_dtype: Any = jnp.float32,
    zigzag: int = 1,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Returns `softmax(q k * scale) v`, for each query over the keys that it sees (attends to).

    Args:
      q_BSND: queries.
      k_BTKD: keys; key head 0 is for the first N / K query heads, head 1 for the next, and so on.
      v_BTKD: values, with the same heads as the keys.
      causal: whether query `i` sees only the keys 0 to `i`.
      window: the most keys that a causal query sees: its own and those just before it. The sliding
        window of Mistral 7B (Jiang et al. 2023); None is no limit.
      positions: integers (S,): the index of the last key that each query sees, if the queries are
        a part of a causal sequence; 0 to S - 1 when left out.
      segment_ids: integers (B, S), or a pair (B, S), (B, T): a query sees only the keys that have
        its number, such as those of its own document where documents are packed.
      sinks_N: for each query head the score of a key without value, which all queries see, and
        which is not scaled (gpt-oss; Xiao et al. 2024, *Attention Sinks*).
      scale: the factor of the scores; `1 / sqrt(D)` when left out.
      logits_dtype: the dtype in which scores and their softmax are computed.
      zigzag: the `parts` with which `spmd.ops.zigzag` reordered queries, keys and values; 1 if
        they are in the usual order.
      implementation: `auto` and `composite` leave it to the compiler: `spmd.jit` takes the
        platform's kernel, plain `jax.jit` the reference. `xla` is the reference as plain ops, which
        XLA's or this compiler's partitioner splits. `cudnn` is jax's own cuDNN attention, for GPUs:
        what a program compiled by plain `jax.jit` should use there.

    Returns:
      (B, S, N, D) in the dtype of the queries. The result of a query that sees no key is undefined.

    Raises:
      ArgumentError: shapes or dtypes that do not fit each other, an unknown implementation, window
        or positions without `causal`, a window below 1, or zigzag order of a part of a sequence.

    Example:
      >>> out_BSND = attention(q_BSND, k_BTKD, v_BTKD, segment_ids=documents_BS)
    """
    segments = segment_ids
    if segments is not None and not isinstance(segments, tuple | list):
        segments = (segments, segments)
    q, k, v = q_BSND, k_BTKD, v_BTKD
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    problem = required = ""
    if implementation not in get_args(Implementation):
        problem = f"implementation={implementation!r}"
        required = ", ".join(get_args(Implementation))
    elif not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape:
        problem, required = shapes, "q (B, S, N, D), k and v (B, T, K, D)"
    elif q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        problem, required = shapes, "the same batch and the same width of a head"
    elif not k.shape[2] or q.shape[2] % k.shape[2]:
        problem, required = shapes, "a number of query heads that is a multiple of the key heads'"
    elif not q.dtype == k.dtype == v.dtype:
        problem, required = f"q {q.dtype}, k {k.dtype}, v {v.dtype}", "one dtype"
    elif segments is not None and [s.shape for s in segments] != [q.shape[:2], k.shape[:2]]:
        have = ", ".join(str(s.shape) for s in segments)
        problem = f"segment_ids {have} for {shapes}"
        required = "one (B, S), where S is T, or a pair (B, S), (B, T)"
    elif positions is not None and not (causal and positions.shape == q.shape[1:2]):
        problem = f"positions {positions.shape} for q {q.shape}, causal={causal}"
        required = "positions (S,) of a causal attention"
    elif window is not None and not (causal and window > 0):
        problem = f"window={window}, causal={causal}"
        required = "a window of at least one key, of a causal attention"
    elif sinks_N is not None and (sinks_N.shape != q.shape[2:3] or implementation == "cudnn"):
        problem = f"sinks {sinks_N.shape} for {shapes}, implementation={implementation!r}"
        required = "sinks (N,), and another implementation than cudnn"
    elif zigzag != 1 and not (positions is None and q.shape[1] == k.shape[1]):
        problem, required = f"zigzag={zigzag} for {shapes}", "queries and keys of whole sequences"
    if problem:
        raise ArgumentError(
            "attention cannot be computed", actual=problem, required=required, fix="correct them"
        )
    zigzag = zigzag if causal else 1  # where all keys are seen their order does not matter
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = jnp.dtype(logits_dtype).name
    queries_BS, keys_BT = segments or (None, None)
    if implementation == "cudnn":
        keys_T = None
        if zigzag > 1:
            positions = keys_T = order.positions(q.shape[1], zigzag)
        elif window is not None and segments is not None and positions is None:
            positions = jnp.arange(q.shape[1])  # beside a mask the kernel takes no window
        visible_BST = Mask(positions, queries_BS, keys_BT, keys_T).visible(k.shape[1], window)
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, implementation="cudnn",
            mask=None if visible_BST is None else visible_BST[:, None],
            is_causal=causal and positions is None,
            local_window_size=(
                None if window is None or positions is not None else (window - 1, 0)
            ),
        )  # fmt: skip
    length = q.shape[1] if positions is None else ANYWHERE
    spec = Spec(causal, segments is not None, float(scale), length, dtype, window, zigzag)
    # Positions are an operand so that a device with a part of the queries has just theirs.
    if causal and positions is None:
        positions = order.positions(length, zigzag) if zigzag > 1 else jnp.arange(length)
    masks = positions, queries_BS, keys_BT
    out_BSND: jax.Array = _attend(spec, implementation != "xla", (q, k, v), sinks_N, masks)
    return out_BSND


Arrays = tuple[Any, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec: Spec, is_whole: bool, tensors: Arrays, sinks: Any, masks: Arrays) -> Any:
    return _attend_forward(spec, is_whole, tensors, sinks, masks)[0]


def _attend_forward(spec: Spec, is_whole: bool, tensors: Arrays, sinks: Any, masks: Arrays) -> Any:
    out_BSND, lse_BNS = _run(
        spec, is_whole, split.FORWARD, attention_reference.forward, tensors, masks
    )
    if sinks is not None:  # what a sink takes, the others lack; kernels need not know of it
        all_BNS = jnp.logaddexp(lse_BNS, sinks.astype(lse_BNS.dtype)[:, None])
        kept_BSN1 = jnp.swapaxes(jnp.exp(lse_BNS - all_BNS), 1, 2)[..., None]
        out_BSND, lse_BNS = (out_BSND * kept_BSN1).astype(out_BSND.dtype), all_BNS
    return out_BSND, ((*tensors, out_BSND, lse_BNS), sinks, masks)


def _attend_backward(spec: Spec, is_whole: bool, kept: Any, dout_BSND: Any) -> Any:
    tensors, sinks, masks = kept
    operands = (*tensors, dout_BSND)
    gradients = _run(spec, is_whole, split.GRADIENT, attention_reference.gradient, operands, masks)
    if sinks is None:
        return gradients, None, None
    # d out / d sink is -share out, and the gradient above needs just output and logsumexp of all.
    *_, out_BSND, lse_BNS = tensors
    share_BNS = jnp.exp(sinks.astype(lse_BNS.dtype)[:, None] - lse_BNS)
    own_BSN = jnp.sum(out_BSND.astype(lse_BNS.dtype) * dout_BSND.astype(lse_BNS.dtype), -1)
    dsinks_N = -jnp.einsum("bns,bsn->n", share_BNS, own_BSN)
    return gradients, dsinks_N.astype(sinks.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def _run(
    spec: Spec, is_whole: bool, name: str, reference: Kernel, tensors: Arrays, given: Arrays
) -> Any:
    # Without fields at their default: None is no attribute, and older modules lack the order.
    attributes = {k: x for k, x in spec._asdict().items() if x != Spec._field_defaults.get(k, ...)}
    masks = [mask.astype(jnp.int32) for mask in given if mask is not None]
    if not is_whole:
        return reference(*tensors, *masks, **attributes)
    return batched_composite(name, reference, attributes, int(spec.causal), len(tensors))(
        *tensors, *masks
    )


def batched_composite(
    name: str, reference: Kernel, attributes: Any, positions: int, tensors: int
) -> Any:
    """Returns `reference` as a composite, which under `jax.vmap` is one with a larger batch.

    Its operands are `tensors` of (B, ...), `positions` (0 or 1) of (S,), and segments (B, ...).
    """

    @custom_vmap
    def run(*operands: Any) -> Any:
        return jax.lax.composite(reference, name)(*operands, **attributes)

    # The new dim joins the batch, as (size * B, S, N, D), and is taken out of the results again.
    # Positions have no batch dim: if they differ from element to element, the reference is mapped.
    @run.def_vmap  # type: ignore[untyped-decorator]
    def mapped(size: int, batched: Sequence[bool], *operands: Any) -> Any:
        if any(batched[tensors : tensors + positions]):
            axes = [0 if is_batched else None for is_batched in batched]
            results = jax.vmap(partial(reference, **attributes), axes)(*operands)
            return results, jax.tree.map(lambda _: True, results)
        merged = []
        for i, (x, is_batched) in enumerate(zip(operands, batched, strict=True)):
            if tensors <= i < tensors + positions:  # the same for every sequence
                merged.append(x)
                continue
            whole = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            merged.append(whole.reshape(size * whole.shape[1], *whole.shape[2:]))
        results = batched_composite(name, reference, attributes, positions, tensors)(*merged)
        parts = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)
        return parts, tuple(True for _ in parts)

    return run


# One more piece of the keys.
#
# Where a sequence is split over P devices, device `own` has the `own`-th part of the queries, and
# it meets the P pieces of keys that lie like the parts. In their order, and in zigzag order (a part
# is an early and a late half, see `attention_order`), it sees of the piece of device `other`
#
#     other is   usual order   zigzag order
#     own        as a causal mask of this part alone has it: its positions ascend
#     before     all           all queries see the first half of the keys
#     after      nothing       the second half of the queries sees all keys
#
# So no kernel needs another mask than a causal one, and nothing is computed that is hidden anyway.
# What pieces give is joined by the logsumexp of their scores; the gradient takes that of all.
#
# In zigzag order late queries see the first half of the keys in any case. What else is seen has the
# same shape on all devices, so that each picks its operands and none branches: GPUs branch on the
# host, which would have to wait for the devices. One kernel computes both, as a batch's sequences.

Tensors = Sequence[Any]


def piece(kernel: Kernel, *operands: Any, zigzag: int = 1, **spec: Any) -> tuple[Any, Any]:
    """Returns (output, logsumexp) of attention over the pieces of keys so far and one more.

    Operands are this device's queries, the piece's keys and values, whether a device before this
    one has that part of the sequence, output (float32) and logsumexp so far, and segments (B, S)
    and (B, T), if any.
    """
    q_BSND, k_BTKD, v_BTKD, is_before, out_BSND, lse_BNS, *segments = operands
    run = _either(kernel, attention_reference.forward)

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
        one, another = _halves(over(*map(_together, [late, first], others)), dim=0)
        behind = _joined(behind, one)
        found = _joined(_pick(is_before, before, behind), another)
        halves = _pick(is_before, [found, behind], [before, found])
        out, lse = (jnp.concatenate(x, i + 1) for i, x in enumerate(zip(*halves, strict=True)))
    return out, lse


def _joined(so_far: Tensors, more: Tensors) -> Tensors:
    """Combines [output, logsumexp] over some keys and those over others into those over all."""
    (out, lse), (more_out, more_lse) = so_far, more
    both = jnp.logaddexp(lse, more_lse)
    old, new = (jnp.swapaxes(jnp.exp(x - both), 1, 2)[..., None] for x in (lse, more_lse))
    return [out * old + more_out.astype(jnp.float32) * new, both]


def piece_gradient(
    kernel: Kernel, *operands: Any, zigzag: int = 1, **spec: Any
) -> tuple[Any, Any, Any]:
    """Returns q's gradient, summed up to this piece of the keys, and those of the piece's k and v.

    Operands are q, the piece's k and v, output and logsumexp over all pieces, output gradient,
    `is_before` as for `piece`, q's float32 gradient so far, and segments, if any.
    """
    q_BSND, k_BTKD, v_BTKD, out_BSND, lse_BNS, dout_BSND, is_before, dq_BSND, *segments = operands
    run = _either(kernel, attention_reference.gradient)

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
        one, another = _halves(over(*map(_together, [late, first], others)), dim=0)
        zeros = [jnp.zeros_like(x) for x in another]
        here, there = _pick(is_before, [another, zeros], [zeros, another])
        dq = dq_BSND + jnp.concatenate([here[0], one[0] + there[0]], 1)
        sums = zip(one[1:], here[1:], there[1:], strict=True)
        dk, dv = (jnp.concatenate([x + y, z], 1) for x, y, z in sums)
    return dq, dk, dv


def _halves(tensors: Tensors, lse: int = -1, dim: int = 1) -> tuple[Tensors, Tensors]:
    """Returns (first, second) halves along S of tensors (B, S, ...); `tensors[lse]`: (B, N, S)."""
    pairs = [jnp.split(x, 2, 2 if i == lse else dim) for i, x in enumerate(tensors)]
    return [first for first, _ in pairs], [second for _, second in pairs]


def _together(one: Tensors, another: Tensors) -> Tensors:
    """Concatenates two lists of tensors pairwise along the batch, for one call of a kernel."""
    return [jnp.concatenate(pair) for pair in zip(one, another, strict=True)]


def _pick(flag: Any, if_set: Any, otherwise: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(flag, x, y), if_set, otherwise)


def _either(kernel: Kernel, otherwise: Kernel) -> Kernel:
    """Returns a kernel that calls `kernel`, and `otherwise` if that returns NotImplemented."""

    def run(*operands: Any, **spec: Any) -> Any:
        found = kernel(*operands, **spec)
        return otherwise(*operands, **spec) if found is NotImplemented else found

    return run


# What computes them on which platform.

KERNELS = {"cuda": attention_cudnn, "tpu": attention_splash}

_usual = partial(partial, order.in_usual_order)
_HOW: Sequence[tuple[str, str, Callable[[Kernel], Kernel], Any]] = (
    (split.FORWARD, "forward", _usual(dims=(1, 1, 1), results=(1, 2)), split.lower_forward),
    (
        split.GRADIENT,
        "gradient",
        _usual(dims=(1, 1, 1, 1, 2, 1), results=(1, 1, 1)),
        split.lower_gradient,
    ),
    (split.PIECE, "forward", partial(partial, piece), None),
    (split.PIECE_GRADIENT, "gradient", partial(partial, piece_gradient), None),
)
"""(composite, function in the modules of `KERNELS` that computes it, wrapper of that function, its
local lowering, or None for the usual one)."""

for name, function, made, lower in _HOW:
    reference = getattr(attention_reference, function)
    register_composite(
        name,
        split.attention_rule,
        decomposition=reference if lower else made(reference),
        kernels={platform: made(getattr(those, function)) for platform, those in KERNELS.items()},
        # The gradient computes the scores again, and two products for each of the two.
        flops=partial(split.attention_flops, products=2 if function == "forward" else 5),
        arithmetic=split.ARITHMETIC,
        lower=lower,
    )

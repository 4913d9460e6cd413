"""`attention`: one op to the compiler, forward and backward, and a fused kernel on each device.

Shapes are in the names:

    B batch    S, T sequence (query, key)    N query heads    K key heads    D head
    G query heads of one key head (N = K * G)

Under `spmd.jit` its two composites, `spmd.attention` and `spmd.attention_grad`, stay whole: see
`attention_rules` for how they are split. What computes them on one device is cuDNN's kernel on
NVIDIA GPUs, the splash kernel on TPUs, and `attention_reference` everywhere else, also for shapes
and dtypes that a kernel does not take. Under plain `jax.jit` composites are their reference.
"""

from __future__ import annotations

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
from spmd.ops.attention_pieces import piece, piece_gradient
from spmd.ops.attention_reference import Mask, Spec
from spmd.ops.attention_rules import (
    ARITHMETIC,
    FORWARD,
    GRADIENT,
    PIECE,
    PIECE_GRADIENT,
    forward_flops,
    forward_rule,
    gradient_flops,
    gradient_rule,
    piece_gradient_rule,
    piece_rule,
)
from spmd.ops.attention_split import lower_forward, lower_gradient

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
    scale: float | None = None,
    logits_dtype: Any = jnp.float32,
    zigzag: int = 1,
    implementation: Implementation = "auto",
) -> jax.Array:
    """`softmax(q k * scale) v` over the keys that each query sees.

    Args:
      q_BSND: queries.
      k_BTKD: keys; each of the K heads serves N / K query heads in a row.
      v_BTKD: values, with the heads of the keys.
      causal: whether query `i` sees the keys up to `i` alone.
      window: of the keys that a causal query sees, how many at most: its own and those just before
        it. The sliding window of Mistral 7B (Jiang et al. 2023); None is all of them.
      positions: integers (S,): up to which key each query sees instead, for queries that are a part
        of a sequence.
      segment_ids: integers (B, S), or a pair (B, S), (B, T): a query sees the keys of its own
        segment alone. For packed documents.
      scale: of the scores; `1 / sqrt(D)` when left out.
      logits_dtype: what scores and their softmax are computed in.
      zigzag: the number of parts for which queries and keys were put into zigzag order
        (`spmd.ops.zigzag`); 1: they are in the usual one.
      implementation: `auto` and `composite` leave it to the compiler: `spmd.jit` takes the
        platform's kernel, plain `jax.jit` the reference. `xla` is the reference for XLA's, or the
        compiler's, partitioner to look into. `cudnn` is jax's own cuDNN attention, for GPUs: what
        a program compiled by plain `jax.jit` should use there.

    Returns:
      (B, S, N, D) in the dtype of the queries. A query that sees no key has no defined result.

    Raises:
      ArgumentError: shapes that do not fit each other, or an unknown implementation.

    Example:
      >>> out_BSND = attention(q_BSND, k_BTKD, v_BTKD, segment_ids=documents_BS)
    """
    segments = segment_ids
    if segments is not None and not isinstance(segments, tuple | list):
        segments = (segments, segments)
    _check(q_BSND, k_BTKD, v_BTKD, segments, positions, causal, window, zigzag, implementation)
    zigzag = zigzag if causal else 1  # where all keys are seen their order does not matter
    if scale is None:
        scale = q_BSND.shape[-1] ** -0.5
    dtype = jnp.dtype(logits_dtype).name
    queries_BS, keys_BT = segments or (None, None)
    if implementation == "cudnn":
        if zigzag > 1:
            positions = order.positions(q_BSND.shape[1], zigzag)
        elif window is not None and segments is not None and positions is None:
            positions = jnp.arange(q_BSND.shape[1])  # beside a mask the kernel takes no window
        mask = Mask(positions, queries_BS, keys_BT).ordered(k_BTKD.shape[1], zigzag)
        visible_BST = mask.visible(k_BTKD.shape[1], window)
        return jax.nn.dot_product_attention(
            q_BSND, k_BTKD, v_BTKD, scale=scale, implementation="cudnn",
            mask=None if visible_BST is None else visible_BST[:, None],
            is_causal=causal and positions is None,
            local_window_size=(
                None if window is None or positions is not None else (window - 1, 0)
            ),
        )  # fmt: skip
    length = q_BSND.shape[1] if positions is None else ANYWHERE
    spec = Spec(causal, segments is not None, float(scale), length, dtype, window, zigzag)
    is_whole = implementation != "xla"
    # Positions are an operand so that a device with a part of the queries has just theirs.
    if causal and positions is None:
        positions = order.positions(length, zigzag) if zigzag > 1 else jnp.arange(length)
    masks = positions, queries_BS, keys_BT
    out_BSND: jax.Array = _attend(spec, is_whole, (q_BSND, k_BTKD, v_BTKD), masks)
    return out_BSND


Arrays = tuple[Any, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec: Spec, is_whole: bool, tensors: Arrays, masks: Arrays) -> Any:
    return _attend_forward(spec, is_whole, tensors, masks)[0]


def _attend_forward(spec: Spec, is_whole: bool, tensors: Arrays, masks: Arrays) -> Any:
    out_BSND, lse_BNS = _run(spec, is_whole, FORWARD, attention_reference.forward, tensors, masks)
    return out_BSND, ((*tensors, out_BSND, lse_BNS), masks)


def _attend_backward(spec: Spec, is_whole: bool, kept: Any, dout_BSND: Any) -> Any:
    tensors, masks = kept
    operands = (*tensors, dout_BSND)
    gradients = _run(spec, is_whole, GRADIENT, attention_reference.gradient, operands, masks)
    return gradients, None


_attend.defvjp(_attend_forward, _attend_backward)


def _run(
    spec: Spec, is_whole: bool, name: str, reference: Kernel, tensors: Arrays, given: Arrays
) -> Any:
    """One of the two functions, as a composite or as it is."""
    attributes = spec._asdict()
    if spec.zigzag == 1:  # so that modules exported before there was an order read the same
        del attributes["zigzag"]
    if spec.window is None:  # an attribute of a composite has a value
        del attributes["window"]
    masks = [mask.astype(jnp.int32) for mask in given if mask is not None]
    if not is_whole:
        return reference(*tensors, *masks, **attributes)
    return _composite(name, reference, attributes, int(spec.causal), len(tensors))(*tensors, *masks)


def _composite(name: str, reference: Kernel, attributes: Any, positions: int, tensors: int) -> Any:
    """A composite whose `jax.vmap` is the same composite on a larger batch."""

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
        again = _composite(name, reference, attributes, positions, tensors)
        results = again(*merged)
        split = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)
        return split, tuple(True for _ in split)

    return run


KERNELS = {"cuda": attention_cudnn, "tpu": attention_splash}


def _on_each(name: str, made: Callable[[Kernel], Kernel]) -> dict[str, Kernel]:
    """What is made of each platform's kernel, `forward` or `gradient`."""
    return {platform: made(getattr(kernels, name)) for platform, kernels in KERNELS.items()}


register_composite(
    FORWARD,
    forward_rule,
    decomposition=attention_reference.forward,
    kernels=_on_each("forward", partial(order.in_usual_order, dims=(1, 1, 1), results=(1, 2))),
    flops=forward_flops,
    arithmetic=ARITHMETIC,
    lower=lower_forward,
)
register_composite(
    GRADIENT,
    gradient_rule,
    decomposition=attention_reference.gradient,
    kernels=_on_each(
        "gradient", partial(order.in_usual_order, dims=(1, 1, 1, 1, 2, 1), results=(1, 1, 1))
    ),
    flops=gradient_flops,
    arithmetic=ARITHMETIC,
    lower=lower_gradient,
)
for name, rule, run, kernel_of, flops in (
    (PIECE, piece_rule, piece, "forward", forward_flops),
    (PIECE_GRADIENT, piece_gradient_rule, piece_gradient, "gradient", gradient_flops),
):
    register_composite(
        name,
        rule,
        decomposition=partial(run, getattr(attention_reference, kernel_of)),
        kernels=_on_each(kernel_of, partial(partial, run)),
        flops=flops,
        arithmetic=ARITHMETIC,
    )


def _check(
    q: Any,
    k: Any,
    v: Any,
    segments: Any,
    positions: Any,
    causal: bool,
    window: int | None,
    zigzag: int,
    implementation: str,
) -> None:
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
    elif zigzag != 1 and not (positions is None and q.shape[1] == k.shape[1]):
        problem, required = f"zigzag={zigzag} for {shapes}", "queries and keys of whole sequences"
    if problem:
        raise ArgumentError(
            "attention cannot be computed", actual=problem, required=required, fix="correct them"
        )

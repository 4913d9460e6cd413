"""`fp8_dot`: products of 8-bit floats, scaled by the largest magnitudes in earlier steps.

The formats are those of Micikevicius et al., FP8 Formats for Deep Learning, 2022: e4m3 for what is
multiplied in the forward pass, e5m2 for the gradients that come in. Each operand is multiplied by a
scale that brings its largest entry close to the largest number of its format. *Delayed scaling*, as
in NVIDIA's Transformer Engine, takes scales from the maxima of the steps before, so that no operand
is read twice. Scales are powers of two: multiplying by them rounds nothing, in either direction.

    %1 = f32 weight's piece          its maximum is taken beside this: a term of an all-reduce
    %2 = clamp(%1 * scale)
    %3 = convert %2 : f8E4M3FN       what devices exchange is this
    %4 = dot_general %0, %3 : bf16
    %5 = %4 * (1 / scales)

Plain ops, no composite: XLA makes the product one call of cuBLASLt, and lays its operands out with
the summed dim minor, as cuBLASLt wants them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmd.errors import ArgumentError

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""As for `jax.lax.dot_general`: ((summed dims of x, of w), (batch dims of x, of w))."""

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

LARGEST_EXPONENT = 60
"""Scales are from 2**-60 to 2**60, so that the product of two is in float32's range."""


class Fp8State(NamedTuple):
    """The largest magnitudes of one `fp8_dot`'s operands in the last steps, the latest step first.

    Attributes:
      maxima: (..., R, H) in float32: R rows, for x, each weight, and the gradient of each result;
        H steps. 0 means that the maximum of a step is not known.
    """

    maxima: Any


def fp8_state(weights: Any = None, *, history: int = 16) -> Fp8State:
    """Returns the state of one `fp8_dot` before its first step.

    While no maxima are known scales are 1, and small gradients underflow. Maxima of gradients
    become known from layer to layer in the first steps: these need a low learning rate.

    Args:
      weights: the weight of the product, or the tuple of them, whose maxima begin the history; or
        None, for one weight that is not known yet.
      history: the number H of steps whose maxima are kept.

    Raises:
      ArgumentError: a history of no steps.

    Example:
      >>> fp8_state(w_KN).maxima.shape
      (3, 16)
    """
    if history < 1:
        raise ArgumentError(
            "no state can be made", actual=f"history={history}", required="at least 1 step"
        )
    given = weights if isinstance(weights, tuple) else (weights,)
    unknown = jnp.zeros((1, 1), jnp.float32)
    known = [unknown if w is None else _maximum(w) for w in given]
    first_R1 = jnp.concatenate([unknown, *known, *[unknown] * len(given)])
    return Fp8State(jnp.pad(first_R1, ((0, 0), (0, history - 1))))


def fp8_dot(
    x: Any,
    w: Any,
    state: Fp8State | None = None,
    *,
    dimension_numbers: DimensionNumbers | None = None,
    margin: int = 0,
) -> Any:
    """Returns `x @ w` in the dtype of `x`, computed with both operands rounded to 8-bit floats.

    Operands are scaled, clipped to the format's largest number (NaN stays NaN) and rounded to
    float8_e4m3fn, gradients of results to float8_e5m2. Products are summed in float32 and rounded
    to the dtype of `x`; before they are scaled back, except float16, which has too small a range.
    Gradients are computed likewise, then converted to the dtypes of `x` and `w`.

    The gradient of the state is no derivative but *the next state*: the histories with this step's
    maxima in front. Put it in the place of the state (`split` and `merge` of this module help), and
    use a state for one product a step, since gradients of several uses would be added.

    Args:
      x: (..., K).
      w: (K, N), or other dims as `dimension_numbers` says; or a tuple of weights, all multiplied
        with `x`, which is rounded once for all.
      state: from `fp8_state`, for as many weights. None takes the maxima of the operands at hand
        (*current scaling*): that takes longer, as each is read before it can be rounded.
      dimension_numbers: as of `jax.lax.dot_general`; None sums over the last dim of `x` and the
        first of `w`.
      margin: scales are divided by `2**margin`, so that maxima may grow in a step.

    Returns:
      (..., N), or as of `jax.lax.dot_general`; a tuple of those for a tuple of weights.

    Raises:
      ArgumentError: operands that are no floats, or a state for another number of weights.

    Example:
      >>> state = fp8_state(w_KN)
      >>> grads, state = jax.grad(lambda w, s: loss(fp8_dot(x_BK, w, s)), (0, 1))(w_KN, state)
    """
    x, single = jnp.asarray(x), not isinstance(w, tuple)
    weights = tuple(map(jnp.asarray, (w,) if single else w))
    dims: Any = dimension_numbers or (((x.ndim - 1,), (0,)), ((), ()))
    rows = 1 + 2 * len(weights)
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in (x, *weights)):
        raise ArgumentError(
            "fp8_dot takes no such operands",
            actual=", ".join(str(a.dtype) for a in (x, *weights)),
            required="floats",
            fix="convert them before",
        )
    if state is not None and (state.maxima.ndim != 2 or state.maxima.shape[0] != rows):
        raise ArgumentError(
            f"fp8_dot cannot scale {len(weights)} products by this state",
            actual=f"maxima {state.maxima.shape}",
            required=f"({rows}, history): of x, of each weight, and of each result's gradient",
            fix="make it by fp8_state(w), with the same w; of stacked layers, take one",
        )
    dims = tuple(tuple(tuple(map(int, side)) for side in pair) for pair in dims)  # hashable
    plan = _Plan(dims, margin, state is not None)
    maxima = jnp.zeros((rows, 1), jnp.float32) if state is None else state.maxima
    results = _products(plan, x, weights, maxima)
    return results[0] if single else results


def split(tree: Any) -> tuple[Any, Any]:
    """Returns two trees like `tree`: one with None for `Fp8State`s, one with None for all else.

    Example:
      >>> params, states = split(params)
      >>> grads, states = split(grads)  # the gradients of states are the next states
      >>> updates, opt_state = optimizer.update(grads, opt_state, params)
      >>> params = merge(optax.apply_updates(params, updates), states)
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_state)
    rest, states = ([x if _is_state(x) == kept else None for x in leaves] for kept in (False, True))
    return jax.tree.unflatten(structure, rest), jax.tree.unflatten(structure, states)


def merge(rest: Any, states: Any) -> Any:
    """Returns the tree of which `split` made the two: each state is put in its place in `rest`."""
    return jax.tree.map(
        lambda leaf, state: state or leaf,
        rest, states, is_leaf=lambda x: x is None or _is_state(x),
    )  # fmt: skip


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, Fp8State)


# The product and its gradients


class _Plan(NamedTuple):
    """The static parameters of a product: its dimension numbers, and how operands are scaled."""

    dims: Any
    margin: int
    delayed: bool  # by a state, not by the operands at hand


class _Rounded(NamedTuple):
    """An operand rounded to 8 bits, and the factor that undoes its scale."""

    values: jax.Array
    unscale: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(plan: _Plan, x: Any, weights: tuple[Any, ...], maxima: Any) -> tuple[Any, ...]:
    return _forward(plan, x, weights, maxima)[0]


def _forward(
    plan: _Plan, x: Any, weights: tuple[Any, ...], maxima: Any
) -> tuple[tuple[Any, ...], Any]:
    operands = (x, *weights)
    met = [_maximum(operand) for operand in operands]
    scales = _scales(plan, maxima[: len(met)], met, E4M3)
    x8, *weights8 = (_rounded(each, E4M3, scales[i]) for i, each in enumerate(operands))
    results = tuple(_dot(x8, w8, plan.dims, x.dtype) for w8 in weights8)
    like = jnp.zeros((0,), x.dtype), [jnp.zeros((0,), w.dtype) for w in weights]
    return results, (x8, weights8, maxima, met, like)


def _backward(plan: _Plan, kept: Any, grads: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], Any]:
    x8, weights8, maxima, met, (like_x, like_w) = kept
    owed = [_maximum(dy) for dy in grads]
    scales = _scales(plan, maxima[len(met) :], owed, E5M2)
    dx, dw = jnp.zeros((), like_x.dtype), []
    for i, (dy, w8, like) in enumerate(zip(grads, weights8, like_w, strict=True)):
        dy8 = _rounded(dy, E5M2, scales[i])
        term = _grad_of(0, dy8, w8, plan.dims, x8.values.ndim, like_x.dtype)
        dx = term if i == 0 else dx + term
        # Devices add their terms in the dtype of `x`, as those of a product in it.
        term = _grad_of(1, dy8, x8, plan.dims, w8.values.ndim, like_x.dtype)
        dw.append(term.astype(like.dtype))
    return dx, tuple(dw), jnp.concatenate([jnp.concatenate([*met, *owed]), maxima[:, :-1]], axis=1)


_products.defvjp(_forward, _backward)


def _dot(a: _Rounded, b: _Rounded, dims: Any, dtype: Any) -> jax.Array:
    # The sum is of numbers that are not scaled back: too large for float16.
    sums = jnp.float32 if dtype == jnp.float16 else dtype
    product = jax.lax.dot_general(a.values, b.values, dims, preferred_element_type=sums)
    return (product * (a.unscale * b.unscale).astype(sums)).astype(dtype)


def _grad_of(
    side: int, dy: _Rounded, other: _Rounded, dims: Any, rank: int, dtype: Any
) -> jax.Array:
    """Returns the gradient of a product's left (`side` 0) or right (1) operand, of `rank` dims."""
    # dy has the batch dims, then those of the left operand that are its own, then the right one's.
    (summed, other_summed), (batch, other_batch) = ((pair[side], pair[1 - side]) for pair in dims)
    own = _others(rank, summed, batch)
    other_own = _others(other.values.ndim, other_summed, other_batch)
    begin = len(batch) + (0 if side else len(own))
    dy_own = tuple(range(begin, begin + len(other_own)))
    dims = (dy_own, other_own), (tuple(range(len(batch))), other_batch)
    product = _dot(dy, other, dims, dtype)
    last = [summed[other_summed.index(d)] for d in sorted(other_summed)]
    order = [*batch, *own, *last]  # which dims of the operand the product's are
    if order == sorted(order):
        return product
    return jnp.transpose(product, sorted(range(rank), key=order.__getitem__))


def _others(rank: int, *taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(rank) if not any(d in some for some in taken))


# Scales


def _maximum(x: Any) -> jax.Array:
    """Returns the largest magnitude in an array, in float32 of shape (1, 1); 0 if it is empty."""
    # What follows the maximum only moves it. So devices' maxima stay terms up to the next state,
    # and all of a step are exchanged together: a convert would need each of them whole, and so
    # would a scan's stacking of scalars.
    # (An initial value would be one more maximum, in front of which they would be exchanged, too.)
    if not x.size:
        return jnp.zeros((1, 1), jnp.float32)
    return jnp.max(jnp.abs(x).astype(jnp.float32)).reshape(1, 1)


def _scales(plan: _Plan, maxima_RH: Any, met: Sequence[Any], dtype: Any) -> jax.Array:
    """Returns (R,): p / 2**margin for each operand, whose maxima were `maxima_RH` or are `met`.

    p is the largest power of two with which the largest maximum is in the format's range; 1 for 0.
    """
    known = maxima_RH if plan.delayed else jnp.concatenate(met)
    largest = jnp.max(jnp.where(jnp.isfinite(known), known, 0.0), axis=1)
    limit = np.float32(_limit(dtype))
    ratio = limit / jnp.where(largest > 0, largest, limit)
    bound = 2.0 ** (LARGEST_EXPONENT)
    bits = jax.lax.bitcast_convert_type(jnp.clip(ratio, 1 / bound, bound), jnp.int32)
    exponent_only = np.int32(0x7F800000)  # without its mantissa a float is the power of two below
    return jax.lax.bitcast_convert_type(bits & exponent_only, jnp.float32) * 2.0**-plan.margin


def _rounded(x: Any, dtype: Any, scale: Any) -> _Rounded:
    limit = _limit(dtype)
    return _Rounded(jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype), 1 / scale)


def _limit(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)

"""`linear`: products with weights that may be quantized, by the fastest way of each platform.

Shapes are in the names:

    B rows    I, O in and out    Q groups of I    P halves of a group    W half a group's width
    N places of adapters    R their rank

The composite `spmd.linear` stays whole in the compiler, and in exported programs. With few rows its
time is that of reading weights. For one row, GPUs run a multiplication and a sum, which XLA makes
one kernel, conversion and scale included; for more of them, and for any few of 4-bit weights, one
kernel reads all weights of a composite: on Hopper, for the numbers of rows that it was measured to
be faster with, that of `products_hopper`, else that of `products_triton`. On TPUs one row is one of
eight. With many rows its time is that of arithmetic, so if weights are 8-bit floats, GPUs round
rows to these, too, each with a scale of its own; 4-bit weights are written in the dtype of `x`
first, as few rows' are if groups are not of 128, and int8 ones are for more rows still. Everywhere
else weights are converted to it on their way.

`spmd.adapted_linear` is the same with low-rank adapters of the rows (`adapters_triton`).
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ArgumentError
from spmd.ir.dialect.composites import PREFIX
from spmd.ir.dialect.rule import REDUCE, REPLICATE, Rule, parse_rule
from spmd.ir.program import OpKind
from spmd.lowering.register import register_composite
from spmd.ops import adapters_triton, paged_hopper, products_hopper, products_triton

NAME, ADAPTED = "spmd.linear", "spmd.adapted_linear"

COUNT = PREFIX + "count"  # of weights with adapters, as the compiler's IR has it

FP8, MLIR_FP8 = products_hopper.FP8, "f8E4M3FN"

EIGHT_BIT_ROWS = 128
"""From this number of rows on, GPUs round rows to 8-bit floats if the weights are 8-bit floats: 256
take 49 us with 4096 x 22016 on an H200, 71 in bfloat16, 94 with weights converted on the way."""

WRITTEN_ROWS = 1024
"""From this number of rows on, GPUs of Hopper write int8 weights in the dtype of `x` first: 0.2 ms
for a layer of a 7B on an H100, where 1024 rows take 0.7 in bfloat16, 0.93 converted on the way."""

TPU_ROWS = 8  # rows of a tile

NIBBLES = 2
"""The 4-bit values in a byte: low bits are of a group's first half, high bits of its second."""


def linear(x_BI: Any, weight: Any) -> jax.Array:
    """Returns `x @ weight.T` in the dtype of `x`, summed in float32.

    Args:
      x_BI: rows.
      weight: an array (O, I); or a dict of quantized `values` and `scales`: 8-bit (O, I) with
        scales (O,), or (O, Q, W) with scales (O, Q), for groups of W neighbours; or 4-bit packed in
        uint8 values (O, Q, W) with scales (O, Q), for groups of 2 W neighbours: byte j of a group
        holds its elements j and j + W, each plus 8. `zeros` (O, Q), int8, if there are any, are
        subtracted from the integers of groups before these are scaled.

    Returns:
      (B, O).

    Raises:
      ArgumentError: shapes that do not fit each other.

    Example:
      >>> linear(x_BI, {"values": int8_OI, "scales": scales_O})
    """
    return linears(x_BI, [weight])[0]


def linears(
    x_BI: Any, weights: Sequence[Any], adapters: Sequence[Any] = (), place_B: Any = None
) -> tuple[jax.Array, ...]:
    """Returns the product of the same rows with each of several weights, as one op if possible.

    It is one op, whose outputs are split over the same axes, if all have the same groups, or none,
    and the smallest O divides the others: as of queries, keys and values, or gate and up of an MLP.

    Args:
      x_BI: rows.
      weights: several, each as for `linear`.
      adapters: of each weight low-rank ones, in the dtype of `x`: (A (N, R, I), B (N, R, O)). A row
        x gets x A^T B more, of its own place of the N.
      place_B: that place, int32; -1 for none.

    Returns:
      A tuple of (B, O) for each weight.

    Raises:
      ArgumentError: shapes that do not fit each other.

    Example:
      >>> q_BO, k_BO, v_BO = linears(x_BI, [q_OI, k_OI, v_OI])
    """
    names = ("values", "scales", "zeros")
    parts = [tuple(w[n] for n in names if n in w) if isinstance(w, dict) else (w,) for w in weights]
    for part in parts:
        values, *scales = part
        inner = math.prod(values.shape[1:]) * _in_a_number(values)
        fits = max(1, len(scales)) < values.ndim < 4 and x_BI.shape[1:] == (inner,)
        if not fits or any(s.shape != values.shape[: values.ndim - 1] for s in scales):
            raise ArgumentError(
                "linear cannot be computed",
                actual=f"x {x_BI.shape}, weight {', '.join(str(v.shape) for v in part)}",
                required="x (B, I) and (O, I); quantized (O, I), (O,) or (O, Q, W), (O, Q)",
                fix="correct the shapes",
            )
    outputs = [part[0].shape[0] for part in parts]
    fits = len(adapters) in (0, len(outputs)) and all(
        a.ndim == 3 and a.shape[2] == x_BI.shape[1] and b.shape == (*a.shape[:2], outer)
        for outer, (a, b) in zip(outputs, adapters, strict=False)
    )
    if not fits or (adapters and place_B.shape != x_BI.shape[:1]):
        raise ArgumentError(
            "linears cannot add adapters",
            actual=f"weights of {outputs} outputs, adapters "
            f"{[(a.shape, b.shape) for a, b in adapters]}, places {place_B.shape}",
            required="for each weight (A (N, R, I), B (N, R, O)), and a place of each row (B,)",
            fix="correct the shapes",
        )
    are_alike = all(n % max(1, min(outputs)) == 0 for n in outputs)
    if len({(v.shape[1:], _in_a_number(v)) for v, *_ in parts}) != 1 or not are_alike:
        own: Sequence[Sequence[Any]] = [[pair] for pair in adapters] or [()] * len(parts)
        each = zip(parts, own, strict=True)
        return tuple(_composite(x_BI, [part], pair, place_B)[0] for part, pair in each)
    return _composite(x_BI, parts, adapters, place_B)


def _in_a_number(values: Any) -> int:
    """How many elements of a weight a number of its values holds."""
    return NIBBLES if values.ndim == 3 and values.dtype == jnp.uint8 else 1


def _composite(
    x_BI: Any, parts: Sequence[Sequence[Any]], pairs: Sequence[Any], place_B: Any
) -> tuple[Any, ...]:
    # A byte of packed weights has an element of each half of its group: x gets the same dims,
    # (B, Q, 2, W), so that a split over groups splits both operands alike.
    values, operands = parts[0][0], [x for part in parts for x in part]
    dims: tuple[int, ...] = (x_BI.shape[1],)
    if values.ndim == 3:
        dims = values.shape[1], _in_a_number(values), values.shape[2]
    x = x_BI.reshape(-1, *dims)
    if not pairs:
        return tuple(jax.lax.composite(_decomposition, NAME)(x, *operands))
    thin = [y for a, b in pairs for y in (a.reshape(*a.shape[:2], *dims), b)]
    made = jax.lax.composite(_adapted, ADAPTED)(x, place_B, *thin, *operands, count=len(pairs))
    return tuple(made)


def _decomposition(x: Any, *operands: Any) -> tuple[Any, ...]:
    """Returns `x` times each weight: times its values in x's dtype, then times its scales."""
    return tuple(_product(x, *part) for part in _parts(operands))


def _adapted(
    x: Any, place_B: Any, *operands: Any, count: int, multiply: Any = _decomposition
) -> tuple[Any, ...]:
    pairs, weights = _pairs(operands, count)
    return add_adapters(x, _made(multiply, x, weights), pairs, place_B)


def _pairs(operands: Sequence[Any], count: int) -> tuple[list[Any], Sequence[Any]]:
    both = operands[: 2 * count]
    return list(zip(both[::2], both[1::2], strict=True)), operands[2 * count :]


def _made(multiply: Any, x: Any, weights: Sequence[Any]) -> Any:
    found = multiply(x, *weights)
    return _decomposition(x, *weights) if found is NotImplemented else found


def add_adapters(
    x: Any, found: Sequence[Any], pairs: Sequence[Any], place_B: Any
) -> tuple[jax.Array, ...]:
    """Returns products of rows, and to each those with an adapter of the row added; see `linears`.

    What is of other places is multiplied by 0, and not left out: so sums that devices have parts of
    are added up once, behind it. Of a single row its own adapter is read alone.
    """
    results, x_BI = [], x.reshape(x.shape[0], -1)
    for out_BO, (a, b_NRO) in zip(found, pairs, strict=True):
        of_column, a_NRI = jnp.arange(len(b_NRO)), a.reshape(*a.shape[:2], -1)
        if len(x_BI) == 1:
            own = jnp.maximum(place_B[0], 0)
            a_NRI, b_NRO, of_column = (
                jax.lax.dynamic_index_in_dim(y, own) for y in (a_NRI, b_NRO, of_column)
            )
        thin_BNR = jnp.einsum("bi,nri->bnr", x_BI, a_NRI)
        thin_BNR *= (of_column == place_B[:, None]).astype(x.dtype)[..., None]
        results.append(out_BO + jnp.einsum("bnr,nro->bo", thin_BNR, b_NRO))
    return tuple(results)


def _parts(operands: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yields each weight's values with its scales and zeros behind them, which have a dim less."""
    most = max(len(x.shape) for x in operands)
    begins = [i for i, x in enumerate(operands) if len(x.shape) == most]
    for begin, end in itertools.pairwise((*begins, len(operands))):
        yield operands[begin:end]


def _product(x: Any, values: Any, scales: Any = None, zeros: Any = None) -> Any:
    if values.ndim == 3:
        x_BQI = x.reshape(*x.shape[:2], -1)
        wide_OQI = _numbers(values, zeros, x.dtype)
        sums_BOQ = jnp.einsum("bqi,oqi->boq", x_BQI, wide_OQI, preferred_element_type=jnp.float32)
        return jnp.sum(sums_BOQ * scales.astype(jnp.float32), axis=-1).astype(x.dtype)
    # Sums are in float32 either way. Asked for them, cuBLAS would write them, for another kernel to
    # round.
    kept = x.dtype if scales is None else jnp.float32
    out_BO = jnp.einsum("bi,oi->bo", x, values.astype(x.dtype), preferred_element_type=kept)
    return _scaled(out_BO, scales).astype(x.dtype)


def _kernel(x: Any, *operands: Any) -> Any:
    parts = list(_parts(operands))
    if x.shape[0] == 1 and _in_a_number(parts[0][0]) == 1:
        return tuple(_row(x, *part) for part in parts)
    dtype = jnp.float32 if any(len(part) == 3 for part in parts) else x.dtype
    for kernels in (products_hopper, products_triton):
        found = kernels.products(x, [part[:2] for part in parts], dtype)
        if found is not NotImplemented:
            return tuple(_shifted(x, *given) for given in zip(found, parts, strict=True))
    if parts[0][0].ndim == 3:
        return tuple(_made_first(x, *part) for part in parts)
    if x.shape[0] >= EIGHT_BIT_ROWS and all(part[0].dtype == FP8 for part in parts):
        return _eight_bits(x, parts)
    are_int8 = all(part[0].dtype == jnp.int8 and len(part) == 2 for part in parts)
    if x.shape[0] >= WRITTEN_ROWS and are_int8 and paged_hopper.is_here():
        return tuple(_made_first(x, *part) for part in parts)
    return NotImplemented


def _adapted_kernel(x: Any, place_B: Any, *operands: Any, count: int) -> Any:
    pairs, weights = _pairs(operands, count)
    flat = [(a.reshape(*a.shape[:2], -1), b) for a, b in pairs]
    multiply = functools.partial(_made, _kernel, x, weights)
    x_BI, parts = x.reshape(x.shape[0], -1), list(_parts(weights))
    found = adapters_triton.adapted(x_BI, parts, flat, place_B, multiply)
    if found is NotImplemented:
        return _adapted(x, place_B, *operands, count=count, multiply=_kernel)
    return found


def _on_tpu(x: Any, *operands: Any) -> Any:
    """Returns what `_decomposition` does for one row, as one of several rows.

    XLA multiplies a single row in its vector units, which takes 2 to 4 times as long as reading the
    weights (by libtpu 0.0.42's cycles, v5e and v6e).
    """
    if x.shape[0] != 1:
        return NotImplemented
    rows = jnp.pad(x, ((0, TPU_ROWS - 1), *((0, 0),) * (x.ndim - 1)))
    return tuple(out_BO[:1] for out_BO in _decomposition(rows, *operands))


def _eight_bits(x_BI: Any, parts: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Returns x @ weight.T for each (8-bit weight, *scales), x's rows scaled to 448 and rounded."""
    x32_BI = x_BI.astype(jnp.float32)
    largest_B1 = jnp.max(jnp.abs(x32_BI), axis=1, keepdims=True)
    scales_B1 = jnp.where(largest_B1 > 0, largest_B1 / float(jnp.finfo(FP8).max), 1.0)
    rounded_BI = (x32_BI / scales_B1).astype(FP8)
    products = [
        jnp.einsum("bi,oi->bo", rounded_BI, part[0], preferred_element_type=x_BI.dtype)
        for part in parts
    ]
    return tuple(
        _scaled(out_BO.astype(jnp.float32) * scales_B1, *scales).astype(x_BI.dtype)
        for out_BO, (_, *scales) in zip(products, parts, strict=True)
    )


def _row(x: Any, values: Any, scales: Any = None, zeros: Any = None) -> Any:
    if values.ndim == 3:
        wide_OQW = _numbers(values, zeros, jnp.float32) * scales.astype(jnp.float32)[..., None]
        return jnp.sum(wide_OQW * x[0, :, 0].astype(jnp.float32), axis=(1, 2))[None].astype(x.dtype)
    out_O = jnp.sum(values.astype(jnp.float32) * x[0].astype(jnp.float32), axis=1)
    return _scaled(out_O[None], scales).astype(x.dtype)


def _shifted(x: Any, out_BO: Any, part: Sequence[Any]) -> Any:
    """Returns the product less that of zeros, with the sums of x over groups: s (v - z) x."""
    if len(part) == 3:
        _, scales_OQ, zeros_OQ = part
        sums_BQ = jnp.sum(x.astype(jnp.float32), axis=(2, 3))
        shifts_OQ = scales_OQ.astype(jnp.float32) * zeros_OQ.astype(jnp.float32)
        out_BO -= jnp.einsum("bq,oq->bo", sums_BQ, shifts_OQ, precision="highest")
    return out_BO.astype(x.dtype)


def _numbers(values_OQW: Any, zeros_OQ: Any, dtype: Any) -> Any:
    """The numbers (O, Q, I) to scale, exact in bfloat16; of 4 bits 0x9A 0x87 are 2 -1 1 0."""
    if _in_a_number(values_OQW) > 1:
        values_OQW = jnp.concatenate([values_OQW & 15, values_OQW >> 4], -1).astype(jnp.int8) - 8
    wide_OQI = values_OQW.astype(dtype)
    return wide_OQI if zeros_OQ is None else wide_OQI - zeros_OQ.astype(dtype)[..., None]


def _made_first(x: Any, values: Any, scales: Any, zeros: Any = None) -> Any:
    """Returns x @ weight.T of a quantized weight that is made in x's dtype first."""
    is_grouped = values.ndim == 3
    wide = _numbers(values, zeros, jnp.float32) if is_grouped else values.astype(jnp.float32)
    wide *= scales.astype(jnp.float32)[..., None]
    whole_OI = wide.astype(x.dtype).reshape(len(values), -1)
    if not is_grouped or _in_a_number(values) > 1:  # else XLA converts it on its way
        whole_OI = jax.lax.optimization_barrier(whole_OI)
    x = x.reshape(x.shape[0], -1)
    return jnp.einsum("bi,oi->bo", x, whole_OI, preferred_element_type=x.dtype)


def _scaled(out_BO: Any, scales_O: Any = None) -> Any:
    return out_BO if scales_O is None else out_BO * scales_O.astype(jnp.float32)


def _rule(kind: OpKind) -> Rule:
    # An axis splits one factor of an op: all outputs have a factor in common, as many as the fewest
    # are, and the others a rest. With queries (12), keys (4) and values (4) of 8 inputs:
    #     b i, (o r0) i, o i, o i -> b (o r0), b o, b o
    # Of adapters ranks are whole, and outputs and inputs are split as the weights'.
    parts, count = list(_parts(_weights_of(kind))), kind.attrs.get(COUNT, 0)
    least = min(part[0].shape[0] for part in parts)
    is_grouped = parts[0][0].rank == 3
    inputs = "q p w" if is_grouped else "i"
    thin, terms, results = [f"b {inputs}", *["b"] * bool(count)], [], []
    for n, part in enumerate(parts):
        outputs = "o" if part[0].shape[0] == least else f"(o r{n})"
        inner = ("q w", "q", "q") if is_grouped else ("i", "")
        thin += [f"n k {inputs}", f"n k {outputs}"] if count else []
        terms += [f"{outputs} {dims}" for dims in inner[: len(part)]]
        results.append(f"b {outputs}")
    kinds = {"i": REDUCE, "q": REDUCE, **dict.fromkeys("pwnk", REPLICATE)}
    return parse_rule(
        f"{', '.join(thin + terms)} -> {', '.join(results)}", kind.operands, kind.results,
        kinds=kinds, reduction="add", linear=[(0,)],
    )  # fmt: skip


def _weights_of(kind: OpKind) -> Sequence[Any]:
    return kind.operands[2 + 2 * kind.attrs[COUNT] :] if COUNT in kind.attrs else kind.operands[1:]


def _flops(kind: OpKind) -> float:
    x, *_ = kind.operands
    count = kind.attrs.get(COUNT, 0)
    rows, inputs = x.shape[0], math.prod(x.shape[1:])
    products = sum(inputs * part[0].shape[0] for part in _parts(_weights_of(kind)))
    columns = math.prod(kind.operands[2].shape[:2]) if count else 0
    products += columns * (count * inputs + sum(y.shape[1] for y in kind.results[:count]))
    return 2.0 * float(rows * products)


def _multiplies(kind: OpKind, platform: str | None) -> str:
    x, values = kind.operands[0], {part[0].dtype for part in _parts(_weights_of(kind))}
    is_rounded = platform == "cuda" and x.shape[0] >= EIGHT_BIT_ROWS and values == {MLIR_FP8}
    return MLIR_FP8 if is_rounded else x.dtype


_how: dict[str, Any] = {"flops": _flops, "multiplies": _multiplies}
_platforms: dict[str, Any] = {"cuda": _kernel, "tpu": _on_tpu}
register_composite(NAME, _rule, decomposition=_decomposition, kernels=_platforms, **_how)

_platforms = {"cuda": _adapted_kernel, "tpu": functools.partial(_adapted, multiply=_on_tpu)}
register_composite(ADAPTED, _rule, decomposition=_adapted, kernels=_platforms, **_how)

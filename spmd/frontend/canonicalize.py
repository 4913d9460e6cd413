"""Canonicalize: rewrites rare ops as common ones, so that later stages handle fewer kinds of ops.

Rewritten are CHLO's scans, old and dynamic ops, custom calls that compute what an op
does, batch norms, and FFTs of several dims.

before: `%2 = stablehlo.batch_norm_inference %x, ...`
after:  `%7 = stablehlo.subtract ...; %8 = stablehlo.multiply ...`

before: `%2 = stablehlo.dynamic_reshape %x, %shape : tensor<2x12xf32>`
after:  `%2 = stablehlo.reshape %x : tensor<2x12xf32>`

Last come values without elements: each is a constant, whatever made it, and no op reads one but
loops, branches, callbacks and the ends of manual regions. So nothing is planned or sent for them.

before: `%2 = stablehlo.slice %x [0:0]; %3 = stablehlo.concatenate %2, %x`
after:  `%4 = stablehlo.constant dense<>`, and every use of `%3` reads `%x`
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from spmd.errors import SpmdError
from spmd.frontend.importer.module import import_module
from spmd.frontend.importer.ops import refusal
from spmd.frontend.trace import trace
from spmd.ir.description import FROM_MANUAL, key_of
from spmd.ir.dialect.bodies import inline_elementwise, is_elementwise
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.manual import TO_MANUAL
from spmd.ir.program import Body, Op, Program, Value, has_effect
from spmd.ir.rewrite import Now, append_ops, edit_ops
from spmd.ir.types import Attribute, TensorType, needs_x64, numpy_dtype, types_text


class Site(NamedTuple):
    """Holds an op to rewrite, which reads values of the new program, and that program's builder."""

    b: Builder
    op: Op
    operands: tuple[Value, ...]  # the op's
    attrs: Mapping[str, Attribute]  # likewise

    @property
    def result(self) -> TensorType:
        """Returns the type of the op's first result."""
        return self.op.kind.results[0]

    def computed(self, function: Callable[..., Any]) -> tuple[Value, ...]:
        """Appends a jax function of the operands; returns results or raises UnsupportedOpError."""
        kind = self.op.kind
        structs = [jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for t in kind.operands]
        try:
            with jax.enable_x64(needs_x64((*kind.operands, *kind.results))):
                module = trace(function, structs, {}, platform="cpu").module
        except (TypeError, ValueError) as error:
            self.fail(str(error).partition("\n")[0], "correct its attributes")
        return append_ops(self.b, import_module(module).program, self.operands, loc=self.op.loc)

    def fail(self, why: str, fix: str) -> NoReturn:
        """Raises UnsupportedOpError for this op: why it cannot be rewritten, what to do instead."""
        op = f"{self.op.name}{types_text(self.op.kind.operands)} -> {self.result}"
        raise refusal(self.op.name, why, fix, self.op.loc, op)


Canonical = Callable[[Site], Sequence[Value]]


def canonicalize(program: Program) -> Program:
    """Rewrites ops in `CANONICAL` and values without elements; UnsupportedOpError if it cannot."""
    program = _rewritten(program, lambda op: CANONICAL.get(key_of(op.name, op.kind.attrs)))
    if any(type_.is_empty for type_ in program.types):
        program = _rewritten(program, _of_nothing)
    return program


def _rewritten(program: Program, function_of: Callable[[Op], Canonical | None]) -> Program:
    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        function = function_of(op)
        if function is None:
            return None
        results = function(Site(b, op, op.operands, op.kind.attrs))
        for value, wanted in zip(results, op.kind.results, strict=True):
            if b.types[value] != wanted:
                raise SpmdError(f"{op.name} was rewritten to {b.types[value]}, not {wanted}")
        return results

    return edit_ops(program, edit)


def _scan(site: Site) -> Sequence[Value]:
    """Rewrites an associative scan of n elements as log2(n) elementwise steps on shifted slices.

    `y[0] = body(x[0], init)`, then for shifts s = 1, 2, 4, ...: `y[i] = body(y[i], y[i - s])`.
    """
    # A running sum of 1 2 3 4:   shift 1: 1 3 5 7   shift 2: 1 3 6 10
    # After the step with shift s every element holds the last 2 s terms up to its own. Each step is
    # elementwise, so that the scanned dim may be split; a loop over its elements could not be.
    body: Body = site.attrs["body"]
    dim = site.attrs["dimension"]
    if len(site.operands) != 2 or not site.attrs.get("is_associative") or not is_elementwise(body):
        site.fail("only a scan of one tensor by an associative elementwise body is known",
                  "write it as a loop")  # fmt: skip
    if body.region.results[0] != body.region.results[1]:
        site.fail("its output differs from its carry", "write it as a loop")
    b, is_reverse = site.b, bool(site.attrs.get("is_reverse"))
    y, init = site.operands
    size = site.result.shape[dim]

    def part(x: Value, start: int, stop: int) -> Value:
        return b.slice_dim(x, dim, *((size - stop, size - start) if is_reverse else (start, stop)))

    def joined(head: Value, tail: Value) -> Value:
        return b.concatenate((tail, head) if is_reverse else (head, tail), dim)

    def combined(x: Value, carry: Value) -> Value:
        return inline_elementwise(b, body, (x, carry), b.types[x].shape)[0]

    head = part(y, 0, 1)
    head = combined(head, b.reshape(init, b.types[head].shape))
    y = joined(head, part(y, 1, size)) if size > 1 else head
    shift = 1
    while shift < size:
        moved = part(y, 0, size - shift)
        y = joined(part(y, 0, shift), combined(part(y, shift, size), moved))
        shift *= 2
    return y, b.reshape(part(y, size - 1, size), site.op.kind.results[1].shape)


# Older ops. Others, and dynamic ones whose result's type does not say all, are written anew when
# they are imported (`LEGALIZED` of `importer/ops.py`).


def _einsum(site: Site) -> Sequence[Value]:
    """Rewrites an einsum as `jnp.einsum` does: as sums, one `dot_general` and a transpose.

    before: `%2 = stablehlo.einsum %0, %1 "ijl,jk->ki"`
    after:  `%2 = reduce_add %0 [2]; %3 = dot_general %2, %1; %4 = transpose %3`
    """
    stated = getattr(site.attrs.get("precision_config"), "text", "")
    precision = tuple(jax.lax.Precision[name] for name in re.findall(r"precision (\w+)", stated))
    einsum = partial(
        jnp.einsum,
        site.attrs["einsum_config"],
        precision=precision or jax.lax.Precision.DEFAULT,
        preferred_element_type=numpy_dtype(site.result.dtype),
    )
    return site.computed(einsum)


def _torch_index_select(site: Site) -> Sequence[Value]:
    """Rewrites an index select as a `gather` along `dim`, with `batch_dims` leading batch dims."""
    batch = site.attrs["batch_dims"]
    select = partial(jnp.take, axis=site.attrs["dim"] - batch, mode="clip")
    for _ in range(batch):
        select = jax.vmap(select)
    return site.computed(select)


def _map(site: Site) -> Sequence[Value]:
    """Rewrites a `map` as the ops of its body, on whole tensors instead of on single elements.

    before: `%2 = stablehlo.map %0, %1 ({ (a, b): a * b + 1 }) : tensor<4x6xf32>`
    after:  `%2 = %0 * %1; %3 = splat 1; %4 = %2 + %3`
    """
    body: Body = site.attrs["body"]
    if not is_elementwise(body):
        site.fail("its body is not elementwise", "use elementwise ops in the body")
    return inline_elementwise(site.b, body, site.operands, site.result.shape)


_UNARY = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "sinh", "tan")


def _unary(name: str) -> Canonical:
    return lambda site: site.b.op(f"chlo.{name}", site.operands, site.op.kind.results)


def _top_k(site: Site) -> Sequence[Value]:
    """Rewrites a custom call for a top-k as `chlo.top_k`; UnsupportedOpError for the smallest k."""
    given = (site.attrs.get(f"mhlo.{name}") for name in ("attributes", "backend_config"))
    if any("largest = false" in getattr(attr, "text", "") for attr in given):
        site.fail("it asks for the smallest elements", "negate the operand and the values")
    attrs = {"k": site.result.shape[-1]}
    return site.b.op("chlo.top_k", site.operands[:1], site.op.kind.results, attrs)


def _approx_top_k(site: Site) -> Sequence[Value]:
    """Rewrites an approximate top-k as an exact one: the first elements of a sort.

    The call's body is the comparator, its operands are tensors, then unneeded initial values.
    """
    if "body" not in site.attrs:
        site.fail("the module lacks its comparator", "use jax.lax.top_k")
    config = getattr(site.attrs.get("mhlo.backend_config"), "text", "")
    found = re.search(r"reduction_dim = (\d+)", config)
    if found is None:
        site.fail("its configuration has no reduction_dim", "use jax.lax.top_k")
    b, dim = site.b, int(found[1])
    tensors = site.operands[: len(site.operands) // 2]
    attrs = {"dimension": dim, "is_stable": True, "body": site.attrs["body"]}
    ordered = b.op("stablehlo.sort", tensors, [b.types[v] for v in tensors], attrs)
    starts = (0,) * site.result.rank
    return [
        b.slice(v, starts, type_.shape)
        for v, type_ in zip(ordered, site.op.kind.results, strict=True)
    ]


# FFTs of several dims as those of one dim each, so that only this one has to be whole.
#
# before: `%1 = fft %0 [8, 16]`
# after:  `%1 = fft %0 [16]; %2 = transpose %1 [1, 0]; %3 = fft %2 [8]; %4 = transpose %3 [1, 0]`
#
# Where nothing is exchanged between them, one device's program gets the FFT of several dims back
# (`spmd.lowering.rewrites.simplify`).


def _fft(site: Site) -> Sequence[Value]:
    lengths, kind = site.attrs["fft_length"], site.attrs["fft_type"].text
    if len(lengths) == 1:
        return site.b.repeat(site.op.kind, site.operands)
    (real,) = re.findall(r"I?R?FFT", kind)

    def in_turn(x: Any) -> Any:
        # Real values become complex along the last dim, which is the first to be transformed, and
        # complex values real along the last one, too, at the end.
        dims = range(-len(lengths), 0)
        for dim in dims if real == "IRFFT" else reversed(dims):
            which = real if dim == -1 else real.replace("RFFT", "FFT")
            x = lax.fft(x.swapaxes(dim, -1), lax.FftType[which], (lengths[dim],)).swapaxes(dim, -1)
        return x

    return site.computed(in_turn)


# Batch normalization as sums and elementwise ops (StableHLO specification, `batch_norm_*`): over a
# split batch its statistics are partial sums, like any other.
#
# before: `%y, %mean, %var = stablehlo.batch_norm_training %x, %scale, %offset`
# after:  `%mean = sum(%x) / n; %var = sum((%x - %mean)^2) / n; %y = (%x - %mean) * ...`


def _norm(site: Site) -> Sequence[Value]:
    type_ = site.op.kind.operands[0]
    feature: int = site.attrs["feature_index"]
    others = [d for d in range(type_.rank) if d != feature]
    count = type_.size // max(type_.shape[feature], 1)
    epsilon = float(getattr(site.attrs["epsilon"], "text", "0").partition(":")[0])

    def spread(x: Any) -> Any:
        """Broadcasts a vector of one number for each feature to the shape of the operand."""
        return lax.broadcast_in_dim(x, type_.shape, (feature,))

    def total(x: Any) -> Any:
        return lax.reduce_sum(x, others)

    def normalize(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        factor = lax.rsqrt(variance + epsilon) * scale
        return (x - spread(mean)) * spread(factor) + spread(offset)

    def train(x: Any, scale: Any, offset: Any) -> Any:
        mean = total(x) / count
        variance = total(lax.square(x - spread(mean))) / count
        return normalize(x, scale, offset, mean, variance), mean, variance

    # The gradients of `x`, `scale` and `offset`; `var` is the variance with epsilon:
    # `dx = scale / sqrt(var) / n * (n * dy - sum(dy) - (x - mean) * sum(dy * (x - mean)) / var)`,
    # `dscale = sum(dy * (x - mean)) / sqrt(var)` and `doffset = sum(dy)`.
    def grad(x: Any, scale: Any, mean: Any, variance: Any, dy: Any) -> Any:
        inverse = lax.rsqrt(variance + epsilon)
        centered = x - spread(mean)
        dy_sum, weighted = total(dy), total(dy * centered)
        tilt = centered * spread(weighted * inverse * inverse / count)
        dx = spread(scale * inverse) * (dy - spread(dy_sum / count) - tilt)
        return dx, weighted * inverse, dy_sum

    functions: dict[str, Callable[..., Any]]
    functions = {"inference": normalize, "training": train, "grad": grad}
    return site.computed(functions[site.op.name.removeprefix("stablehlo.batch_norm_")])


def _of_nothing(op: Op) -> Canonical | None:
    """Returns what rewrites an op on values without elements; None if the op stays as it is."""
    if op.name in (TO_MANUAL, FROM_MANUAL) or has_effect(op):
        return None
    if op.results and all(type_.is_empty for type_ in op.kind.results):
        return lambda s: [s.b.splat(0, type_) for type_ in op.kind.results]
    return _READERS.get(op.name) if any(t.is_empty for t in op.kind.operands) else None


_READERS: dict[str, Canonical] = {
    **dict.fromkeys(
        ("stablehlo.convolution", "stablehlo.dot_general", "chlo.ragged_dot"),
        lambda s: (s.b.splat(0, s.result),),
    ),
    "stablehlo.concatenate": lambda s: (
        s.b.concatenate([v for v in s.operands if not s.b.types[v].is_empty], s.attrs["dimension"]),
    ),
    "stablehlo.dynamic_update_slice": lambda s: s.operands[:1],
    "stablehlo.pad": lambda s: (s.b.broadcast(s.operands[1], s.result.shape),),
    **dict.fromkeys(
        ("stablehlo.reduce", "stablehlo.reduce_window"),
        lambda s: [
            s.b.broadcast(init, s.result.shape) for init in s.operands[len(s.operands) // 2 :]
        ],
    ),
    "stablehlo.scatter": lambda s: s.operands[: len(s.op.results)],
    "stablehlo.select_and_scatter": lambda s: (s.b.broadcast(s.operands[2], s.result.shape),),
}
"""Op -> what it is where an operand has no elements and the results have."""

CANONICAL: Mapping[str, Canonical] = {
    "chlo.scan": _scan,
    "custom_call:AllocateBuffer": lambda s: (s.b.splat(0, s.result),),  # `jax.lax.empty`
    "custom_call:ApproxTopK": _approx_top_k,
    **dict.fromkeys(("custom_call:TopK", "custom_call:mhlo.topk"), _top_k),
    **{f"custom_call:mhlo.{name}": _unary(name) for name in _UNARY},
    **{f"stablehlo.batch_norm_{name}": _norm for name in ("grad", "inference", "training")},
    # Of dynamic ops the result's type says the shape, wherever the shape operand comes from.
    "stablehlo.dynamic_broadcast_in_dim": lambda s: (
        s.b.broadcast(s.operands[0], s.result.shape, s.attrs["broadcast_dimensions"]),
    ),
    "stablehlo.dynamic_iota": lambda s: (s.b.iota(s.result, s.attrs["iota_dimension"]),),
    "stablehlo.dynamic_reshape": lambda s: (s.b.reshape(s.operands[0], s.result.shape),),
    **dict.fromkeys(("stablehlo.einsum", "stablehlo.unary_einsum"), _einsum),
    "stablehlo.fft": _fft,
    "stablehlo.map": _map,
    "stablehlo.torch_index_select": _torch_index_select,
}
"""Name of an op (or `custom_call:` and its target) -> the function that rewrites such an op."""

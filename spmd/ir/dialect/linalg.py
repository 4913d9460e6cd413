"""Rules of FFTs, linear algebra, random numbers and other library calls.

Batch dims may be split, the dims of a matrix stay whole.
"""

import math
import re
from collections.abc import Sequence

from spmd.ir.description import BATCHED_CALL, LONE_CALL, batch_rank
from spmd.ir.dialect.batched import Batched, in_front, stacked
from spmd.ir.dialect.elementwise import elementwise_rule
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import REPLICATE, DimFactors, Rule, RuleBuilder, parse_rule, whole
from spmd.ir.program import OpKind
from spmd.ir.types import Opaque, TensorType

MATRIX_CALLS = (
    "custom_call:Eigh",
    "custom_call:LuDecomposition",
    "custom_call:ProductOfElementaryHouseholderReflectors",
    "custom_call:Qr",
)
"""Custom calls that XLA expands itself; the last two dims of their first operand are a matrix."""

BLOCK = 64
"""Columns that a library takes in one pass, in a Cholesky factorization and a triangular solve: for
4096 x 4096 an H200 takes 1.6 and 2.8 ms, and for 64 passes through the operands 1.8 and 2.7."""

TRANSFORM = 4096
"""The longest FFT, in elements, that a library does in one pass through memory: on an H200 cuFFT
takes 220 us, as a copy does, for 512 MiB in rows of 1024."""


def _blocks(kind: OpKind) -> float:
    return max(1, kind.operands[0].shape[-1] / BLOCK)


@op(
    "stablehlo.fft",
    batched=in_front,
    is_same_locally=True,
    passes=lambda kind: max(1, math.log(math.prod(kind.attrs["fft_length"]) or 1, TRANSFORM)),
)
def _fft(kind: OpKind) -> Rule:
    """Returns the rule by which all dims may be split but the last ones, which are transformed."""
    return whole(kind, kind.operands[0].rank - len(kind.attrs["fft_length"]))


@op("stablehlo.triangular_solve", batched=in_front, is_same_locally=True, passes=_blocks)
def _triangular_solve(kind: OpKind) -> Rule:
    """Returns the rule `b i j, b j c -> b j c`: `b`, `c` may be split, operand 1 may be partial."""
    batch = " ".join("defgh"[: kind.operands[0].rank - 2])
    right = f"{batch} j c" if kind.attrs["left_side"] else f"{batch} c j"
    kinds, text = {"i": REPLICATE, "j": REPLICATE}, f"{batch} i j, {right} -> {right}"
    return parse_rule(text, kind.operands, kind.results, kinds=kinds, linear=((1,),))


_LAYOUT = re.compile(r"dense<\[?([\d, ]*)\]?> : tensor<\d+xindex>")


def _batched_call(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
    """Returns a call for `count`, with new batch dim 0; None for side effects, scalar operands."""
    if kind.attrs.get("has_side_effect") or not all(t.rank for t in kind.operands):
        return None

    def layout(found: re.Match[str]) -> str:
        dims = [int(d) + 1 for d in re.findall(r"\d+", found[1])]
        return f"dense<{[*dims, 0] if dims else 0}> : tensor<{len(dims) + 1}xindex>"

    attrs = dict(kind.attrs)
    for name in attrs.keys() & {"operand_layouts", "result_layouts"}:
        attrs[name] = Opaque(_LAYOUT.sub(layout, attrs[name].text))
    if said := attrs.get("mhlo.frontend_attributes"):
        batch = re.compile(r'(?<=num_batch_dims = ")\d+(?=")')
        text = batch.sub(lambda found: str(int(found[0]) + 1), said.text)
        attrs["mhlo.frontend_attributes"] = Opaque(text)
    return stacked(kind, count, [True] * len(differs), **attrs)


@op(BATCHED_CALL, batched=_batched_call, is_same_locally=True)
def _library_call(kind: OpKind) -> Rule:
    """Returns the rule by which a call's batch dims, and a solve's columns, may be split.

    That is `b i j, b j c -> b j c` for a triangular solve.
    """
    batch, target = batch_rank(kind) or 0, str(kind.attrs["call_target_name"])
    right = 1 if "trsm" in target else 3 if "gtsv" in target else None
    if right is None or not kind.operands[right].rank:
        return whole(kind, batch)
    config = getattr(kind.attrs.get("mhlo.backend_config"), "text", "")
    is_right = right == 1 and re.search(r"side = 82\b|left_side = false", config)
    sides, free = kind.operands[right], -2 if is_right else -1
    build = RuleBuilder()
    shared, column = build.dims(sides.shape[:batch]), build.factor(sides.shape[free])

    def dims(type_: TensorType, has_column: bool) -> list[DimFactors]:
        if not type_.rank:
            return []
        found = shared + build.dims(type_.shape[batch:], REPLICATE)
        if has_column:
            found[free] = column
        return found

    return build.build(
        [dims(t, i == right) for i, t in enumerate(kind.operands)],
        [dims(t, t.shape == sides.shape) for t in kind.results],
        linear=((right,),) if len(kind.results) == 1 else (),
    )


@op(*MATRIX_CALLS, batched=_batched_call, is_same_locally=True)
@op("stablehlo.cholesky", batched=in_front, is_same_locally=True, passes=_blocks)
def _matrix(kind: OpKind) -> Rule:
    """Returns `b i j -> b i j, b k` for QR, Cholesky, ...: dims before a matrix's may be split."""
    return whole(kind, kind.operands[0].rank - 2)


op(
    # They say where or how an array lies in memory, and leave its elements alone.
    "custom_call:LayoutConstraint",
    # jax's GPU kernels of its default generator: two words of key and of counter give two words.
    "custom_call:cu_threefry2x32_ffi",
    "custom_call:hip_threefry2x32_ffi",
    is_same_locally=True,
)(elementwise_rule)


@op("custom_call:cpu_csr_sparse_dense_ffi", is_same_locally=True)
def _sparse_product(kind: OpKind) -> Rule:
    """Returns the rule `e, r, f, k c -> m c`: only columns `c` of the dense operand may be split.

    The sparse one is three operands: elements, where rows begin among them, elements' columns.
    """
    column = " c" * (kind.operands[3].rank - 1)
    kinds, linear = dict.fromkeys("efrkm", REPLICATE), ((0,), (3,))
    text = f"e, r, f, k{column} -> m{column}"
    return parse_rule(text, kind.operands, kind.results, kinds=kinds, linear=linear)


# A backend's random numbers depend on the whole shape, so every device makes all of them; a piece
# made with a state of its own would hold others. A custom call in a region where all axes are
# manual is already written for one device. Calls of cuDNN state their sizes as text.
op(
    LONE_CALL,
    "stablehlo.rng_bit_generator",
    *(f"custom_call:{lib}dnn_rnn{way}_ffi" for lib in ("cu", "hip") for way in ("", "_bwd")),
    is_same_locally=True,
)(whole)

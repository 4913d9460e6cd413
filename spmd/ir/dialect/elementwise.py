"""Rules of elementwise ops: every operand of the result's rank shares all of its factors."""

from __future__ import annotations

from spmd.ir.dialect.registry import rule
from spmd.ir.dialect.rule import Rule, RuleBuilder
from spmd.ir.program import OpKind

NONLINEAR = (
    "abs", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "cosine", "count_leading_zeros",
    "exponential", "exponential_minus_one", "floor", "is_finite", "log", "log_plus_one",
    "logistic", "maximum", "minimum", "not", "or", "popcnt", "power", "reduce_precision",
    "remainder", "round_nearest_afz", "round_nearest_even", "rsqrt", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "sqrt", "tan", "tanh", "xor",
    "convert", "complex",
)  # fmt: skip
CHLO = (
    "_asin_acos_kernel", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "conj",
    "cosh", "digamma", "erf", "erf_inv", "erfc", "is_inf", "is_neg_inf", "is_pos_inf", "lgamma",
    "next_after", "polygamma", "sinh", "square", "tan", "zeta",
)  # fmt: skip
LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "add": ((0, 1),),
    "subtract": ((0, 1),),
    "negate": ((0,),),
    "multiply": ((0,), (1,)),
    "divide": ((0,),),
    "select": ((1, 2),),
    "real": ((0,),),
    "imag": ((0,),),
}
"""Linear elementwise ops and the operand groups in which they are linear."""


def elementwise_rule(kind: OpKind) -> Rule:
    """`i j, i j -> i j`; a rank-0 operand beside others (a select's predicate) has no factor."""
    build = RuleBuilder()
    shape = kind.results[0].shape
    dims = [build.factor(size) for size in shape]
    operands = [dims if t.shape == shape else [] for t in kind.operands]
    linear = LINEAR.get(kind.name.removeprefix("stablehlo."), ())
    if kind.name == "stablehlo.convert" and widens(kind.operands[0].dtype, kind.results[0].dtype):
        linear = ((0,),)
    return build.build(operands, [dims], linear=linear)


_WIDER = (("bf16", "f32", "f64"), ("f16", "f32", "f64"), ("i8", "i16", "i32", "i64"))
"""Each element type holds every number of those before it."""


def widens(narrow: str, wide: str) -> bool:
    """Whether a convert changes no number: then the sum of converted terms is as exact, or more."""
    return any(narrow in chain and wide in chain[chain.index(narrow) + 1 :] for chain in _WIDER)


rule(*(f"stablehlo.{name}" for name in (*NONLINEAR, *LINEAR)))(elementwise_rule)
rule(*(f"chlo.{name}" for name in CHLO))(elementwise_rule)


@rule("stablehlo.optimization_barrier")
def _optimization_barrier(kind: OpKind) -> Rule:
    """Each operand is its own result: no factor is shared between them."""
    build = RuleBuilder()
    values = [[build.factor(size) for size in t.shape] for t in kind.operands]
    return build.build(values, values)


@rule("spmd.mark")
def _mark(kind: OpKind) -> Rule:
    """A mark passes open dims through; the closed ones are fixed where the program is read."""
    build = RuleBuilder()
    dims = [build.factor(size) for size in kind.results[0].shape]
    return build.build([dims], [dims], linear=((0,),), moves=True)

"""Elementwise ops: the i-th dims of operands and results are one factor."""

from spmd.ir.description import CONVERT, DIVIDE, Description, Role
from spmd.ir.dialect.batched import elementwise
from spmd.ir.dialect.registry import describe
from spmd.ir.dialect.rule import Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import is_integer


def elementwise_rule(kind: OpKind) -> Rule:
    """Returns the rule `i j, i j -> i j`; a scalar among tensors (a predicate) has no dims."""
    build = RuleBuilder()
    shape = kind.results[0].shape
    dims = build.dims(shape)
    operands = [dims if t.shape == shape else [] for t in kind.operands]
    linear, dtype = kind.about.linear, kind.results[0].dtype
    if kind.name == CONVERT and widens(kind.operands[0].dtype, dtype):
        linear = ((0,),)
    if kind.name == DIVIDE and is_integer(dtype):  # 1 / 2 + 1 / 2 is 0 of integers
        linear = ()
    terms = kind.about.reducer if kind.about.reducer in ("max", "min") else "add"
    return build.build(operands, [dims] * len(kind.results), linear=linear, terms=terms)


_WIDER = (("bf16", "f32", "f64"), ("f16", "f32", "f64"))
"""Each element type holds every number of those before it. So do wider integers, but a sum in the
narrow ones wraps around where one in wider ones does not."""


def widens(narrow: str, wide: str) -> bool:
    """Whether `wide` is a wider float type than `narrow`, one that has all its numbers."""
    # Narrowing rounds each term: 1 and four times 2**-9 sum to 1 + 2**-7 in f32, which is a bf16
    # number, but term by term in bf16 to 1.
    return any(narrow in chain and wide in chain[chain.index(narrow) + 1 :] for chain in _WIDER)


CHEAP = Description(
    elementwise_rule, elementwise, is_same_locally=True, is_elementwise=True, role=Role.INSIDE
)
"""Description of elementwise ops that XLA computes again in every reader."""

EXPENSIVE = CHEAP._replace(role=Role.ONCE)  # XLA computes it inside its reader only if there is one

IN_LIBRARY = CHEAP._replace(in_library=True)
"""Description of cheap ops that XLA's library for CPUs computes inside a reduction."""

describe(IN_LIBRARY, "abs", "floor", "sign")
describe(
    CHEAP,
    "ceil", "clamp", "compare", "complex", "count_leading_zeros", "is_finite", "not", "popcnt",
    "reduce_precision", "round_nearest_afz", "round_nearest_even", "shift_left",
    "shift_right_arithmetic", "shift_right_logical",
)  # fmt: skip
describe(
    EXPENSIVE._replace(in_library=True),
    "exponential", "log", "log_plus_one", "logistic", "power", "rsqrt", "sqrt", "tanh",
)  # fmt: skip
describe(
    EXPENSIVE,
    "atan2", "cbrt", "cosine", "exponential_minus_one", "remainder", "sine", "tan",
)  # fmt: skip
describe(EXPENSIVE._replace(in_library=True), "erf", dialect="chlo")
describe(
    EXPENSIVE,
    "_asin_acos_kernel", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "conj",
    "cosh", "digamma", "erf_inv", "erfc", "is_inf", "is_neg_inf", "is_pos_inf", "lgamma",
    "next_after", "polygamma", "sinh", "tan", "zeta",
    dialect="chlo",
)  # fmt: skip
describe(IN_LIBRARY, "square", dialect="chlo")
describe(CHEAP._replace(), "convert")

# Linear in some operands: partial sums flow through these.
describe(IN_LIBRARY._replace(linear=((0, 1),), reducer="add"), "add")
describe(IN_LIBRARY._replace(linear=((0, 1),)), "subtract")
describe(IN_LIBRARY._replace(linear=((0,),)), "negate")
describe(CHEAP._replace(linear=((0,),)), "real", "imag")
describe(IN_LIBRARY._replace(linear=((0,), (1,)), reducer="mul"), "multiply")
describe(EXPENSIVE._replace(linear=((0,),), in_library=True), "divide")
describe(CHEAP._replace(linear=((1, 2),)), "select")

# How terms of a reduction combine.
describe(IN_LIBRARY._replace(linear=((0, 1),), reducer="max"), "maximum")
describe(IN_LIBRARY._replace(linear=((0, 1),), reducer="min"), "minimum")
describe(CHEAP._replace(reducer="and"), "and")
describe(CHEAP._replace(reducer="or"), "or")
describe(CHEAP._replace(reducer="xor"), "xor")

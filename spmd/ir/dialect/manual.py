"""Control flow, and manual regions (`shard_map`), written for one device along some axes."""

from spmd.ir.description import FROM_MANUAL, Description, Role
from spmd.ir.dialect.registry import describe, op
from spmd.ir.dialect.rule import FIXED, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind

IF = "stablehlo.if"  # chooses between two regions; what programs of ours are written with

describe(Description(region="loop", role=Role.REGION), "while")
describe(Description(region="branches", selector="i32", role=Role.REGION), "case")
describe(Description(region="branches", selector="i1", role=Role.REGION), "if")

MANUAL = "spmd.manual"
"""The op of a manual region (`shard_map`), written for one device along the atoms `axes`. It has no
operands: inside, `TO_MANUAL` takes values from outside and `FROM_MANUAL` makes its results."""

TO_MANUAL = "spmd.to_manual"
"""The op that takes one device's piece of a value from outside a manual region. `dims` are the
manual atoms that split each dim, `axes` all atoms that are manual in the region."""

describe(Description(region="manual", is_global=True), "manual", dialect="spmd")


@op(TO_MANUAL, FROM_MANUAL, is_global=True, is_manual=True, vanishes=True)
def _boundary(kind: OpKind) -> Rule:
    """Returns the rule `(x i) j -> i j`, or its reverse; a dim's manual atoms always split `x`."""
    enters, ends = kind.name == TO_MANUAL, (kind.operands[0].shape, kind.results[0].shape)
    whole, inner = ends if enters else reversed(ends)
    build = RuleBuilder()
    outer_dims: list[DimFactors] = []
    inner_dims: list[DimFactors] = []
    for axes, size, piece in zip(kind.attrs["dims"], whole, inner, strict=True):
        fixed = build.factor(size // max(piece, 1), FIXED, axes=axes) if axes else ()
        free = build.factor(piece)
        outer_dims.append(fixed + free)
        inner_dims.append(free)
    before, after = (outer_dims, inner_dims) if enters else (inner_dims, outer_dims)
    return build.build([before], [after], linear=((0,),), moves=True, held=kind.attrs["axes"])

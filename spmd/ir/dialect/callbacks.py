"""Ops that call Python functions on the host, while the program runs."""

from spmd.ir.description import Description
from spmd.ir.dialect.registry import describe, op
from spmd.ir.dialect.rule import PASS, REPLICATE, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import TensorType

CALLBACK = "spmd.callback"
"""The op that calls function `number` of `Program.callbacks`. Its results are a `FLAG`, then those
of the function. Along the manual atoms `held` every device calls it, along other atoms one device
does; if `partitioned`, every device calls it with its pieces of the operands."""

CHECK_CALLBACK = "spmd.check_callback"
"""The op that returns its operands but the first, which is a callback's flag: if that is set, the
program ends on every device with the exception that the function raised."""

FLAG = TensorType((), "ui32")
"""Type of a callback's flag, 1 if the function raised: ui32, like the bits by which floats go."""

_CHECKS = Description(is_local=True, is_repeatable=False, has_effect=True)
describe(_CHECKS, "check_callback", dialect="spmd")


@op(CALLBACK, is_repeatable=False, has_effect=True)
def _callback(kind: OpKind) -> Rule:
    """Returns the rule: no dim may be split, except operands' dims if it is `partitioned`."""
    build = RuleBuilder()
    given = PASS if kind.attrs["partitioned"] else REPLICATE
    operands = [build.dims(t.shape, given) for t in kind.operands]
    return build.build(operands, [build.dims(t.shape, REPLICATE) for t in kind.results])

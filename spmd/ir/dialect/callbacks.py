"""Calls of Python functions on the host, while the program runs."""

from spmd.ir.description import Description
from spmd.ir.dialect.registry import describe, op
from spmd.ir.dialect.rule import PASS, REPLICATE, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import TensorType

CALLBACK = "spmd.callback"
"""Calls number `number` of the program's callbacks. Its first result is a `FLAG`, then come those
of the function. `held` are the manual atoms around it: along these every device calls, along the
others one does. `partitioned` ones are called by every device with its pieces."""

CHECK_CALLBACK = "spmd.check_callback"
"""Hands on all of its operands but the first, the flag of a callback: if that is set, the function
raised, and the program ends here with what it raised, on every device."""

INSPECT = "spmd.inspect"
"""Hands on its operand. Callback number `number` is told, once, how the plan splits that."""

FLAG = TensorType((), "ui32")
"""0, or 1 where the function raised; of the type of a float's bits, to travel with them."""

_CHECKS = Description(is_local=True, is_repeatable=False, has_effect=True)
describe(_CHECKS, "check_callback", dialect="spmd")


@op(CALLBACK, is_repeatable=False, has_effect=True)
def _callback(kind: OpKind) -> Rule:
    """No dim may be split but those of the operands of a callback that is `partitioned`."""
    build = RuleBuilder()
    given = PASS if kind.attrs["partitioned"] else REPLICATE
    operands = [build.dims(t.shape, given) for t in kind.operands]
    return build.build(operands, [build.dims(t.shape, REPLICATE) for t in kind.results])

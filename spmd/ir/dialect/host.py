"""Arguments and results in the host's memory: ops move them to a device's and back.

    before: %2 = add %0, %1; return %2          %0 and the result lie in the host's memory
    after:  %2 = to device %0; %3 = add %2, %1; %4 = to host %3; return %4

XLA moves them beside other kernels (its host offloading). They are jax's ops, as of
`jax.device_put(x, jax.memory.Space.Host)` in a program.
"""

from collections.abc import Iterable
from typing import NamedTuple

from spmd.errors import UnsupportedOpError
from spmd.ir.description import BARRIER, CUSTOM_CALL, TRANSPOSE
from spmd.ir.dialect.elementwise import elementwise_rule
from spmd.ir.dialect.registry import op
from spmd.ir.program import Loc, Op, OpKind, Program, Region, Value, reads
from spmd.ir.types import Opaque

TARGET = "annotate_device_placement"
DEVICE, HOST = "device", "pinned_host"

_PLACE = "mhlo.frontend_attributes"

op(f"custom_call:{TARGET}", is_same_locally=True, between_memories=True, passes=None)(
    elementwise_rule
)


def moves_to(op: Op) -> str:
    """Where an op moves its operand: `DEVICE`, `HOST`, or nowhere, an empty text."""
    if not op.kind.about.between_memories:
        return ""
    text = getattr(op.kind.attrs.get(_PLACE), "text", "")
    return next((place for place in (DEVICE, HOST) if f'"{place}"' in text), "")


def with_moves(program: Program, arguments: Iterable[int], results: Iterable[int]) -> Program:
    """Returns a program whose arguments and results at these positions lie in the host's memory.

    All arguments are moved before the first op that reads one of them, and results at the end, so
    that nothing stands between the ops that become one kernel. XLA moves each when it is time.

    Raises:
      UnsupportedOpError: there is an ordered callback, too.
    """
    body, types, results = program.body, list(program.types), tuple(results)
    waiting = [value for i, value in enumerate(body.args) if i in set(arguments)]
    for each in program.callbacks:
        if each.is_ordered and (waiting or results):
            raise UnsupportedOpError(
                f"{each.label} with ordered=True, beside arrays in the host's memory",
                fix="call it with ordered=False, or keep the arrays on devices: jax has not both",
            )
    locs = [each.loc for each in body.ops] or [Loc()]

    def new(value: Value) -> Value:
        types.append(types[value])
        return len(types) - 1

    def move(value: Value, made: Value, place: str, loc: Loc) -> Op:
        attrs = {
            "api_version": Opaque("1 : i32"), "backend_config": "", "call_target_name": TARGET,
            "called_computations": Opaque("[]"), "has_side_effect": True,
            _PLACE: Opaque(f'{{_xla_buffer_placement = "{place}"}}'),
        }  # fmt: skip
        ends = (types[value],)
        return Op(OpKind(CUSTOM_CALL, ends, ends, attrs), (value,), (made,), (), loc)

    # The numbers of such arguments go to what comes of moving them, so that readers stay the same.
    instead = {value: new(value) for value in waiting}
    args = tuple(instead.get(value, value) for value in body.args)
    readers = (i for i, each in enumerate(body.ops) if not instead.keys().isdisjoint(reads(each)))
    first = next(readers, len(body.ops))
    come = [move(instead[v], v, DEVICE, locs[min(first, len(locs) - 1)]) for v in waiting]
    leaving = {i: move(body.results[i], new(body.results[i]), HOST, locs[-1]) for i in results}
    ends = [leaving[i].results[0] if i in leaving else v for i, v in enumerate(body.results)]
    ops = (*body.ops[:first], *come, *body.ops[first:], *leaving.values())
    return program._replace(body=Region(args, ops, tuple(ends)), types=tuple(types))


class Hosted(NamedTuple):
    """Values of a program that lie in the host's memory, or are on their way."""

    arguments: frozenset[Value]
    results: frozenset[Value]  # what ops put there
    passing: frozenset[Value]  # on the devices: arguments that have come, and what is to leave


def hosted(program: Program) -> Hosted:
    """Returns what a program's ops move between the memories."""
    moved = [(moves_to(each), each) for each in program.body.ops]
    barriers = [each for each in program.body.ops if each.name == BARRIER]
    before = {v: each.operands[i] for each in barriers for i, v in enumerate(each.results)}
    read = ((move.operands[0], move.results[0]) for place, move in moved if place == DEVICE)
    come = {before.get(value, value): result for value, result in read}
    leave = {move.results[0]: move.operands[0] for place, move in moved if place == HOST}
    named = [each for each in program.body.ops if each.name == TRANSPOSE]  # their dims, once there
    leave |= {e.results[0]: leave[e.operands[0]] for e in named if e.operands[0] in leave}
    arguments = frozenset(come).intersection(program.body.args)
    passing = (*(come[v] for v in arguments), *(leave[v] for v in leave))
    return Hosted(arguments, frozenset(leave), frozenset(passing))

"""Arguments and results in the host's memory: ops move them to a device's and back.

    before: %2 = add %0, %1; return %2          %0 and the result lie in the host's memory
    after:  %2 = to device %0; %3 = add %2, %1; %4 = to host %3; return %4

XLA moves them beside other kernels (its host offloading). They are jax's ops, as of
`jax.device_put(x, jax.memory.Space.Host)` in a program.
"""

from collections.abc import Iterable
from typing import NamedTuple

from spmd.ir.description import CUSTOM_CALL
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.elementwise import elementwise_rule
from spmd.ir.dialect.registry import op
from spmd.ir.program import Op, Program, Value, free_values
from spmd.ir.rewrite import repeat_op
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
    """
    body = program.body
    waiting = {body.args[position] for position in arguments}
    leaving = set(results)
    if not waiting and not leaving:
        return program
    b = Builder()
    env = {v: b.value(program.types[v]) for v in body.args}

    def move(value: Value, place: str) -> Value:
        attrs = {
            "api_version": Opaque("1 : i32"), "backend_config": "", "call_target_name": TARGET,
            "called_computations": Opaque("[]"), "has_side_effect": True,
            _PLACE: Opaque(f'{{_xla_buffer_placement = "{place}"}}'),
        }  # fmt: skip
        return b.op(CUSTOM_CALL, [env[value]], [program.types[value]], attrs)[0]

    def arrive(reads: Iterable[Value]) -> None:
        if not waiting.isdisjoint(reads):
            env.update((value, move(value, DEVICE)) for value in sorted(waiting))
            waiting.clear()

    b.begin(isolated=True)
    args = [env[v] for v in body.args]
    for each in body.ops:
        b.loc = each.loc
        arrive((*each.operands, *(v for region in each.regions for v in free_values(region))))
        repeat_op(b, each, env)
    arrive(body.results)
    ends = [move(v, HOST) if i in leaving else env[v] for i, v in enumerate(body.results)]
    return program._replace(body=b.end(args, ends), types=tuple(b.types))


class Hosted(NamedTuple):
    """Values of a program that lie in the host's memory, or are on their way."""

    arguments: frozenset[Value]
    results: frozenset[Value]  # what ops put there
    passing: frozenset[Value]  # on the devices: arguments that have come, and what is to leave


def hosted(program: Program) -> Hosted:
    """Returns what a program's ops move between the memories."""
    moved = [(moves_to(each), each) for each in program.body.ops]
    come = {move.operands[0]: move.results[0] for place, move in moved if place == DEVICE}
    leave = {move.results[0]: move.operands[0] for place, move in moved if place == HOST}
    arguments = frozenset(come).intersection(program.body.args)
    passing = (*(come[v] for v in arguments), *(leave[v] for v in leave))
    return Hosted(arguments, frozenset(leave), frozenset(passing))

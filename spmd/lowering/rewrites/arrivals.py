"""Arguments in the host's memory come to GPUs in turn, not all at once.

before: `%8 = to device %1; %9 = to device %2; %5 = add %8, %3; %6 = add %9, %4`
after:  `%10, %11 = optimization_barrier %1, %3; %8 = to device %10; %5 = add %8, %3;
        %12, %13 = optimization_barrier %2, %3; %9 = to device %12; %6 = add %9, %4`

Without it XLA's scheduler for GPUs moves all of them before anything else runs, and they lie on a
device together. Those that meet one computed value, as both moments of a gradient do, come in one
turn. The first turn waits for what it meets. Each one behind it waits for what the turn before it
meets, and so comes while that one is computed, and for what the turn before that has become: two
are there at most. XLA schedules by barriers, and takes them out afterwards.
"""

from collections.abc import Iterable
from typing import NamedTuple

from spmd.ir.description import BARRIER
from spmd.ir.dialect.host import DEVICE, HOST, moves_to
from spmd.ir.program import Op, OpKind, Program, Value, reads
from spmd.ir.rewrite import in_order


class _Turn(NamedTuple):
    """Moves that come together."""

    moves: list[Op]
    meets: Value  # what is computed without them, and meets them first
    makes: list[Value]  # what comes of them without more than elementwise ops, and leaves


def in_turn(program: Program) -> Program:
    """Returns a local program whose arguments in the host's memory are moved in turn."""
    if not (turns := _turns(program)):
        return program
    body, types = program.body, list(program.types)
    last = _last_turns(program, turns)
    barriers, behind = dict[Value, Op](), dict[Value, Value]()
    for n, (moves, *_) in enumerate(turns):
        # What comes of this turn or a later one cannot be waited for.
        awaited = (turns[max(n - 1, 0)].meets, *(turns[n - 2].makes if n > 1 else ()))
        held = [move.operands[0] for move in moves]
        held += dict.fromkeys(v for v in awaited if last.get(v, -1) < n)
        ends = tuple(types[v] for v in held)
        made = tuple(range(len(types), len(types) + len(held)))
        types += ends
        behind |= {move.results[0]: v for move, v in zip(moves, made, strict=False)}
        barrier = OpKind(BARRIER, ends, ends, {}), tuple(held), made, (), moves[0].loc
        barriers[moves[0].results[0]] = Op(*barrier)
    ops = []
    for op in body.ops:
        ops += [barriers[v] for v in op.results if v in barriers]
        now = [behind[v] for v in op.results if v in behind]
        ops.append(op._replace(operands=tuple(now)) if now else op)
    maker = {v: i for i, op in enumerate(ops) for v in op.results}
    before = {i: {maker[v] for v in reads(op) if v in maker} for i, op in enumerate(ops)}
    body = body._replace(ops=tuple([ops[i] for i in in_order(before, int)]))
    return program._replace(types=tuple(types), body=body)


def _turns(program: Program) -> list[_Turn]:
    """Returns turns, ordered by when what they meet is made; who meets arguments alone has none."""
    ops, types, given = program.body.ops, program.types, set(program.body.args)
    leaving = {*program.body.results, *(op.operands[0] for op in ops if moves_to(op) == HOST)}
    moves: dict[Value, Op] = {}
    found: dict[Value, _Turn] = {}
    made: dict[Value, int] = {}
    # Of a value: the last product, loop or collective on the way to it; the moved arguments that
    # went into it without having met one; and, of those that have, what they met.
    computed: dict[Value, Value] = {}
    pending: dict[Value, set[Value]] = {}
    met_by: dict[Value, set[Value]] = {}
    for i, op in enumerate(ops):
        made |= dict.fromkeys(op.results, i)
        if moves_to(op) == DEVICE and op.operands[0] in given:
            moves[op.results[0]] = op
            pending[op.results[0]] = set(op.results)
            continue
        read = reads(op)
        is_heavy = op.regions or op.kind.about.flops is not None or op.collective
        waiting = {moved for v in read for moved in pending.get(v, ()) if moved in moves}
        met = {value for v in read for value in met_by.get(v, ())}
        sizes = [(types[v].bytes, made[v], v) for v in read if v in computed]
        largest = max(sizes)[-1] if sizes else None
        if waiting and largest is not None:
            # What is awaited lies in memory: elementwise ops may be parts of a kernel.
            value = largest if is_heavy else computed[largest]
            turn = found.setdefault(value, _Turn([], value, []))
            turn.moves.extend(moves.pop(v) for v in sorted(waiting))
            waiting, met = set(), {*met, value}
        for v in waiting if is_heavy else ():  # they are needed now
            del moves[v]
        for v in op.results:
            if is_heavy:
                computed[v] = v
                continue
            if largest is not None:
                computed[v] = computed[largest]
            elif waiting:
                pending[v] = waiting
            if met and v in leaving:
                for value in met:
                    found[value].makes.append(v)
            elif met:
                met_by[v] = met
    return sorted(found.values(), key=lambda turn: made[turn.meets])


def _last_turns(program: Program, turns: Iterable[_Turn]) -> dict[Value, int]:
    """Maps values to the last turn that they depend on, if they depend on any."""
    last = {move.results[0]: n for n, turn in enumerate(turns) for move in turn.moves}
    for op in program.body.ops:
        if found := [last[v] for v in reads(op) if v in last]:
            last |= dict.fromkeys(op.results, max(found))
    return last

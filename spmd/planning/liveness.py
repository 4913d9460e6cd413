"""How much memory a plan needs: which values, in which states, are alive at the same time.

An estimate on the global program, made in one pass, that the planner can price: it sees what the
plan decides (states of values, copies for their uses, carries of loops) and leaves out what a
backend does with it later. Elementwise results with one use are taken to be fused into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.ir.description import Role
from spmd.ir.program import Region, Value
from spmd.mesh.sharding import Sharding, local_shape
from spmd.planning.plan import Plan
from spmd.planning.problem import Problem, every_state
from spmd.predict.memory import constant_bytes
from spmd.reshard.resharder import States

Held = tuple[Value, Sharding]
"""A value in one of the states in which it exists."""


class Peak(NamedTuple):
    """The moment at which most memory is in use.

    Attributes:
      bytes: on one device: arguments, results in memory of their own, and what is alive between.
      arguments: of these, the program's arguments.
      alive: what is alive then, with its bytes, arguments included.
    """

    bytes: int
    arguments: int
    alive: dict[Held, int]


def peak_of(plan: Plan) -> Peak:
    """The fullest moment of a plan. Updates of donated arguments are written over these."""
    return _Liveness(plan).run()


def bound_of(plan: Plan) -> int:
    """Bytes that `peak_of` cannot exceed: those of all values together, as if none were ever freed.

    It takes one pass over the program. A plan for which this fits needs no closer look.
    """
    live = _Liveness(plan)
    states = enumerate(plan.states)
    total = sum(live.bytes((v, s)) for v, s in states if s is not None)
    total += constant_bytes(plan.program)  # whole, however they are split
    for value, state in plan.copies.items():
        total += live.bytes((value, state))
    for op in plan.program.walk():
        choice = plan.choices.get(op.results[0]) if op.results else None
        if choice is not None:
            for v, s in zip(op.operands, choice.operands, strict=True):
                if plan.states[v] != s:
                    total += live.bytes((v, s))
    return total


def least_bytes(problem: Problem) -> int:
    """Bytes of one device that no plan of a problem goes below: a smaller limit is out of reach.

    They are constants, which are whole, and either all arguments or all results in the smallest
    pieces in which they may lie: results may be written over arguments. What is alive in between is
    left out, as it may be made again. So it takes no plan, and no time.
    """
    types, body = problem.program.types, problem.program.body

    def least(values: Sequence[Value], states: Sequence[States]) -> int:
        pieces = (problem.bytes(v, ways) for v, ways in zip(values, states, strict=True))
        return sum(map(min, pieces))

    results: list[States] = []
    for i, (value, wanted) in enumerate(zip(body.results, problem.results, strict=True)):
        if wanted is not None:
            results.append((wanted,))
        elif i in problem.links:
            results.append(problem.arguments[problem.links[i]])
        elif value in problem.propagated.marks:
            results.append((problem.suggested(value),))
        else:
            results.append(every_state(types[value], problem.mesh))
    held = max(least(body.args, problem.arguments), least(body.results, results))
    return constant_bytes(problem.program) + held


class _Liveness:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.types, self.in_memory = plan.program.types, plan.problem.in_memory
        self.cheap = plan.propagated.cheap
        self.sizes: dict[tuple[int, Sharding], int] = {}

    def bytes(self, held: Held) -> int:
        """Bytes of one device's piece."""
        value, state = held
        type_ = self.types[value]
        key = (id(type_), state)
        found = self.sizes.get(key)
        if found is None:
            shape = local_shape(type_.shape, state, self.plan.mesh)
            found = self.sizes[key] = type_.with_shape(shape).bytes
        return found

    def run(self) -> Peak:
        body = self.plan.program.body
        arguments = {
            held: self.bytes(held) for held in zip(body.args, self.plan.arguments, strict=True)
        }
        fixed = sum(arguments.values())
        own = [
            (v, s)
            for i, (v, s) in enumerate(zip(body.results, self.plan.results, strict=True))
            if i not in self.plan.problem.links
        ]
        inside = self.region(body, dict(zip(body.results, self.plan.results, strict=True)))
        late = sum(map(self.bytes, own)) - sum(inside.alive.get(held, 0) for held in own)
        return Peak(fixed + max(0, late) + inside.bytes, fixed, arguments | inside.alive)

    def region(self, region: Region, returned: dict[Value, Sharding]) -> Peak:
        """What is alive at the worst moment, besides the region's own arguments."""
        arguments = set(region.args)
        first: dict[Held, int] = {}
        last: dict[Held, int] = {}
        uses: dict[Value, int] = {}
        fused: dict[Value, bool] = {}
        inner: dict[int, Peak] = {}
        same: set[Held] = set()  # carries that their loop does not change
        after: dict[Held, Held] = {}  # other carries, and what they begin as
        for i, op in enumerate(region.ops):
            choice = self.plan.choices.get(op.results[0]) if op.results else None
            if choice is None:
                continue
            for value, wanted in zip(op.operands, choice.operands, strict=True):
                uses[value] = uses.get(value, 0) + 1
                if value not in self.cheap:
                    first.setdefault((value, wanted), i)
                    last[value, wanted] = i
            for number, inside in enumerate(op.regions):
                is_condition = number == 0 and op.is_loop
                results = () if is_condition else zip(inside.results, choice.results, strict=True)
                peak = self.region(inside, dict(results))
                if i not in inner or peak.bytes > inner[i].bytes:
                    inner[i] = peak
            for k, (value, state) in enumerate(zip(op.results, choice.results, strict=True)):
                fused[value] = op.kind.about.role == Role.ALIAS or not self.in_memory[value]
                first.setdefault((value, state), i)
                last.setdefault((value, state), i)
                if op.is_loop:
                    source = (op.operands[k], choice.operands[k])
                    body = op.regions[1]
                    if body.results[k] == body.args[k]:
                        same.add((value, state))
                    else:
                        after[value, state] = source
        for value, wanted in returned.items():
            if value not in self.cheap:
                first.setdefault((value, wanted), len(region.ops))
                last[value, wanted] = len(region.ops)
        changes: list[list[tuple[Held, int]]] = [[] for _ in range(len(region.ops) + 2)]
        for held, start in first.items():
            value, state = held
            made_here = self.plan.states[value] == state
            if (value in arguments and made_here) or (
                made_here and fused.get(value) and uses.get(value, 0) <= 1
            ):
                continue
            if held in same:
                continue
            begins = after.get(held)
            if begins is not None and begins[0] not in arguments and last.get(begins) == start:
                start += 1  # the loop goes on in the memory of what it begins with
            size = self.bytes(held)
            changes[start].append((held, size))
            changes[max(start, last[held]) + 1].append((held, -size))
        return _worst(changes, inner)


def _worst(changes: list[list[tuple[Held, int]]], inner: dict[int, Peak]) -> Peak:
    """The moment of most bytes, and what is alive then."""
    now = most = at = 0
    for i, here in enumerate(changes):
        now += sum(size for _, size in here)
        total = now + (inner[i].bytes if i in inner else 0)
        if total > most:
            most, at = total, i
    alive: dict[Held, int] = {}
    for here in changes[: at + 1]:
        for held, size in here:
            if size > 0:
                alive[held] = size
            else:
                alive.pop(held, None)
    if at in inner:
        alive |= inner[at].alive
    return Peak(most, 0, alive)

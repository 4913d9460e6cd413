"""A plan as plain data, and back: what was decided, without the problem that it was decided for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd.mesh.sharding import Sharding
from spmd.planning.plan import Choice, Move, Plan, Weighed
from spmd.planning.problem import Problem

_AS_THEY_ARE = (
    "seconds", "solver", "run_seconds", "byte_price", "exposed", "by_slack",
    "like_loops", "gap"
)  # fmt: skip
"""Fields that are numbers or text."""


def recorded(plan: Plan) -> dict[str, Any]:
    """All of a plan that JSON can keep; what is made again is left to those who make it again."""
    shardings: dict[Sharding, int] = {}
    choices: dict[Choice, int] = {}

    def of(*found: Sharding) -> list[int]:
        return [shardings.setdefault(sharding, len(shardings)) for sharding in found]

    record: dict[str, Any] = {name: getattr(plan, name) for name in _AS_THEY_ARE}
    record |= {
        "notes": plan.notes,
        "forms": plan.forms,
        "arguments": of(*plan.arguments),
        "results": of(*plan.results),
        "states": [None if state is None else of(state)[0] for state in plan.states],
        "copies": [(value, *of(state)) for value, state in plan.copies.items()],
        "moves": [
            (m.value, *of(m.have, m.wanted), m.user and m.user.results[0], m.seconds, m.bytes)
            for m in plan.moves
        ],
        "chosen": [(v, choices.setdefault(c, len(choices))) for v, c in plan.choices.items()],
        "choices": [(c.assignment, of(*c.operands), of(*c.results)) for c in choices],
    }
    return {**record, "shardings": [(s.dims, s.partial, s.kind) for s in shardings]}


def replayed(record: Mapping[str, Any], problem: Problem) -> Plan:
    """The plan that a record is of.

    Args:
      record: what `recorded` gave, from JSON.
      problem: the problem that the plan was made for.
    """
    shardings = [Sharding(*_frozen(fields)) for fields in record["shardings"]]
    producers = problem.index.producers

    def at(numbers: list[int]) -> tuple[Sharding, ...]:
        return tuple([shardings[number] for number in numbers])

    def move(value: int, have: int, wanted: int, user: int | None, *cost: Any) -> Move:
        reader = None if user is None else producers[user]
        return Move(value, shardings[have], shardings[wanted], reader, *cost)

    choices = [Choice(_frozen(a), at(given), at(made)) for a, given, made in record["choices"]]
    return Plan(
        problem,
        {value: choices[number] for value, number in record["chosen"]},
        tuple([None if number is None else shardings[number] for number in record["states"]]),
        {value: shardings[number] for value, number in record["copies"]},
        at(record["arguments"]),
        at(record["results"]),
        problem.index.trips,
        tuple([move(*fields) for fields in record["moves"]]),
        notes=tuple(record["notes"]),
        forms=tuple([Weighed(*form) for form in record["forms"]]),
        **{name: record[name] for name in _AS_THEY_ARE},
    )


def _frozen(plain: Any) -> Any:
    """Lists in lists as tuples in tuples."""
    return tuple(map(_frozen, plain)) if isinstance(plain, list) else plain

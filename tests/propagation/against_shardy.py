"""Lays our propagation of a marked module beside Shardy's, value by value.

Both read the same text, in which every op has a line of its own. Values match by these lines (their
own op's and those of the calls around it), by op name and result number; arguments and results of
the module by position. A value that one side lacks is left out: Shardy folds and copies constants,
we rewrite some ops on the way in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import spmd
from scripts import shardy
from spmd.frontend.import_stablehlo import parse_module
from spmd.frontend.marks import atoms_of_attr
from spmd.ir.program import Loc, Op
from spmd.ir.types import ShardingAttr
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, format_sharding
from spmd.pipeline import Request, Stages, compile_module
from tests.propagation.necessity import Necessity, necessity

Dims = tuple[Axes, ...]

EQUAL, FINER, COARSER, CONTRADICTORY = "equal", "ours finer", "Shardy finer", "contradictory"

Key = tuple[tuple[int, ...], str, int]
"""Lines, op name, result number."""

_NAMES = {"spmd.mark": "sdy.sharding_constraint"}


class Pair(NamedTuple):
    """One value as both see it.

    Attributes:
      value: its number in our program.
      key: where it is.
      ours, planned, theirs: axes of each dim as we propose them, as we plan them, as Shardy has
        them; `planned` is None for a value that is made anew for each use.
    """

    value: int
    key: Key
    ours: Dims
    planned: Dims | None
    theirs: Dims

    @property
    def relation(self) -> str:
        """Whose proposal splits more."""
        return relation(self.ours, self.theirs)


class Comparison(NamedTuple):
    """A module as both propagate it."""

    stages: Stages
    pairs: tuple[Pair, ...]
    needs: Necessity


def relation(ours: Dims, theirs: Dims) -> str:
    """How one sharding relates to another."""
    if ours == theirs:
        return EQUAL
    if all(a[: len(b)] == b for a, b in zip(ours, theirs, strict=True)):
        return FINER
    if all(b[: len(a)] == a for a, b in zip(ours, theirs, strict=True)):
        return COARSER
    return CONTRADICTORY


def compile_text(text: str, mesh: Mesh) -> Stages:
    """Our stages on a marked module."""
    request = Request(parse_module(text), mesh, spmd.Topology(f"cpu:{mesh.size}"))
    return compile_module(request, spmd.Options(check=True))


def compare(text: str, mesh: Mesh, theirs: list[shardy.Value]) -> Comparison:
    """Pairs up the values of our result and of Shardy's."""
    stages = compile_text(text, mesh)
    found = _unique(theirs, mesh)
    pairs = []
    for key, value in our_values(stages).items():
        dims = found.get(key)
        if value in stages.propagated.cheap or dims is None:
            continue
        ours = stages.propagated.proposals[value]
        if len(dims) == len(ours):
            state = stages.plan.states[value]
            planned = state.dims if state is not None else None
            pairs.append(Pair(value, key, ours, planned, dims))
    return Comparison(stages, tuple(pairs), necessity(stages.propagated))


def our_values(stages: Stages) -> dict[Key, int]:
    """Arguments, op results and results of our program, those with a place of their own."""
    program = stages.imported.program
    keys: list[tuple[Key, int]] = []
    for what, values in (("argument", program.body.args), ("result", program.body.results)):
        keys += [(((), what, i), value) for i, value in enumerate(values)]
    for op in program.walk():
        keys += [(key_of(op, number), value) for number, value in enumerate(op.results)]
    counts = Counter(key for key, _ in keys)
    return {key: value for key, value in keys if counts[key] == 1}


def key_of(op: Op, number: int) -> Key:
    return lines(op.loc), _NAMES.get(op.name, op.name), number


def lines(loc: Loc) -> tuple[int, ...]:
    return tuple(frame.line for frame in loc.frames)


def _unique(values: list[shardy.Value], mesh: Mesh) -> dict[Key, Dims]:
    keys = [(value.lines, value.op, value.number) for value in values]
    counts = Counter(keys)
    return {
        key: atoms(value, mesh)
        for key, value in zip(keys, values, strict=True)
        if counts[key] == 1
    }


def atoms(value: shardy.Value, mesh: Mesh) -> Dims:
    attr = ShardingAttr(value.dims, (False,) * len(value.dims))
    shape = (1,) * len(value.dims)
    return atoms_of_attr(attr, shape, mesh, value.op, None, even=False)


# ---------------------------------------------------------------------------------------------
# Reasons.

TIE = "an axis that two dims of the value want"
CONFLICT = "a dim that two different claims reach"
DOWNSTREAM = "behind one of these"
BOUNDARY = "an argument or result that the axes do not divide"
NO_PATH = "our rules lead no axis there"
NECESSARY = "necessary by our rules"


def reasons(comparison: Comparison, pair: Pair) -> tuple[str, ...]:
    """Why a pair differs, for each of its dims that does."""
    return tuple(
        dict.fromkeys(
            _reason(comparison, pair, dim)
            for dim in range(len(pair.ours))
            if pair.ours[dim] != pair.theirs[dim]
        )
    )


def _reason(comparison: Comparison, pair: Pair, dim: int) -> str:
    needs, place = comparison.needs, (pair.value, dim)
    if place in needs.contested:
        chains = needs.may[place]
        longest = max(chains, key=len)
        alike = all(longest[: len(c)] == c for c in chains)
        return TIE if alike else CONFLICT
    if place in comparison.stages.propagated.undivided:
        return BOUNDARY
    wanted = max(pair.ours[dim], pair.theirs[dim], key=len)
    if needs.must.get(place, ()) == wanted:
        return NECESSARY
    claims: Mapping = needs.may
    if any(c[: len(wanted)] == wanted for c in claims.get(place, ())):
        return DOWNSTREAM
    return NO_PATH


def describe(comparison: Comparison, pair: Pair) -> str:
    """One line on one pair."""
    mesh = comparison.stages.plan.mesh
    where, op, number = pair.key
    ours, theirs = (format_sharding(Sharding(d), mesh) for d in (pair.ours, pair.theirs))
    place = f"line {'<'.join(map(str, where))}" if where else "main"
    return f"{place} {op}#{number}: ours {ours}, Shardy {theirs} ({', '.join(reasons(comparison, pair))})"

"""Lays our propagation of a marked module beside Shardy's, value by value.

Both read the same text, in which every op has a line of its own. Values match by these lines (their
own op's and those of the calls around it), by op name and result number; arguments and results of
the module by position. A value that one side lacks is left out: Shardy folds and copies constants,
we rewrite some ops on the way in.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import spmd
from scripts import shardy
from spmd.frontend.import_stablehlo import parse_module
from spmd.frontend.marks import atoms_of_attr
from spmd.ir.program import Loc, Op, Program
from spmd.ir.types import ShardingAttr
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, axis_refs, format_sharding
from spmd.pipeline import Request, Stages, compile_module
from spmd.propagation.rule import REPLICATE, WINDOW
from tests.propagation.necessity import Necessity, necessity, nodes

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
# Reasons. A difference has one of its own, or it comes with another that a chain of ops leads to.

TIE = "two dims of the value want the axis"
CONFLICT = "two different claims reach the dim"
NEIGHBOUR = "two factors of an op around it want the axis"
BOUNDARY = "the axes do not divide an argument or result"
SUB_AXIS = "a sub-axis of an argument or result"
SHORT = "the axes are longer than the dim"
WHOLE = "an op needs the dim whole"
WINDOW_DIM = "the op reads beyond its piece of the dim"
RESULT = "a mark on a result"
OPERAND = "a mark's operand"
CONSTANT = "computed from constants alone"
NO_RULE = "an op that Shardy has no rule for"
FOLLOWS = "behind another difference"
UNEXPLAINED = "unexplained"


def explain(comparison: Comparison) -> dict[Pair, tuple[str, ...]]:
    """The reasons for every pair that differs."""
    different = [pair for pair in comparison.pairs if pair.relation != EQUAL]
    found = {pair: own_reasons(comparison, pair) for pair in different}
    groups = _groups(comparison, [pair.value for pair in different])
    explained = {groups[pair.value] for pair, why in found.items() if why}
    for pair, why in found.items():
        if not why:
            found[pair] = (FOLLOWS if groups[pair.value] in explained else UNEXPLAINED,)
    return found


def own_reasons(comparison: Comparison, pair: Pair) -> tuple[str, ...]:
    """Why a pair differs, dim by dim, as far as the value itself tells."""
    dims = [d for d, (a, b) in enumerate(zip(pair.ours, pair.theirs, strict=True)) if a != b]
    why = [_own_reason(comparison, pair, dim) for dim in dims]
    return tuple(dict.fromkeys(filter(None, why)))


def _own_reason(comparison: Comparison, pair: Pair, dim: int) -> str:
    needs, place = comparison.needs, (pair.value, dim)
    propagated = comparison.stages.propagated
    program, mesh = propagated.program, propagated.mesh
    kinds = {
        node.rule.factors[f].kind
        for node in nodes(program)
        for value, dims in zip(node.values, node.rule.values, strict=True)
        if value == pair.value
        for f in dims[dim]
    }
    at_boundary = pair.value in (*program.body.args, *program.body.results)
    if place in needs.contested:
        longest = max(needs.may[place], key=len)
        alike = all(longest[: len(claim)] == claim for claim in needs.may[place])
        return TIE if alike else CONFLICT
    if place in propagated.undivided:
        return BOUNDARY
    if at_boundary and any(not ref.whole for ref in axis_refs(pair.ours[dim], mesh)):
        return SUB_AXIS
    if mesh.extent(pair.theirs[dim]) > program.types[pair.value].shape[dim]:
        return SHORT
    if REPLICATE in kinds:
        return WHOLE
    if pair.value in propagated.marks and at_boundary:
        return RESULT
    if pair.value in _marked_operands(comparison.stages):
        return OPERAND
    if pair.value not in _from_arguments(program):
        return CONSTANT
    if pair.key[1].startswith("chlo."):
        return NO_RULE
    if WINDOW in kinds:
        return WINDOW_DIM
    return NEIGHBOUR if place in needs.disputed else ""


def _marked_operands(stages: Stages) -> set[int]:
    walk = stages.imported.program.walk()
    return {op.operands[0] for op in walk if op.name == "spmd.mark"}


def _from_arguments(program: Program) -> set[int]:
    """Values that some argument has a part in."""
    found = set(program.body.args)
    for _ in range(2):  # what a loop carries comes back to its start
        for node in nodes(program):
            if not found.isdisjoint(node.values[:-1]):
                found.update(node.values)
    return found


def _groups(comparison: Comparison, values: list[int]) -> dict[int, int]:
    """Joins values that an op or a tie has in common: value -> a number for its group."""
    group = {value: value for value in values}

    def root(value: int) -> int:
        while group[value] != value:
            value = group[value]
        return value

    for node in nodes(comparison.stages.imported.program):
        together = [root(v) for v in node.values if v in group]
        for value in together:
            group[value] = together[0]
    return {value: root(value) for value in values}


def describe(comparison: Comparison, pair: Pair, why: tuple[str, ...]) -> str:
    """One line on one pair that differs."""
    mesh = comparison.stages.plan.mesh
    where, op, number = pair.key
    ours, theirs = (format_sharding(Sharding(d), mesh) for d in (pair.ours, pair.theirs))
    place = f"line {'<'.join(map(str, where))}" if where else "main"
    return f"{place} {op}#{number}: ours {ours}, Shardy {theirs} ({', '.join(why)})"

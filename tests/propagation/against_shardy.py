"""Lays our propagation of a marked module beside Shardy's, value by value.

Both read the same text, in which every op has a line of its own. Values match by these lines (their
own op's and those of the calls around it), by op name and result number; arguments and results of
the module by position. A value that one side lacks is left out: Shardy folds and copies constants,
we rewrite some ops on the way in.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import spmd
from benchmarks import shardy
from spmd.compiler import Request, Stages, compile_module
from spmd.frontend.importer.module import parse_module
from spmd.frontend.marks import atoms_of_attr
from spmd.ir.dialect.rule import REPLICATE, WINDOW
from spmd.ir.program import Loc, Op
from spmd.ir.types import ShardingAttr
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, axis_refs, format_sharding
from tests.propagation.necessity import Necessity, Place, necessity, nodes

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
    request = Request(parse_module(text), mesh, spmd.Topology(f"cpu:{mesh.size}"))
    return compile_module(request, spmd.Options(check=True))


def compare(text: str, mesh: Mesh, theirs: list[shardy.Value]) -> Comparison:
    """Pairs up the values of our result and of Shardy's."""
    stages = compile_text(text, mesh)
    found = _unique(theirs, mesh)
    mine = our_values(stages)
    # We take carries out of loops that can make them anew: then numbers of results mean nothing.
    counts, others = (Counter(key[:2] for key in keys) for keys in (mine, found))
    pairs = []
    for key, value in mine.items():
        dims = found.get(key)
        if value in stages.propagated.cheap or dims is None:
            continue
        if key[1] == "stablehlo.while" and counts[key[:2]] != others[key[:2]]:
            continue
        ours = stages.propagated.proposals[value]
        if len(dims) == len(ours):
            pairs.append(Pair(value, key, ours, _planned(stages, key, value), dims))
    return Comparison(stages, tuple(pairs), necessity(stages.propagated))


def _planned(stages: Stages, key: Key, value: int) -> Dims | None:
    """What the plan makes of a value, or of an argument or result at the boundary."""
    _, what, number = key
    if what == "argument":
        return stages.plan.arguments[number].dims
    if what == "result":
        return stages.plan.results[number].dims
    state = stages.plan.states[value]
    return None if state is None else state.dims


def our_values(stages: Stages) -> dict[Key, int]:
    """Arguments, op results and results of our program, those with a place of their own."""
    program = stages.program
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
        key: atoms(value, mesh) for key, value in zip(keys, values, strict=True) if counts[key] == 1
    }


def atoms(value: shardy.Value, mesh: Mesh) -> Dims:
    attr = ShardingAttr(value.dims, (False,) * len(value.dims))
    return atoms_of_attr(attr, (1,) * len(value.dims), mesh, value.op, None, even=False)


# Reasons. A difference has one of its own, or it comes with another that a chain of ops leads to.

TIE, CONFLICT, NEIGHBOUR = "tie", "conflict", "dispute"
BOUNDARY, SUB_AXIS, SHORT = "uneven", "sub-axis", "short"
WHOLE, WINDOW_DIM = "whole", "window"
RESULT, OPERAND, CONSTANT, NO_RULE = "result", "mark", "constant", "rule"
FOLLOWS, UNEXPLAINED = "behind", "unexplained"

REASONS = {
    TIE: "Two dims of the value may get the axis. We decide when everything else is settled, "
    "Shardy decides at the op that it looks at.",
    CONFLICT: "Different claims may reach the dim, and the first one wins. Shardy lets axes "
    "through broadcasts late, we do so at once.",
    NEIGHBOUR: "An op beside the value may be split over the axis in two ways. Shardy gives the "
    "value nothing, we give it what comes from its other side.",
    FOLLOWS: "The value gets its sharding from one that differs for another reason.",
    BOUNDARY: "The axes do not divide an argument or result. We take the part that does, Shardy "
    "takes none.",
    SUB_AXIS: "Shardy takes sub-axes off arguments and results at once, we do so in the plan.",
    SHORT: "Shardy splits dims over more devices than they have elements, we do not.",
    WHOLE: "An op needs the dim whole (the sorted dim of a sort). Shardy lets the axes through.",
    WINDOW_DIM: "The op reads beyond its piece of the dim. Shardy reshards before some of these "
    "ops, we exchange halos.",
    RESULT: "A mark on a result is for us the value's own, for Shardy that of what is returned.",
    OPERAND: "A mark makes a new value. Shardy gives its sharding to the value before it, too.",
    CONSTANT: "Made of constants alone: Shardy makes a copy for each use.",
    NO_RULE: "Shardy lets nothing through CHLO ops and `if` (XLA rewrites them before it comes).",
    UNEXPLAINED: "Nothing of the above.",
}
"""Reason -> what it means, for people."""


class _Facts(NamedTuple):
    """What the reasons of a program's differences are read from.

    Attributes:
      kinds: for each dim, the kinds of the factors that it means to the ops around it.
      given: values that some argument has a part in.
      marked_operands: values that a mark inside the program is put on.
      boundary: arguments and results.
    """

    kinds: Mapping[Place, set[str]]
    given: set[int]
    marked_operands: set[int]
    boundary: set[int]


def explain(comparison: Comparison) -> dict[Pair, tuple[str, ...]]:
    different = [pair for pair in comparison.pairs if pair.relation != EQUAL]
    facts = _facts(comparison.stages)
    found = {pair: _own_reasons(comparison, facts, pair) for pair in different}
    groups = _groups(comparison, [pair.value for pair in different])
    explained = {groups[pair.value] for pair, why in found.items() if why}
    for pair, why in found.items():
        if not why:
            found[pair] = (FOLLOWS if groups[pair.value] in explained else UNEXPLAINED,)
    return found


def _own_reasons(comparison: Comparison, facts: _Facts, pair: Pair) -> tuple[str, ...]:
    """Why a pair differs, dim by dim, as far as the value itself tells."""
    dims = [d for d, (a, b) in enumerate(zip(pair.ours, pair.theirs, strict=True)) if a != b]
    why = [_own_reason(comparison, facts, pair, dim) for dim in dims]
    return tuple(dict.fromkeys(filter(None, why)))


def _own_reason(comparison: Comparison, facts: _Facts, pair: Pair, dim: int) -> str:
    needs, propagated = comparison.needs, comparison.stages.propagated
    value, place, mesh = pair.value, (pair.value, dim), comparison.stages.plan.mesh
    at_boundary = value in facts.boundary
    in_pieces = any(not ref.whole for ref in axis_refs(pair.ours[dim], mesh))
    size = propagated.program.types[value].shape[dim]
    kinds = facts.kinds.get(place, set())
    rows = (
        (place in needs.contested, _contest(needs, place)),
        (place in propagated.undivided, BOUNDARY),
        (at_boundary and in_pieces, SUB_AXIS),
        (mesh.extent(pair.theirs[dim]) > size, SHORT),
        (REPLICATE in kinds, WHOLE),
        (at_boundary and value in propagated.marks, RESULT),
        (value in facts.marked_operands, OPERAND),
        (value not in facts.given, CONSTANT),
        (pair.key[1].startswith(NOT_RULED), NO_RULE),
        (WINDOW in kinds, WINDOW_DIM),
        (place in needs.disputed, NEIGHBOUR),
    )
    return next((reason for holds, reason in rows if holds), "")


NOT_RULED = ("chlo.", "stablehlo.if")
"""CHLO ops are rewritten with others, and `if` with `case`, before Shardy sees them under XLA."""


def _contest(needs: Necessity, place: Place) -> str:
    claims = needs.may.get(place, frozenset({()}))
    longest = max(claims, key=len)
    return TIE if all(longest[: len(claim)] == claim for claim in claims) else CONFLICT


def _facts(stages: Stages) -> _Facts:
    program = stages.program
    every = list(nodes(program))
    kinds: dict[Place, set[str]] = {}
    for node in every:
        for value, dims in zip(node.values, node.rule.values, strict=True):
            for d, dim in enumerate(dims):
                kinds.setdefault((value, d), set()).update(node.rule.factors[f].kind for f in dim)
    given = set(program.body.args)
    for _ in range(2):  # what a loop carries comes back to its start
        for node in every:
            if not given.isdisjoint(node.values[:-1]):
                given.update(node.values)
    marked = {op.operands[0] for op in program.walk() if op.name == "spmd.mark"}
    return _Facts(kinds, given, marked, {*program.body.args, *program.body.results})


def _groups(comparison: Comparison, values: list[int]) -> dict[int, int]:
    """Joins values that an op or a tie has in common: value -> a number for its group."""
    group = {value: value for value in values}

    def root(value: int) -> int:
        while group[value] != value:
            value = group[value]
        return value

    for node in nodes(comparison.stages.program):
        together = [root(v) for v in node.values if v in group]
        for value in together:
            group[value] = together[0]
    return {value: root(value) for value in values}


def describe(comparison: Comparison, pair: Pair, why: tuple[str, ...]) -> str:
    mesh = comparison.stages.plan.mesh
    where, op, number = pair.key
    ours, theirs = (format_sharding(Sharding(d), mesh) for d in (pair.ours, pair.theirs))
    place = f"line {'<'.join(map(str, where))}" if where else "main"
    return f"{place} {op}#{number}: ours {ours}, Shardy {theirs} ({', '.join(why)})"

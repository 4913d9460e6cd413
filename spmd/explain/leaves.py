"""Arguments, results and values inside: how each lies on the mesh and why, like ones together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from spmd.explain.document import Cell, Table, code, count, number, source
from spmd.explain.words import bytes_text, source_text, spec_text, type_text
from spmd.ir.program import Value
from spmd.ir.types import TensorType, local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.planning.plan import Plan
from spmd.propagation.propagate import Propagated

# ---------------------------------------------------------------------------------------------
# Arguments and results.


class Leaf(NamedTuple):
    """One argument or result, by its path in the user's pytree; `local` is one device's piece.

    Its origin is `marked`, or the mark that its sharding comes from, or why there is no such mark.
    """

    name: str
    type: TensorType
    sharding: Sharding
    local: TensorType
    origin: str


def boundary(plan: Plan) -> list[tuple[str, str, Value, Sharding]]:
    """(`argument` or `result`, name, value, sharding) of every argument and result, in order."""
    program = plan.program
    arguments = zip(program.arg_names, program.body.args, plan.arguments, strict=True)
    results = zip(program.result_names, program.body.results, plan.results, strict=True)
    return [*(("argument", *end) for end in arguments), *(("result", *end) for end in results)]


def leaves_of(plan: Plan) -> list[Leaf]:
    """Every argument and result, in order."""
    types = plan.program.types
    return [
        Leaf(name, types[v], s, local_type(types[v], s, plan.mesh), _origin(plan.propagated, v, s))
        for _, name, v, s in boundary(plan)
    ]


def _origin(propagated: Propagated, value: Value, sharding: Sharding) -> str:
    if not sharding.dims:
        return "-"
    if value in propagated.marks:
        reason = propagated.marks[value].reason
        return reason if reason.startswith("like ") else "marked"
    causes: dict[str, None] = {}
    for dim, axes in enumerate(sharding.dims):
        for atom in axes:
            chain = propagated.why(value, dim, atom)
            causes[f"from {source_text(chain[-1])}" if chain else "the planner's choice"] = None
    return "; ".join(causes) or "no mark reaches it"


def split_text(leaves: Sequence[Leaf]) -> str:
    """How many there are, and how many of them are split."""
    split = sum(any(leaf.sharding.dims) for leaf in leaves)
    return f"{len(leaves)}, {split} of them split"


def leaf_table(leaves: Sequence[Leaf], mesh: Mesh) -> Table:
    """Arguments or results, those that are alike in one row."""
    rows = []
    for group in group_leaves(leaves):
        leaf, several = group.leaves[0], len(group.leaves) > 1
        parts = tuple((leaf.name, leaf.origin) for leaf in group.leaves) if several else ()
        rows.append(
            (
                Cell(group.pattern, "name", style="w", parts=parts),
                count(len(group.leaves)),
                code(type_text(leaf.type)),
                code(spec_text(leaf.sharding, mesh)),
                code(type_text(leaf.local)),
                number(bytes_text(group.bytes), group.bytes),
                Cell(pattern(leaf.origin for leaf in group.leaves), "path", style="w"),
            )
        )
    heads = ("name", "n", "type", "sharding", "local", "per device", "origin")
    return Table(heads, rows, search="a name or a sharding" if len(rows) > 6 else "")


# ---------------------------------------------------------------------------------------------
# Names that are alike.


class Group(NamedTuple):
    """Leaves of one type and sharding whose names differ in numbers or in single parts.

    There is a leaf (or one for each number) for every combination of the parts of names, in which
    numbers are `*`. `look` is what they have in common beside those.
    """

    parts: tuple[frozenset[str], ...]
    look: object
    leaves: tuple[Leaf, ...]

    @property
    def pattern(self) -> str:
        """The leaves' common name, `layers/*/{mu,nu}/weight`."""
        return pattern(leaf.name for leaf in self.leaves)

    @property
    def bytes(self) -> int:
        """Bytes per device of all leaves together."""
        return sum(leaf.local.bytes for leaf in self.leaves)

    def union(self, other: Group) -> Group:
        """The leaves of both."""
        parts = tuple(a | b for a, b in zip(self.parts, other.parts, strict=True))
        return Group(parts, self.look, self.leaves + other.leaves)

    def differs_in_one_part(self, other: Group) -> bool:
        """Whether the union is a group again; first and last parts of names stay apart."""
        if self.look != other.look or len(self.parts) != len(other.parts):
            return False
        different = [a != b for a, b in zip(self.parts, other.parts, strict=True)]
        return sum(different[1:-1]) == 1 and not different[0] and not different[-1]


def _look(leaf: Leaf) -> object:
    is_mark_or_nothing = leaf.origin in ("-", "marked", "no mark reaches it")
    return leaf.type, leaf.sharding, leaf.origin if is_mark_or_nothing else "inferred"


def group_leaves(
    leaves: Iterable[Leaf], look_of: Callable[[Leaf], object] = _look
) -> tuple[Group, ...]:
    """Collapses leaves that look the same and have names alike, in order of the first.

    Names that differ only in numbers go together, then groups whose names differ in one part, as
    long as the result holds every combination: `{mu,nu}/{w,b}` stands for four leaves.
    """
    alike: dict[tuple[str, object], list[Leaf]] = {}
    for leaf in leaves:
        alike.setdefault((re.sub(r"\d+", "*", leaf.name), look_of(leaf)), []).append(leaf)
    merged: list[Group] = []
    for (name, common), members in alike.items():
        parts = tuple(frozenset((part,)) for part in name.split("/"))
        group = Group(parts, common, tuple(members))
        place = len(merged)
        # A union may be one part away from yet another group: look again until none is left.
        while fitting := [i for i, g in enumerate(merged) if g.differs_in_one_part(group)]:
            group = merged.pop(fitting[0]).union(group)
            place = min(place, fitting[0])
        merged.insert(place, group)
    return tuple(merged)


def pattern(names: Iterable[str]) -> str:
    """What texts have in common, part by part: `a/0/w`, `a/1/w` -> `a/*/w`."""
    given = list(dict.fromkeys(names))
    split = [re.split(r"(/|\d+| )", name) for name in given]
    if len({len(parts) for parts in split}) > 1:
        return f"{given[0]} and {len(given) - 1} more"

    def common(parts: Sequence[str]) -> str:
        if len(parts) == 1:
            return parts[0]
        is_any = len(parts) > 3 or all(part.isdigit() for part in parts)
        return "*" if is_any else "{" + ",".join(parts) + "}"

    return "".join(common(list(dict.fromkeys(parts))) for parts in zip(*split, strict=True))


# ---------------------------------------------------------------------------------------------
# Values inside.


def values_inside(plan: Plan) -> Counter[tuple[str, TensorType, Sharding, str]]:
    """(op, type, sharding, source) -> how many: results of ops, and copies in another sharding."""
    found: Counter[tuple[str, TensorType, Sharding, str]] = Counter()
    copies: set[tuple[Value, Sharding]] = set()
    for op in plan.program.walk():
        for value in op.results:
            if (state := plan.states[value]) is not None:
                found[op.label, plan.program.types[value], state, op.loc.trail] += 1
        choice = plan.choices.get(op.results[0]) if op.results else None
        for value, wanted in zip(op.operands, choice.operands if choice else (), strict=False):
            is_copy = plan.states[value] not in (None, wanted)
            if is_copy and (value, wanted) not in copies:
                copies.add((value, wanted))
                found[f"copy for {op.label}", plan.program.types[value], wanted, op.loc.trail] += 1
    return found


def largest_table(plan: Plan, n: int) -> Table:
    """The `n` largest values that are made inside the program, those that are alike in one row."""
    rows = []
    for (what, type_, sharding, trail), values in values_inside(plan).items():
        local = local_type(type_, sharding, plan.mesh)
        row = (
            number(bytes_text(local.bytes), local.bytes),
            count(values),
            code(type_text(type_)),
            code(spec_text(sharding, plan.mesh), "w"),
            code(type_text(local)),
            Cell(what, style="w"),
            source(trail),
        )
        rows.append((local.bytes, row))
    rows.sort(key=lambda sized: -sized[0])
    heads = ("per device", "n", "type", "sharding", "local", "op", "source")
    return Table(heads, [row for _, row in rows[:n]], sort="per device")

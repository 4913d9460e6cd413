"""Arguments and results: how each lies on the mesh and why, those that are alike together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from spmd.explain.words import source_text
from spmd.ir.program import Value
from spmd.ir.types import TensorType, local_type
from spmd.mesh.sharding import Sharding
from spmd.planning.plan import Plan
from spmd.propagation.propagate import Propagated


class Leaf(NamedTuple):
    """One argument or result.

    Attributes:
      name: its path in the user's pytree.
      type: its whole type.
      sharding: how it lies on the mesh.
      local: the type of one device's piece.
      origin: `marked`, or the mark that its sharding comes from, or why there is no such mark.
    """

    name: str
    type: TensorType
    sharding: Sharding
    local: TensorType
    origin: str


class Group(NamedTuple):
    """Leaves of one type and sharding whose names differ in numbers or in single parts.

    There is a leaf (or one for each number) for every combination of the parts of names.

    Attributes:
      parts: what stands in each place of the leaves' names, numbers written as `*`.
      look: what the leaves have in common beside that.
      leaves: at least one; they differ in name and origin alone.
    """

    parts: tuple[frozenset[str], ...]
    look: object
    leaves: tuple[Leaf, ...]

    @property
    def pattern(self) -> str:
        """The leaves' common name, `layers/*/{mu,nu}/weight`."""
        return pattern(leaf.name for leaf in self.leaves)

    @property
    def origin(self) -> str:
        """The leaves' origins, abbreviated the same way."""
        return pattern(leaf.origin for leaf in self.leaves)

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


def argument_leaves(plan: Plan) -> tuple[Leaf, ...]:
    """Every argument, in order."""
    program = plan.program
    return _leaves(plan, zip(program.arg_names, program.body.args, plan.arguments, strict=True))


def result_leaves(plan: Plan) -> tuple[Leaf, ...]:
    """Every result, in order."""
    program = plan.program
    return _leaves(plan, zip(program.result_names, program.body.results, plan.results, strict=True))


def _leaves(plan: Plan, boundary: Iterable[tuple[str, Value, Sharding]]) -> tuple[Leaf, ...]:
    types = plan.program.types
    return tuple(
        Leaf(name, types[v], s, local_type(types[v], s, plan.mesh), _origin(plan.propagated, v, s))
        for name, v, s in boundary
    )


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


def _look(leaf: Leaf) -> object:
    return leaf.type, leaf.sharding, _kind_of(leaf.origin)


def group_leaves(
    leaves: Iterable[Leaf], look_of: Callable[[Leaf], object] = _look
) -> tuple[Group, ...]:
    """Collapses leaves that look the same and have names alike, in order of the first.

    Names that differ only in numbers go together, then groups whose names differ in one part, as
    long as the result holds every combination: `{mu,nu}/{w,b}` stands for four leaves.

    Args:
      leaves: the leaves.
      look_of: what leaves have in common; type, sharding and kind of origin when left out.
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


def _kind_of(origin: str) -> str:
    """Whether an origin is a mark, nothing, or somewhere else."""
    return origin if origin in ("-", "marked", "no mark reaches it") else "inferred"


def pattern(names: Iterable[str]) -> str:
    """What texts have in common, part by part: `a/0/w`, `a/1/w` -> `a/*/w`."""
    given = list(dict.fromkeys(names))
    split = [re.split(r"(/|\d+| )", name) for name in given]
    if len(given) == 1:
        return given[0]
    if len({len(parts) for parts in split}) > 1:
        return f"{given[0]} and {len(given) - 1} more"
    return "".join(_common(list(dict.fromkeys(parts))) for parts in zip(*split, strict=True))


def _common(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    if len(parts) > 3 or all(part.isdigit() for part in parts):
        return "*"
    return "{" + ",".join(parts) + "}"

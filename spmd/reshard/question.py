"""What a reshard asks, without names: equal questions have equal answers, on whatever mesh.

A pair of shardings becomes a `Question` about *digits*: atoms, or runs of atoms that play the same
part at both ends. What no cheapest path touches is left out of it: atoms that stay partial or are
held, dims that can be split no further, and

- the prefix that a dim keeps, where atoms are all alike (else it may stand in for another);
- of the dims that neither end splits all but the roomiest: one, or two where something is partial
  or links differ. They are places to put atoms aside.

Dims and digits come in an order that does not depend on their names. `test_reshard_pairs.py`
compares with brute force for every pair on small meshes. On larger meshes, where the search is not
exact anyway, prefixes go and one spare dim stays in all cases, with room for the atoms that neither
end puts on a dim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from spmd.mesh.chips import Link
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.mesh.topology import Topology

EXACT_ATOMS = 4
"""Atoms are joined only where there are more: with fewer the path is exactly optimal."""

EXACT_DIGITS = 3
"""Of so many digits, joined ones among them, every legal step is tried as well."""

Dims = tuple[Axes, ...]


class Digit(NamedTuple):
    """An atom, or several that move together.

    Attributes:
      sizes: of its atoms.
      latency: seconds of one message over its link.
      bandwidth: bytes/s of its link.
      flat: whether collectives take two latencies, however many devices take part.
    """

    sizes: tuple[int, ...]
    latency: float
    bandwidth: float
    flat: bool = False


class Question(NamedTuple):
    """From which sharding to which; everything partial is to be reduced.

    Attributes:
      digits: what shardings are made of; their indices are the atoms of this question.
      src: digits of each dim.
      dst: digits of each dim.
      partial: digits that are partial at first, ascending.
      room: for each dim, what its size has in common with the number of devices.
    """

    digits: tuple[Digit, ...]
    src: Dims
    dst: Dims
    partial: Axes
    room: tuple[int, ...]


class Names(NamedTuple):
    """What the words of a question stand for.

    Attributes:
      digits: for each digit, its atoms.
      dims: for each dim, which one of the value's it is.
      kept: for each dim of the value, the atoms that it keeps throughout.
    """

    digits: tuple[Axes, ...]
    dims: tuple[int, ...]
    kept: Dims

    def atoms(self, digits: Axes) -> Axes:
        """Digits spelled out."""
        if len(digits) == 1:
            return self.digits[digits[0]]
        return tuple(a for digit in digits for a in self.digits[digit])


class _Dim(NamedTuple):
    """One dim of the value, less the prefix that it keeps."""

    number: int
    kept: Axes
    src: Axes
    dst: Axes
    room: int


def ask(
    src: Sharding,
    dst: Sharding,
    shape: Sequence[int],
    held: Axes,
    mesh: Mesh,
    topology: Topology,
    join: bool = True,
) -> tuple[Question, Names]:
    """The question that a pair of shardings comes down to.

    Args:
      src: sharding at first.
      dst: sharding wanted; what it is partial over, `src` is too.
      shape: sizes of the dims, each divisible at both ends.
      held: atoms that no step may use.
      mesh: the mesh.
      topology: the links.
      join: whether atoms may become one digit; where some dim has room for a part of it only, there
        may be no path then.

    Returns:
      The question, and what its digits and dims stand for.
    """
    letters = _letters(mesh, topology)
    ends = enumerate(zip(src.dims, dst.dims, shape, strict=True))
    many, alike = len(letters) > EXACT_ATOMS, len(set(letters)) == 1
    if many or alike:
        dims = [_stripped(number, *dim, mesh) for number, dim in ends]
    else:  # a prefix may stand in for an atom of another size, or over another link
        dims = [_Dim(number, (), *dim) for number, dim in ends]
    prefixes = tuple(dim.kept for dim in dims)
    aside = {a for axes in prefixes for a in axes}.union(dst.partial)
    aside.update(a for a in held if a not in src.used and a not in dst.used)
    atoms = [a for a in range(len(letters)) if a not in aside]
    partial = [a for a in src.partial if a not in aside]
    spares = 1 if many or (alike and not partial) else 2
    devices = mesh.extent(atoms)
    placed = {a for dim in dims for a in dim.src + dim.dst}
    parked = mesh.extent(a for a in atoms if a not in placed) if many else devices
    dims = _useful(dims, devices, parked, spares)
    dims.sort(key=lambda dim: _look(dim, letters))
    order = _by_appearance(dims, partial, atoms, letters)
    runs: list[Axes] = [(a,) for a in order]
    if join and len(runs) > EXACT_ATOMS:
        runs = _refined(_joined(dims, partial, order, letters), dims, mesh)
    names = Names(tuple(runs), tuple(dim.number for dim in dims), prefixes)
    return _spelled(runs, dims, partial, letters), names


@lru_cache(maxsize=64)
def _letters(mesh: Mesh, topology: Topology) -> tuple[Digit, ...]:
    """Every atom of a mesh as a digit."""
    links = topology.atom_links(mesh)
    return tuple(_letter(size, links[a], topology) for a, size in enumerate(mesh.atom_sizes))


def _letter(size: int, link: Link, topology: Topology) -> Digit:
    """An atom as a search reckons with it: one pace for all kinds, or no bound is worth its name.

    Where kinds of collectives were measured one by one, that is about what they took, as much for
    few devices as for many; the paths that are found are priced by kind.
    """
    measured = topology.chip.measured
    if link != topology.chip.ici or not measured:
        return Digit((size,), link.latency, link.bandwidth)
    latency = statistics.median(m.latency for m in measured)
    return Digit((size,), latency / 2, statistics.median(m.bandwidth for m in measured), True)


def _stripped(number: int, src: Axes, dst: Axes, size: int, mesh: Mesh) -> _Dim:
    """A dim without the prefix that both ends have."""
    common = 0
    while common < min(len(src), len(dst)) and src[common] == dst[common]:
        common += 1
    kept = src[:common]
    return _Dim(number, kept, src[common:], dst[common:], size // mesh.extent(kept))


def _useful(dims: Iterable[_Dim], devices: int, parked: int, spares: int) -> list[_Dim]:
    """Dims that can be split, and of those that neither end splits only the roomiest.

    Args:
      dims: every dim.
      devices: extent of all atoms.
      parked: extent of the atoms that neither end puts on a dim.
      spares: how many such dims to keep.
    """
    rooms = [
        dim._replace(room=math.gcd(dim.room, devices if dim.src or dim.dst else parked))
        for dim in dims
    ]
    used = [dim for dim in rooms if dim.src or dim.dst]
    spare = [dim for dim in rooms if dim.room > 1 and not (dim.src or dim.dst)]
    spare.sort(key=lambda dim: -dim.room)
    return used + [
        dim
        for i, dim in enumerate(spare)
        if sum(other.room % dim.room == 0 for other in spare[:i]) < spares
    ]


def _look(dim: _Dim, letters: Sequence[Digit]) -> tuple[object, ...]:
    """What a dim looks like without names."""
    return (
        [letters[a] for a in dim.src],
        [letters[a] for a in dim.dst],
        dim.room,
    )


def _by_appearance(
    dims: Sequence[_Dim], partial: Sequence[int], atoms: Sequence[int], letters: Sequence[Digit]
) -> list[int]:
    """Atoms in the order in which a reader meets them; those that look alike are told apart so."""
    placed = [a for dim in dims for a in dim.src] + [a for dim in dims for a in dim.dst]
    seen = dict.fromkeys([*placed, *sorted(partial, key=lambda a: letters[a])])
    rest = sorted((a for a in atoms if a not in seen), key=lambda a: letters[a])
    return [*seen, *rest]


# ---------------------------------------------------------------------------------------------
# Atoms that play the same part become one digit.


def _joined(
    dims: Sequence[_Dim], partial: Sequence[int], order: Sequence[int], letters: Sequence[Digit]
) -> list[Axes]:
    """Runs of atoms that are neighbours, or alike, at both ends and have equal links."""
    before = _successors(dim.src for dim in dims)
    after = _successors(dim.dst for dim in dims)
    owed = set(partial)

    def follows(a: int, b: int) -> bool:
        return (
            letters[a] == letters[b]
            and (a in owed) == (b in owed)
            and all(ends[a] == b if a in ends else b not in ends for ends in (before, after))
        )

    runs: list[Axes] = []
    for a in order:
        if runs and follows(runs[-1][-1], a):
            runs[-1] = (*runs[-1], a)
        else:
            runs.append((a,))
    return runs


def _successors(dims: Iterable[Axes]) -> dict[int, int]:
    """For each atom that splits a dim, the next one there; -1 for the last."""
    return {a: b for axes in dims for a, b in zip(axes, (*axes, -1)[1:], strict=True)}


def _refined(runs: list[Axes], dims: Sequence[_Dim], mesh: Mesh) -> list[Axes]:
    """Runs cut where another run, or a dim, has just room for a part, while few are left."""
    extent = mesh.extent
    while len(runs) < EXACT_DIGITS:
        cut = _first_cut(runs, [dim.room for dim in dims], extent)
        if cut is None:
            return runs
        number, keep = cut
        run = runs[number]
        runs = [*runs[:number], run[:keep], run[keep:], *runs[number + 1 :]]
    return runs


def _first_cut(
    runs: Sequence[Axes], rooms: Sequence[int], extent: Callable[[Axes], int]
) -> tuple[int, int] | None:
    """Which run to cut, and how many atoms its major part keeps: the largest parts first."""
    extents = [extent(run) for run in runs]
    fits = {*extents, *(math.gcd(whole, room) for whole in extents for room in rooms)}

    def parts() -> Iterator[tuple[int, int, int]]:
        for number, run in enumerate(runs):
            for keep in range(1, len(run)):
                if extent(run[:keep]) in fits:
                    yield -extents[number], -keep, number

    best = min(parts(), default=None)
    return None if best is None else (best[2], -best[1])


def _spelled(
    runs: Sequence[Axes], dims: Sequence[_Dim], partial: Sequence[int], letters: Sequence[Digit]
) -> Question:
    """The question in digits, one for each run."""
    number = {run[0]: i for i, run in enumerate(runs)}

    def digits(atoms: Iterable[int]) -> Axes:
        return tuple(number[a] for a in atoms if a in number)

    return Question(
        tuple(
            letters[run[0]]._replace(sizes=sum((letters[a].sizes for a in run), ())) for run in runs
        ),
        tuple(digits(dim.src) for dim in dims),
        tuple(digits(dim.dst) for dim in dims),
        tuple(sorted(digits(partial))),
        tuple(dim.room for dim in dims),
    )

"""What a reshard asks, without names: equal questions have equal answers, on whatever mesh.

A pair of shardings becomes a `Question` about *digits*: atoms, or runs of atoms that play the same
part at both ends. What no cheapest path touches is left out of it:

- atoms that stay partial, and atoms that no step may use;
- dims that can be split no further;
- of the dims that neither end splits all but the roomiest. They are places to put atoms aside. One
  is kept, or two where something is partial or links differ;
- the atoms with which a dim begins at both ends, where all atoms are alike: they stay where they
  are. Where atoms differ they may have to make way for one of another size, or of a faster link.

Dims and digits come in an order that does not depend on their names. `tests/reshard/test_pairs.py`
compares with brute force for every pair on small meshes. On larger meshes, where the search is not
exact anyway, common beginnings are always left out, and one spare dim stays, with room for the
atoms that neither end puts on a dim.

Example, on the mesh `data=4, model=2`, whose atoms are 0 and 1 (`data`) and 2 (`model`):
  from `[{data, model}, {}]` to `[{data}, {model}]`
  the first dim keeps 0 and 1; left is the question of one digit of size 2, atom 2, which leaves one
  dim for another: src `((0,), ())`, dst `((), (0,))`. A mesh `x=2` asks the same of `[{x}, {}]` and
  `[{}, {x}]`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, common_prefix
from spmd.mesh.topology import Topology

EXACT_ATOMS = 4
"""Atoms are joined only where there are more: with fewer the path is exactly optimal."""

EXACT_DIGITS = 3
"""Of so many digits, joined ones among them, every legal step is tried as well."""

Dims = tuple[Axes, ...]


class Digit(NamedTuple):
    """An atom, or several that move together."""

    sizes: tuple[int, ...]  # of its atoms
    latency: float  # seconds of one message over its link
    bandwidth: float  # bytes/s of its link
    flat: bool = False  # a collective takes two latencies, however many devices take part


class Question(NamedTuple):
    """From which sharding to which; everything partial is to be reduced."""

    digits: tuple[Digit, ...]  # the other fields name them by their indices
    src: Dims
    dst: Dims
    partial: Axes  # digits that are partial at first, ascending
    room: tuple[int, ...]  # what each dim's size has in common with the number of devices


class Names(NamedTuple):
    """What the digits and dims of a question stand for."""

    digits: tuple[Axes, ...]  # for each digit, its atoms
    dims: tuple[int, ...]  # for each dim, which one of the value's it is
    kept: Dims  # for each dim of the value, the atoms that it keeps throughout

    def atoms(self, digits: Axes) -> Axes:
        """The atoms of some digits, in order."""
        if len(digits) == 1:
            return self.digits[digits[0]]
        return tuple(a for digit in digits for a in self.digits[digit])


class _Dim(NamedTuple):
    """Dim `number` of the value, less the atoms that it keeps."""

    number: int
    src: Axes
    dst: Axes
    room: int


def questions(
    src: Sharding,
    dst: Sharding,
    shape: Sequence[int],
    held: Axes,
    mesh: Mesh,
    topology: Topology,
) -> Iterator[tuple[Question, Names]]:
    """What a pair of shardings comes down to: with atoms joined, then with each for itself.

    Where some dim has room for a part of a joined digit only, the first may have no path. The sizes
    in `shape` are divisible at both ends, and `src` is partial over all that `dst` is.
    """
    letters = atom_digits(mesh, topology)
    many, alike = len(letters) > EXACT_ATOMS, len(set(letters)) == 1
    dims, kept = [], []
    for number, (a, b, size) in enumerate(zip(src.dims, dst.dims, shape, strict=True)):
        prefix = common_prefix(a, b) if many or alike else ()
        kept.append(prefix)
        taken = len(prefix)
        dims.append(_Dim(number, a[taken:], b[taken:], size // mesh.extent(prefix)))
    aside = {a for axes in kept for a in axes}.union(dst.partial)
    aside.update([a for a in held if a not in src.used and a not in dst.used])
    atoms = [a for a in range(len(letters)) if a not in aside]
    partial = [a for a in src.partial if a not in aside]
    spares = 1 if many or (alike and not partial) else 2
    devices = mesh.extent(atoms)
    placed = {a for dim in dims for a in dim.src + dim.dst}
    parked = mesh.extent([a for a in atoms if a not in placed]) if many else devices
    dims = _useful(dims, devices, parked, spares)
    # What a dim or an atom looks like, not its number, says where it comes in a question.
    look = letters.__getitem__
    dims.sort(key=lambda d: (list(map(look, d.src)), list(map(look, d.dst)), d.room))
    met = [a for d in dims for a in d.src] + [a for d in dims for a in d.dst]
    order = dict.fromkeys(met + sorted(partial, key=look) + sorted(atoms, key=look))
    apart: list[Axes] = [(a,) for a in order]
    joined = apart
    if len(apart) > EXACT_ATOMS:
        joined = _joined(dims, partial, list(order), letters)
        joined = _refined(joined, [dim.room for dim in dims], mesh)
    for runs in (joined, apart):
        digit_of = {run[0]: i for i, run in enumerate(runs)}
        question = Question(
            tuple(
                [letters[run[0]]._replace(sizes=letters[run[0]].sizes * len(run)) for run in runs]
            ),
            tuple([_digits(dim.src, digit_of) for dim in dims]),
            tuple([_digits(dim.dst, digit_of) for dim in dims]),
            tuple(sorted(_digits(partial, digit_of))),
            tuple([dim.room for dim in dims]),
        )
        yield question, Names(tuple(runs), tuple([dim.number for dim in dims]), tuple(kept))


@lru_cache(maxsize=64)
def atom_digits(mesh: Mesh, topology: Topology) -> tuple[Digit, ...]:
    """Every atom of a mesh as a digit.

    A digit has one pace for all kinds of collectives: with one for each, no bound would come near
    the cost of a path. Where kinds were measured one by one the median stands for all; they took
    about as long among few devices as among many. The paths that are found are priced by kind.
    """
    chip, usual = topology.chip, None
    if chip.measured:
        latency = statistics.median(m.latency for m in chip.measured)
        bandwidth = statistics.median(m.bandwidth for m in chip.measured)
        usual = Digit((), latency / 2, bandwidth, flat=True)
    return tuple(
        usual._replace(sizes=(size,))
        if usual and link == chip.ici
        else Digit((size,), link.latency, link.bandwidth)
        for size, link in zip(mesh.atom_sizes, topology.atom_links(mesh), strict=True)
    )


def _useful(dims: Iterable[_Dim], devices: int, parked: int, spares: int) -> list[_Dim]:
    """Dims that can be split, and of those that neither end splits only the `spares` roomiest.

    `devices` is the extent of all atoms, `parked` of those that neither end puts on a dim.
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


# ---------------------------------------------------------------------------------------------
# Atoms that play the same part become one digit.


def _joined(
    dims: Sequence[_Dim], partial: Sequence[int], order: Sequence[int], letters: Sequence[Digit]
) -> list[Axes]:
    """Runs of atoms that are neighbours, or alike, at both ends and have equal links."""
    ends = [_successors(dim.src for dim in dims), _successors(dim.dst for dim in dims)]
    runs: list[Axes] = []
    for b in order:
        a = runs[-1][-1] if runs else b
        if (
            a != b
            and letters[a] == letters[b]
            and (a in partial) == (b in partial)
            and all(end[a] == b if a in end else b not in end for end in ends)
        ):
            runs[-1] = (*runs[-1], b)
        else:
            runs.append((b,))
    return runs


def _successors(dims: Iterable[Axes]) -> dict[int, int]:
    """For each atom that splits a dim, the next one there; -1 for the last."""
    return {a: b for axes in dims for a, b in zip(axes, (*axes, -1)[1:], strict=True)}


def _refined(runs: list[Axes], rooms: Sequence[int], mesh: Mesh) -> list[Axes]:
    """Runs cut where another run, or a dim, has just room for a part, while few are left.

    The longest run is cut first, and keeps the longest part that fits.
    """
    while len(runs) < EXACT_DIGITS:
        extents = [mesh.extent(run) for run in runs]
        fits = {*extents, *(math.gcd(whole, room) for whole in extents for room in rooms)}
        cuts = [
            (-extents[number], -keep, number)
            for number, run in enumerate(runs)
            for keep in range(1, len(run))
            if mesh.extent(run[:keep]) in fits
        ]
        if not cuts:
            break
        _, keep, number = min(cuts)
        run = runs[number]
        runs = [*runs[:number], run[:-keep], run[-keep:], *runs[number + 1 :]]
    return runs


def _digits(atoms: Iterable[int], digit_of: Mapping[int, int]) -> Axes:
    """Atoms in digits, each of which has the number of its first atom."""
    return tuple([digit_of[a] for a in atoms if a in digit_of])

"""`Sharding`: how a value is split over a mesh; local shapes, text, axes of another mesh."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np

from spmd.errors import MeshError, SpecError
from spmd.mesh.mesh import Mesh

Axes = tuple[int, ...]  # atoms, as indices into `Mesh.atoms`, major to minor


def common_prefix(first: Axes, second: Axes) -> Axes:
    """Returns the atoms with which both tuples begin: (0, 1, 4) and (0, 1, 2) -> (0, 1)."""
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return first[: next((k for k, (a, b) in pairs if a != b), shorter)]


class Sharding:
    """How one value is split: the atoms of each dim, and the atoms over which it is partial.

    Equal shardings are the same object, so they are compared and hashed by identity.
    """

    __slots__ = ("dims", "kind", "partial", "used")

    dims: tuple[Axes, ...]  # for each dim, the atoms that split it, major to minor
    partial: Axes  # atoms over which every device holds only a term of the value, ascending
    # how those terms combine: `add`, `mul`, `max`, `min`, `and`, `or`, `xor`; `""` if none
    kind: str
    used: frozenset[int]  # every atom that splits a dim or is partial

    _interned: ClassVar[dict[tuple[tuple[Axes, ...], Axes, str], "Sharding"]] = {}

    def __new__(cls, dims: tuple[Axes, ...], partial: Axes = (), kind: str = "") -> "Sharding":
        """Returns the sharding with these fields: the one that exists, or a new one."""
        key = (dims, partial, kind)
        found = cls._interned.get(key)
        if found is None:
            made = super().__new__(cls)
            used = frozenset(a for axes in dims for a in axes) | frozenset(partial)
            for name, value in (("dims", dims), ("partial", partial), ("kind", kind)):
                object.__setattr__(made, name, value)
            object.__setattr__(made, "used", used)
            found = cls._interned.setdefault(key, made)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Sharding is frozen: {name} cannot be set")

    def __reduce__(self) -> tuple[type["Sharding"], tuple[tuple[Axes, ...], Axes, str]]:
        return Sharding, (self.dims, self.partial, self.kind)

    def __repr__(self) -> str:
        return f"Sharding(dims={self.dims}, partial={self.partial}, kind={self.kind!r})"

    @property
    def rank(self) -> int:
        """The number of dims of the value."""
        return len(self.dims)

    def full(self) -> "Sharding":
        """Returns the sharding that has the same atoms for each dim, and is not partial."""
        return Sharding(self.dims) if self.partial else self

    def with_partial(self, partial: Iterable[int], kind: str) -> "Sharding":
        """Returns the sharding with the same dims, partial over `partial` by `kind`: `add`, ..."""
        atoms = tuple(sorted(set(partial)))
        return Sharding(self.dims, atoms, kind if atoms else "")


class Mark(NamedTuple):
    """A user's mark on a value: the atoms of each dim; whether the dim may be split further (open).

    `reason` says where the mark is: `argument params/w_in`, `mark_sharding at train.py:12`.
    """

    dims: tuple[Axes, ...]
    open: tuple[bool, ...]
    reason: str


def replicated(rank: int) -> Sharding:
    """Returns the sharding of a value of `rank` dims of which every device has all."""
    return Sharding(((),) * rank)


def is_legal(sharding: Sharding, shape: Sequence[int], mesh: Mesh, *, even: bool = True) -> bool:
    """Whether it has the shape's rank, no atom twice, a kind iff partial; if `even`, no padding."""
    atoms = [a for axes in sharding.dims for a in axes] + list(sharding.partial)
    is_formed = len(sharding.dims) == len(shape) and len(set(atoms)) == len(atoms)
    if not is_formed or bool(sharding.partial) != bool(sharding.kind):
        return False
    return not even or all(
        size % mesh.extent(axes) == 0 for size, axes in zip(shape, sharding.dims, strict=True)
    )


# Tiles. A dim of size n split over the atoms a, b, ... is split atom by atom: over `a` into equal
# pieces of ceil(n / a), each of these over `b`, and so on. Where it divides that is the ordinary
# split. Where it does not, the last pieces of every level end in padding, whose content is
# undefined; a coarser piece is always the finer ones joined and cut to its own size, so that every
# reshard step stays local to its group.
#
#   5 elements over {a=2}: 0 1 2 | 3 4 .     then over {a=2, b=2}: 0 1 | 2 . | 3 4 | . .
#   flat pieces of ceil(5 / 4):                                    0 1 | 2 3 | 4 . | . .
#
# With the flat pieces the devices of a=0 would own 0 1 2 3, though over {a} they own 0 1 2: no
# gather over b alone could turn one into the other.


def piece_sizes(size: int, axes: Axes, mesh: Mesh) -> tuple[int, ...]:
    """Returns a dim's size, then its pieces' after each atom: 10, atoms of 2, 2 -> (10, 5, 3)."""
    atom_sizes = [mesh.atom_sizes[a] for a in axes]
    return tuple(accumulate(atom_sizes, lambda piece, atom: -(-piece // atom), initial=size))


def local_shape(shape: Sequence[int], sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape of one device's piece of a value of this shape, padding included."""
    sizes, pairs = mesh.atom_sizes, zip(shape, sharding.dims, strict=True)
    return tuple([reduce(lambda n, a: -(-n // sizes[a]), axes, size) for size, axes in pairs])


def tiles(size: int, axes: Axes, mesh: Mesh) -> list[tuple[int, int]]:
    """Returns (start, number of elements without padding) of each piece of a dim, in order.

    10 elements over two atoms of 2 are pieces of 3, padded: (0, 3), (3, 2), (5, 3), (8, 2).
    """
    # 10 over {2, 2}: pieces of 10, 5, 3 elements.
    #   (0, 10)  ->  (0, 5), (5, 5)  ->  (0, 3), (3, 2), (5, 3), (8, 2)
    found = [(0, size)]
    for piece, a in zip(piece_sizes(size, axes, mesh)[1:], axes, strict=True):
        steps = [digit * piece for digit in range(mesh.atom_sizes[a])]
        found = [(start + s, max(0, min(piece, own - s))) for start, own in found for s in steps]
    return found


def is_even(size: int, axes: Axes, mesh: Mesh) -> bool:
    """Whether a dim of `size` elements is split over `axes` without padding."""
    return size % mesh.extent(axes) == 0


# Text: `[{data}, {model, data:(2)2}] partial add {x}`.


class AxisRef(NamedTuple):
    """A whole axis (`whole`), or its part `name:(pre)size`: a part of size `pre` is before it."""

    name: str
    pre: int
    size: int
    whole: bool

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}:({self.pre}){self.size}"


def axis_refs(axes: Iterable[int], mesh: Mesh) -> tuple[AxisRef, ...]:
    """Returns atoms as whole axes and parts of axes; consecutive atoms of an axis are one part."""
    refs: list[AxisRef] = []
    for a in axes:
        atom = mesh.atoms[a]
        name = mesh.axis_names[atom.axis]
        last = refs[-1] if refs else None
        if last and last.name == name and last.pre * last.size == atom.pre:
            refs.pop()
            pre, size = last.pre, last.size * atom.size
        else:
            pre, size = atom.pre, atom.size
        refs.append(AxisRef(name, pre, size, size == mesh.sizes[atom.axis]))
    return tuple(refs)


def spec_text(sharding: Sharding, mesh: Mesh) -> str:
    """Returns a sharding as text: `("data", None) partial add over x`, `replicated` or `scalar`."""
    if not any(sharding.dims):
        text = "replicated" if sharding.dims else "scalar"
    else:
        names = [[f'"{ref}"' for ref in axis_refs(axes, mesh)] for axes in sharding.dims]
        joined = [n[0] if len(n) == 1 else f"({', '.join(n)})" if n else "None" for n in names]
        text = f"({', '.join(joined)}{',' * (len(joined) == 1)})"
    if sharding.partial:
        text += f" partial {sharding.kind} over {axes_text(sharding.partial, mesh)}"
    return text


def axes_text(axes: Iterable[int], mesh: Mesh) -> str:
    """Returns atoms as `format_axes` does, but without braces: `data, model:(2)2`."""
    return ", ".join(str(ref) for ref in axis_refs(axes, mesh))


def format_axes(axes: Axes, mesh: Mesh) -> str:
    """Returns atoms as the text of whole axes and parts of axes: `{data, model:(2)2}`."""
    return f"{{{axes_text(axes, mesh)}}}"


def format_sharding(sharding: Sharding, mesh: Mesh) -> str:
    """Returns a sharding as text: `[{data}, {}] partial add {model}`."""
    text = "[" + ", ".join(format_axes(axes, mesh) for axes in sharding.dims) + "]"
    if sharding.partial:
        text += f" partial {sharding.kind} {format_axes(sharding.partial, mesh)}"
    return text


def parse_axes(text: str, mesh: Mesh) -> Axes:
    """Returns the atoms of a text from `axes_text`; SpecError if it has no such axis or part."""
    atoms: list[int] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([^:]+)(?::\((\d+)\)(\d+))?", item)
        if match is None or match[1] not in mesh.axis_atoms:
            raise SpecError(f"{item!r} is not an axis of the mesh ({mesh})")
        whole = mesh.axis_atoms[match[1]]
        if match[2] is None:
            atoms += whole
            continue
        pre, size = int(match[2]), int(match[3])
        part = [a for a in whole if pre <= mesh.atoms[a].pre < pre * size]
        if not part or mesh.atoms[part[0]].pre != pre or mesh.extent(part) != size:
            raise SpecError(f"{item!r} is not a sub-axis of the mesh ({mesh})")
        atoms += part
    return tuple(atoms)


# Axes of one mesh in the atoms of another that arranges the same devices otherwise.
#
# On (data=4, model=2), whose atoms are data:(1)2, data:(2)2 and model:
#
#     (x=2, y=4)                 x is data:(1)2, y is data:(2)2 and model
#     (all=8)                    all is data and model
#     (m=2, d=4), transposed     m is model, d is data; its devices are 0 2 4 6 1 3 5 7
#     (x=8), ids 0 2 1 3 ...     x is data:(1)2, model and data:(2)2
#
# Meshes whose axes have no common parts, such as (a=2, b=3) and (x=3, y=2), have no such form.


@lru_cache(maxsize=1024)
def part_atoms(mesh: Mesh, other: Mesh, name: str, pre: int = 1, size: int = 0) -> Axes:
    """Returns the atoms of `mesh` that split devices as axis `name` of the mesh `other` does.

    With `pre` and `size`: as the part `name:(pre)size` of it. MeshError if there is no such part,
    the meshes are of different devices, or no atoms of `mesh` split them so.
    """
    if set(mesh.device_ids) != set(other.device_ids):
        raise MeshError(
            "two different meshes in one program: they are not over the same devices",
            actual=f"the mesh {_described(other)}",
            required=f"the devices of the mesh {_described(mesh)}",
            fix="make all meshes of a program of the devices that it is compiled for; export a "
            "function that it calls for as many, or for one device, without shardings",
        )
    whole = other.shape[name]
    size = size or whole
    if whole % (pre * size):
        raise MeshError(f"axis {name!r} of the mesh ({other}) has no part :({pre}){size}")
    # The coordinate along the part for each device, in the order of `mesh`. Its most major digit
    # has to be the coordinate along some atom, the rest along others:
    #   (all=6) on (x=3, y=2)    0 1 2 3 4 5 = 2 * (0 0 1 1 2 2) + (0 1 0 1 0 1), which is x and y
    place = {device: position for position, device in enumerate(other.device_ids)}
    positions = np.array([place[device] for device in mesh.device_ids])
    axis = other.axis_names.index(name)
    stride = int(np.prod(other.sizes[axis + 1 :], dtype=np.int64)) * (whole // (pre * size))
    index = positions // stride % size
    own = [mesh.coordinates([a]) for a in range(len(mesh.atoms))]
    found: list[int] = []
    while size > 1:
        fits = (
            a
            for a, atom in enumerate(mesh.atoms)
            if size % atom.size == 0 and np.array_equal(index // (size // atom.size), own[a])
        )
        a = next(fits, None)
        if a is None:
            raise MeshError(
                f"two different meshes in one program: axis {name!r} of ({other}) is not made of "
                f"axes, or parts of axes, of ({mesh})",
                actual=f"the mesh {_described(other)}",
                required=f"axes along which devices lie as along those of the mesh "
                f"{_described(mesh)}",
                fix="mark and compile with one and the same mesh, or order axes and devices alike",
            )
        found.append(a)
        size //= mesh.atoms[a].size
        index = index % size
    return tuple(found)


def _described(mesh: Mesh) -> str:
    """Returns `(x=2) of 2 devices`, or `(x=2) with the devices 3, 2` (16 at most) if not 0, 1."""
    if mesh.device_ids == tuple(range(mesh.size)):
        return f"({mesh}) of {mesh.size} devices"
    more = ", ..." if mesh.size > 16 else ""
    return f"({mesh}) with the devices {', '.join(map(str, mesh.device_ids[:16]))}{more}"

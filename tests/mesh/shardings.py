"""Shardings from their text form, and where the pieces that they make begin."""

import random
import re
from collections.abc import Sequence

from spmd.errors import SpecError
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, parse_axes, tiles


def parse_sharding(text: str, mesh: Mesh) -> Sharding:
    """Reads what `format_sharding` writes."""
    dims_text = r"\[((?:\{[^{}]*\}(?:, *(?=\{))?)*)\]"
    match = re.fullmatch(dims_text + r"(?: partial (\w+) \{([^{}]+)\})?", text.strip())
    if match is None:
        raise SpecError(f"{text!r} is not a sharding", fix="write it like [{data}, {}]")
    dims = tuple(parse_axes(part, mesh) for part in re.findall(r"\{(.*?)\}", match[1]))
    return Sharding(dims).with_partial(parse_axes(match[3] or "", mesh), match[2] or "")


def local_offset(
    shape: Sequence[int], sharding: Sharding, mesh: Mesh, position: int
) -> tuple[int, ...]:
    """Where the piece of the device at `position` (row-major in the mesh) starts, for each dim."""
    return tuple(
        tiles(size, axes, mesh)[mesh.coordinate(position, axes)][0]
        for size, axes in zip(shape, sharding.dims, strict=True)
    )


def random_sharding(rng: random.Random, mesh: Mesh, rank: int, partial: float) -> Sharding:
    """Each axis is partial with some probability, and splits nothing with a fifth."""
    atoms = list(range(len(mesh.atoms)))
    rng.shuffle(atoms)
    dims: list[tuple[int, ...]] = [()] * rank
    owed = []
    for a in atoms:
        choice = rng.random()
        if choice < partial:
            owed.append(a)
        elif choice < 0.8:
            dims[rng.randrange(rank)] += (a,)
    return Sharding(tuple(dims)).with_partial(owed, "add")

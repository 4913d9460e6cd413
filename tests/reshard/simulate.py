"""Runs a path of reshard steps on numpy tiles, one per device, by exchanges within groups only.

Every device starts with its tile (or its term of the tile, where the value is partial), each step
may look only at the buffers of the devices in its replica group, and the result is compared with
the tiles that the final sharding prescribes.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, local_shape
from spmd.reshard.paths import Path, PathStep, permute_pairs
from tests.mesh.shardings import local_offset

Array = np.ndarray[Any, Any]

COMBINE: dict[str, Any] = {
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
"""Reduction kind -> the numpy function that combines two terms."""


def mesh_of(*sizes: int, dcn: tuple[int, ...] = ()) -> Mesh:
    """A mesh of no devices, its axes called x, y, z and w."""
    return Mesh(None, sizes, "xyzw"[: len(sizes)], dcn)


def terms(shape: Sequence[int], sharding: Sharding, mesh: Mesh, seed: int = 0) -> list[Array]:
    """Global terms of a value, one for each coordinate along the partial atoms."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(1, 1000, shape, dtype=np.int64) for _ in range(mesh.extent(sharding.partial))
    ]


def tiles(values: Sequence[Array], sharding: Sharding, mesh: Mesh) -> list[Array]:
    """What each device holds: its tile of the term at its coordinate along the partial atoms."""
    held = []
    for position in range(mesh.size):
        value = values[mesh.coordinate(position, sharding.partial)]
        starts = local_offset(value.shape, sharding, mesh, position)
        sizes = local_shape(value.shape, sharding, mesh)
        window = tuple(
            slice(start, start + size) for start, size in zip(starts, sizes, strict=True)
        )
        held.append(value[window])
    return held


def reduced(
    values: Sequence[Array], src: Sharding, partial: Sequence[int], mesh: Mesh
) -> list[Array]:
    """The terms that are left when only the atoms `partial` are still owed."""
    sums: dict[int, Array] = {}
    seen: set[int] = set()
    for position in range(mesh.size):
        term = mesh.coordinate(position, src.partial)
        if term in seen:
            continue
        seen.add(term)
        left = mesh.coordinate(position, partial)
        value = values[term]
        sums[left] = COMBINE[src.kind](sums[left], value) if left in sums else value
    return [sums[i] for i in range(len(sums))]


def run_step(step: PathStep, held: Sequence[Array], mesh: Mesh) -> list[Array]:
    if step.kind == "slice":
        return [_part(held[p], step, mesh.coordinate(p, step.axes), mesh) for p in range(mesh.size)]
    if step.kind == "collective_permute":
        return _permute(step, held, mesh)
    if step.kind == "mask":
        return [held[p] * (mesh.coordinate(p, step.axes) == 0) for p in range(mesh.size)]
    after: list[Array] = [np.empty(0)] * mesh.size
    for group in mesh.groups(step.axes):
        buffers = [held[p] for p in group]
        for rank, position in enumerate(group):
            after[position] = _exchange(step, buffers, rank, mesh)
    return after


def _exchange(step: PathStep, buffers: list[Array], rank: int, mesh: Mesh) -> Array:
    """What the device at `rank` of a group gets from the group's buffers."""
    if step.kind == "all_gather":
        return np.concatenate(buffers, axis=step.dims[0])
    if step.kind == "all_to_all":
        concat, split = step.dims
        return np.concatenate([np.split(b, len(buffers), split)[rank] for b in buffers], concat)
    total: Array = reduce(COMBINE[step.before.kind], buffers)
    return total if step.kind == "all_reduce" else _part(total, step, rank, mesh)


def _part(value: Array, step: PathStep, index: int, mesh: Mesh) -> Array:
    return np.split(value, mesh.extent(step.axes), step.dims[0])[index]


def _permute(step: PathStep, held: Sequence[Array], mesh: Mesh) -> list[Array]:
    group_of = {p: i for i, group in enumerate(mesh.groups(step.axes)) for p in group}
    pairs = permute_pairs(step.before, step.after, mesh)
    assert sorted(source for source, _ in pairs) == list(range(mesh.size))
    assert sorted(target for _, target in pairs) == list(range(mesh.size))
    assert all(group_of[source] == group_of[target] for source, target in pairs)
    source_of = {target: source for source, target in pairs}
    return [held[source_of[p]] for p in range(mesh.size)]


def check(path: Path, src: Sharding, dst: Sharding, shape: Sequence[int], mesh: Mesh) -> None:
    """Asserts that a path takes every device's tile of `src` to its tile of `dst`.

    What becomes partial on the way may be split in any way that adds up.
    """
    values = terms(shape, src, mesh)
    held, here = tiles(values, src, mesh), src
    for step in path.steps:
        assert step.before == here
        held, here = run_step(step, held, mesh), step.after
        assert {tile.shape for tile in held} == {local_shape(shape, here, mesh)}, step
    assert here == dst
    kept = dst.with_partial([a for a in dst.partial if a in src.partial], dst.kind)
    wanted = tiles(reduced(values, src, kept.partial, mesh) if src.partial else values, kept, mesh)
    for group in mesh.groups([a for a in dst.partial if a not in src.partial]):
        total = reduce(np.add, [held[p] for p in group])
        np.testing.assert_array_equal(total, wanted[group[0]], err_msg=f"{src} {dst} {path}")

"""Axes of one mesh in the atoms of another."""

import math
from collections.abc import Iterable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd
from spmd.errors import MeshError
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import part_atoms
from spmd.mesh.topology import Topology

MESH = Mesh(None, (4, 2), ("data", "model"))


def axis_atoms_of(mesh: Mesh, other: Mesh) -> dict[str, tuple[int, ...]]:
    """The atoms of a mesh that each axis of another one consists of."""
    return {name: part_atoms(mesh, other, name) for name in other.axis_names}


def test_parts_and_what_is_none() -> None:
    assert part_atoms(Mesh(None, (3, 2), "xy"), Mesh(None, (6,), "a"), "a", 1, 3) == (0,)
    assert part_atoms(MESH, Mesh(None, (8,), ("a",)), "a", 2, 2) == (1,)
    with pytest.raises(spmd.MeshError, match=r"'a' of the mesh \(a=8\) has no part :\(2\)8"):
        part_atoms(MESH, Mesh(None, (8,), ("a",)), "a", 2, 8)


def joined(ids: np.ndarray[Any, Any], cuts: Iterable[int]) -> Mesh:
    """A mesh whose axes are the dims between two cuts; there may be none between them."""
    sizes = [math.prod(part) for part in np.split(ids.shape, sorted(cuts))]
    return Mesh(ids.flatten(), sizes, "stuvwxyz"[: len(sizes)])


CUTS = st.lists(st.integers(0, 3), max_size=3)


@given(st.permutations(range(10, 22)), st.permutations([2, 3, 2]), st.permutations(range(3)),
       CUTS, CUTS)  # fmt: skip
def test_a_dim_has_the_same_pieces_on_the_same_devices(
    devices: list[int], sizes: list[int], order: list[int], cuts: list[int], others: list[int]
) -> None:
    ids = np.array(devices).reshape(sizes)
    mesh = joined(ids, cuts + [i for i in (1, 2) if sizes[i - 1] > sizes[i]])  # 6 has atoms 2, 3
    other = joined(ids.transpose(order), others)
    for names in permutations(other.axis_names, min(2, len(other.axis_names))):
        atoms = tuple(a for name in names for a in axis_atoms_of(mesh, other)[name])
        here = dict(zip(mesh.device_ids, mesh.coordinates(atoms), strict=True))
        there = other.coordinates(other.atoms_of(names))
        assert here == dict(zip(other.device_ids, there, strict=True))
        assert mesh.extent(atoms) == math.prod(other.shape[name] for name in names)


@pytest.mark.parametrize(
    ("mesh", "other", "message"),
    [
        (Mesh(None, (3, 2), "xy"), Mesh(None, (2, 3), "ab"), "axis 'a' of (a=2, b=3)"),
        (Mesh(None, (6,), "x"), Mesh(None, (3, 2), "ab"), "axis 'a' of (a=3, b=2)"),
        (MESH, Mesh(range(7, -1, -1), (8,), "r"), "the devices 7, 6, 5, 4, 3, 2, 1, 0"),
        (MESH, Mesh(None, (4,), "s"), "not over the same devices"),
        (MESH, Mesh(range(8, 16), (4, 2), "ab"), "not over the same devices"),
    ],
)
def test_meshes_without_common_parts_are_both_named(mesh: Mesh, other: Mesh, message: str) -> None:
    with pytest.raises(MeshError) as caught:
        axis_atoms_of(mesh, other)
    text = str(caught.value)
    assert "two different meshes in one program" in text
    assert message in text
    assert f"({mesh})" in text
    assert f"({other})" in text


def test_parts_cross_slices_where_their_axis_does() -> None:
    """Of data=6 over 3 slices both atoms do: neighbours along each are in two slices."""
    mesh, topology = Mesh(None, (6,), ("data",), (3,)), Topology("h200:6")
    assert topology.atom_links(mesh) == (topology.chip.dcn,) * 2
    assert topology.atom_links(mesh.refined()) == (topology.chip.dcn,) * 2

"""Axes of one mesh in the atoms of another."""

import math
from itertools import permutations

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


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (Mesh(None, (4, 2), ("x", "y")), {"x": (0, 1), "y": (2,)}),
        (Mesh(None, (2, 4), ("x", "y")), {"x": (0,), "y": (1, 2)}),
        (Mesh(None, (8,), ("all",)), {"all": (0, 1, 2)}),
        (Mesh(None, (2, 1, 2, 2), "abcd"), {"a": (0,), "b": (), "c": (1,), "d": (2,)}),
        (Mesh([0, 2, 4, 6, 1, 3, 5, 7], (2, 4), ("m", "d")), {"m": (2,), "d": (0, 1)}),
        (Mesh([0, 2, 1, 3, 4, 6, 5, 7], (8,), ("x",)), {"x": (0, 2, 1)}),
    ],
)
def test_axes_are_found_by_their_devices(other: Mesh, wanted: dict[str, tuple[int, ...]]) -> None:
    assert axis_atoms_of(MESH, other) == wanted


def test_sizes_of_several_primes_ids_and_a_part_that_is_none() -> None:
    both = Mesh(None, (3, 2), ("x", "y"))
    assert axis_atoms_of(both, Mesh(None, (6,), ("a",))) == {"a": (0, 1)}
    assert part_atoms(both, Mesh(None, (6,), ("a",)), "a", 1, 3) == (0,)
    assert part_atoms(MESH, Mesh(None, (8,), ("a",)), "a", 2, 2) == (1,)
    ids = [11, 13, 12, 10]
    mesh = Mesh(ids, (2, 2), ("a", "b"))
    assert axis_atoms_of(mesh, Mesh([11, 12, 13, 10], (2, 2), ("b", "a"))) == {"b": (1,), "a": (0,)}
    with pytest.raises(spmd.MeshError, match=r"'a' of the mesh \(a=8\) has no part :\(2\)8"):
        part_atoms(MESH, Mesh(None, (8,), ("a",)), "a", 2, 8)


@given(st.permutations([2, 3, 2]), st.permutations(range(3)))
def test_a_dim_has_the_same_pieces_on_the_same_devices(sizes: list[int], order: list[int]) -> None:
    mesh = Mesh(None, sizes, "abc")
    ids = np.arange(12).reshape(sizes).transpose(order)
    other = Mesh(ids, ids.shape, "xyz")
    for names in permutations("xyz", 2):
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

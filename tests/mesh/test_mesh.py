"""Meshes, atoms and replica groups."""

import math
import os
import pickle
import subprocess
import sys
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.errors import MeshError
from spmd.mesh.mesh import HybridMesh, Mesh, make_mesh, prime_factors

sizes_lists = st.lists(st.integers(1, 12), min_size=1, max_size=3)


def mesh_of(sizes: list[int]) -> Mesh:
    return Mesh(None, sizes, [f"a{i}" for i in range(len(sizes))])


@given(st.integers(1, 10_000))
def test_prime_factors_multiply_back(number: int):
    factors = prime_factors(number)
    assert math.prod(factors) == number
    assert list(factors) == sorted(factors)
    assert all(p > 1 and all(p % q for q in range(2, p)) for p in factors)


@given(sizes_lists)
def test_atoms_of_an_axis_multiply_to_its_size(sizes: list[int]):
    mesh = mesh_of(sizes)
    for name, size in mesh.shape.items():
        assert mesh.extent(mesh.axis_atoms[name]) == size
    assert mesh.extent(range(len(mesh.atoms))) == mesh.size


@given(sizes_lists)
def test_the_coordinate_along_all_atoms_is_the_position(sizes: list[int]):
    mesh = mesh_of(sizes)
    atoms = range(len(mesh.atoms))
    assert [mesh.coordinate(p, list(atoms)) for p in range(mesh.size)] == list(range(mesh.size))


@given(sizes_lists, st.randoms(use_true_random=False))
def test_groups_partition_the_mesh_in_order(sizes: list[int], rng):
    mesh = mesh_of(sizes)
    atoms = [a for a in range(len(mesh.atoms)) if rng.random() < 0.5]
    rng.shuffle(atoms)
    groups = mesh.groups(atoms)
    assert sorted(p for group in groups for p in group) == list(range(mesh.size))
    for group in groups:
        assert [mesh.coordinate(p, atoms) for p in group] == list(range(mesh.extent(atoms)))


def test_groups_of_whole_axes():
    mesh = Mesh(None, (2, 2), ("data", "model"))
    assert mesh.groups(mesh.atoms_of(["model"])) == ((0, 1), (2, 3))
    assert mesh.groups(mesh.atoms_of(["data"])) == ((0, 2), (1, 3))
    assert mesh.groups(mesh.atoms_of(["model", "data"])) == ((0, 2, 1, 3),)
    assert mesh.groups(()) == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize("sizes", [(4, 2), (2, 3, 2), (6, 4), (1, 5)])
def test_coordinates_are_those_of_every_device(sizes: tuple[int, ...]):
    mesh = Mesh(None, sizes, "xyz"[: len(sizes)])
    for atoms in permutations(range(len(mesh.atoms)), 2):
        each = [mesh.coordinate(position, atoms) for position in range(mesh.size)]
        assert mesh.coordinates(atoms).tolist() == each
        for group in mesh.groups(atoms):
            assert [each[position] for position in group] == list(range(mesh.extent(atoms)))


def test_a_mesh_from_another_process_is_equal_and_hashes_alike():
    mesh = Mesh(range(8), (4, 2), ("data", "model"))
    assert mesh.shape["data"] == 4
    code = (
        "import pickle, sys; from spmd.mesh.mesh import Mesh;"
        "sys.stdout.buffer.write(pickle.dumps(Mesh(range(8), (4, 2), ('data', 'model'))))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    other = pickle.loads(
        subprocess.run(
            [sys.executable, "-c", code], env=env, check=True, capture_output=True
        ).stdout
    )
    for same in (other, pickle.loads(pickle.dumps(mesh))):
        assert same == mesh
        assert hash(same) == hash(mesh)


def test_text_forms():
    mesh = Mesh(range(8), (4, 2), ("data", "model"))
    assert repr(mesh) == "Mesh(device_ids=range(0, 8), shape=(4, 2), axis_names=('data', 'model'))"
    assert str(mesh) == "data=4, model=2"
    assert eval(repr(mesh)) == mesh
    assert mesh == Mesh(None, (4, 2), ("data", "model")) and hash(mesh) == hash(eval(repr(mesh)))


@pytest.mark.parametrize(
    ("ids", "sizes", "names", "message"),
    [
        (None, (4, 2), ("data",), "one name for each axis"),
        (None, (4, 0), ("data", "model"), "size 0"),
        (None, (2, 2), ("data", "data"), "used twice"),
        (None, (2,), ("",), "non-empty"),
        (range(3), (2, 2), ("data", "model"), "needs 4 devices and 3"),
        ((0, 1, 1, 2), (2, 2), ("data", "model"), "device 1 appears twice"),
    ],
)
def test_impossible_meshes(ids, sizes: tuple[int, ...], names: tuple[str, ...], message: str):
    with pytest.raises(MeshError, match=message):
        Mesh(ids, sizes, names)


def test_make_mesh_over_visible_devices():
    mesh = make_mesh(data=2, model=2)
    assert mesh.shape == {"data": 2, "model": 2}
    assert len(set(mesh.device_ids)) == 4
    with pytest.raises(MeshError, match="needs 4096 devices"):
        make_mesh(data=4096)


def test_hybrid_meshes_put_the_network_major():
    mesh = HybridMesh(ici={"data": 2, "model": 2}, dcn={"data": 2})
    assert mesh.sizes == (4, 2) and mesh.dcn_sizes == (2, 1)
    assert len(set(mesh.device_ids)) == 8
    with pytest.raises(MeshError, match="'expert'"):
        HybridMesh(ici={"data": 2}, dcn={"expert": 2})
    with pytest.raises(MeshError, match="needs 512 devices"):
        HybridMesh(ici={"data": 256}, dcn={"data": 2})


def test_a_mesh_as_jax_makes_it(devices8: object) -> None:
    assert make_mesh((4, 2), ("data", "model")) == make_mesh(data=4, model=2)


@pytest.mark.parametrize("dcn", [(2,), (2, 1, 1), (3, 1)])
def test_slices_that_do_not_fit_the_axes(dcn: tuple[int, ...]) -> None:
    with pytest.raises(MeshError, match="does not say how much of each axis crosses slices"):
        Mesh(None, (4, 2), ("data", "model"), dcn)

"""Meshes, atoms and replica groups."""

import copy
import math
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import MeshError
from spmd.mesh.make import HybridMesh, make_mesh
from spmd.mesh.mesh import Mesh, prime_factors
from spmd.mesh.topology import Topology

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
def test_atoms_multiply_to_sizes_and_along_all_the_coordinate_is_the_position(sizes: list[int]):
    mesh = mesh_of(sizes)
    for name, size in mesh.shape.items():
        assert mesh.extent(mesh.axis_atoms[name]) == size
    assert mesh.extent(range(len(mesh.atoms))) == mesh.size
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
    assert sorted(groups, key=lambda group: group[0]) == list(groups)
    each = mesh.coordinates(atoms)
    for group in groups:
        assert [mesh.coordinate(p, atoms) for p in group] == list(range(mesh.extent(atoms)))
        assert [each[p] for p in group] == list(range(mesh.extent(atoms)))


@pytest.mark.thorough
def test_a_mesh_from_another_process_is_equal_and_hashes_alike():
    mesh = Mesh(range(8), (4, 2), ("data", "model"))
    assert mesh.shape["data"] == 4
    code = (
        "import pickle, sys; from spmd.mesh.mesh import Mesh;"
        "sys.stdout.buffer.write(pickle.dumps(Mesh(range(8), (4, 2), ('data', 'model'))))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, env=env, check=True, capture_output=True).stdout
    for same in map(pickle.loads, (other, pickle.dumps(mesh))):
        assert same == mesh
        assert hash(same) == hash(mesh)


def test_text_forms():
    mesh = Mesh(range(8), (4, 2), ("data", "model"))
    assert repr(mesh) == "Mesh(device_ids=range(0, 8), shape=(4, 2), axis_names=('data', 'model'))"
    assert str(mesh) == "data=4, model=2"
    assert eval(repr(mesh)) == mesh
    assert mesh == Mesh(None, (4, 2), ("data", "model")) and hash(mesh) == hash(eval(repr(mesh)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, (4, 2), ("data",)), "one name for each axis"),
        ((None, (4, 0), ("data", "model")), "size 0"),
        ((None, (2, 2), ("data", "data")), "used twice"),
        ((None, (2,), ("",)), "non-empty"),
        ((range(3), (2, 2), ("data", "model")), "needs 4 devices and 3"),
        (((0, 1, 1, 2), (2, 2), ("data", "model")), "device 1 appears twice"),
        *(
            ((None, (4, 2), ("data", "model"), dcn), "not say how much of each axis crosses slices")
            for dcn in ((2,), (2, 1, 1), (3, 1), (0, 1), (-2, 1))
        ),
    ],
)
def test_impossible_meshes(given: tuple[Any, ...], message: str):
    with pytest.raises(MeshError, match=message):
        Mesh(*given)


def test_make_mesh_over_visible_devices_and_with_the_network_major(devices8: object):
    assert make_mesh((4, 2), ("data", "model")) == make_mesh(data=4, model=2)
    mesh = make_mesh(data=2, model=2)
    assert mesh.shape == {"data": 2, "model": 2}
    assert len(set(mesh.device_ids)) == 4
    with pytest.raises(MeshError, match="needs 4096 devices"):
        make_mesh(data=4096)
    mesh = HybridMesh(ici={"data": 2, "model": 2}, dcn={"data": 2})
    assert mesh.sizes == (4, 2) and mesh.dcn_sizes == (2, 1)
    assert len(set(mesh.device_ids)) == 8
    with pytest.raises(MeshError, match="'expert'"):
        HybridMesh(ici={"data": 2}, dcn={"expert": 2})
    with pytest.raises(MeshError, match="needs 512 devices"):
        HybridMesh(ici={"data": 256}, dcn={"data": 2})


def test_a_mesh_of_a_machine_that_is_not_here():
    mesh = make_mesh(data=32, model=4, topology="v5p-256")
    assert mesh == make_mesh((32, 4), ("data", "model"), topology=Topology("v5p:4x4x8"))
    assert mesh != Mesh(None, (32, 4), ("data", "model")) and not mesh.is_here
    assert mesh.topology == Topology("v5p:4x4x8") == mesh.refined().topology
    assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh
    slices = HybridMesh({"data": 32, "model": 4}, {"data": 2}, topology="v5p-256")
    assert slices.sizes == (64, 4) and slices.dcn_sizes == (2, 1)
    assert slices.topology == mesh.topology
    # On the machine at hand it is a mesh like any other.
    assert make_mesh(data=4, model=2, topology="cpu:8").is_here
    assert not make_mesh(data=4, model=2, topology="v5e-8").is_here
    assert make_mesh(data=32, model=4, topology="h200:128").size == 128  # as errors advise


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({}, r'topology="h200:128", or a slice of TPUs, as v5p-256;.*device_count=128 before'),
        ({"devices": range(128)}, r'pass topology="h200:128".* spmd.Mesh\(ids, \(32, 4\), \('),
        ({"devices": Topology("v5p:4x4x8")}, 'pass topology="h200:128"'),
        ({"devices": "v5p-256"}, 'pass topology="h200:128"'),
        ({"devices": []}, "make the mesh smaller"),
        ({"topology": "v5p-128"}, "change the axes or the topology"),
        ({"topology": "v5p-256", "devices": []}, "give one of them"),
        ({"topology": 128}, 'write topology="v5e:4x4"'),
        ({"topology": "v5p-100"}, "use one of these"),
    ],
)
def test_meshes_of_devices_that_are_not_here(options: dict[str, Any], fix: str):
    with pytest.raises(MeshError) as caught:
        make_mesh(data=32, model=4, **options)
    assert caught.value.fix and re.search(fix, caught.value.fix)


def test_jax_takes_a_mesh(devices8: object):
    mesh, x = make_mesh(data=4, model=2), np.ones((8, 16), np.float32)
    own = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    for name in ("axis_sizes", "axis_types", "shape_tuple", "empty", "local_devices", "size"):
        assert getattr(mesh, name) == getattr(own, name), name
    assert mesh.abstract_mesh == own.abstract_mesh
    split = NamedSharding(mesh, P("data"))
    placed = jax.device_put(x, split)
    assert placed.sharding.is_equivalent_to(NamedSharding(own, P("data")), 2)
    double = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, split))
    assert double(x).sharding == split
    with jax.set_mesh(mesh):
        constrained = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, P("data", "model")))
        assert constrained(placed).sharding.spec == P("data", "model")
        summed = jax.shard_map(lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P())
        np.testing.assert_array_equal(summed(placed), 4 * x[:2])


def test_jax_says_what_a_mesh_without_devices_lacks():
    mesh = make_mesh(data=32, model=4, topology="v5p-256")
    struct = jax.ShapeDtypeStruct((64, 4), np.float32, sharding=NamedSharding(mesh, P("data")))
    assert jax.eval_shape(lambda x: x.sum(0), struct).shape == (4,)
    with pytest.raises(MeshError, match=r"v5p:4x4x8, which is not visible here\n.*\n.*\n.*lower"):
        jax.jit(lambda x: x.sum(0)).lower(struct)

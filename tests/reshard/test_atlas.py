"""Tables of reshards between whole axes: the figures of the paths that are taken, which deliver."""

import math
import random
from itertools import combinations, product

import numpy as np
import pytest

from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.topology import Topology
from spmd.planning.problem import every_state
from spmd.reshard.paths import can_reshard, reshard, reshard_seconds
from tests.reshard.simulate import check, mesh_of
from tests.reshard.test_pairs import askable, planned


def states_of(type_: TensorType, mesh: Mesh, kind: str = "add") -> list[Sharding]:
    """Every way to split a value over whole axes, and to be partial over some of the others."""
    found = []
    axes = list(mesh.axis_atoms.values())
    for state in every_state(type_, mesh):
        for count in range(len(axes) + 1):
            for owed in combinations(axes, count):
                atoms = [a for axis in owed for a in axis]
                if state.used.isdisjoint(atoms):
                    found.append(state.with_partial(atoms, kind))
    return found


@pytest.mark.parametrize("kind", ["add", "max", "mul"])
@pytest.mark.parametrize(
    ("sizes", "chips", "shape", "held"),
    [
        ((2, 2, 2), "a100:8", (64, 64), ()),
        ((2, 2, 2), "h200:8", (4, 2**16, 2), (1,)),
        ((8, 2, 4), "v5p:4x4x4", (2**12, 8, 2**9), ()),
        ((4, 2, 8), "h200:64", (2**12, 2**9), ()),
        ((8, 2, 4), "v5p:4x4x4", (2**9, 10), (3,)),
    ],
)
def test_a_table_has_the_seconds_of_the_paths(
    sizes: tuple[int, ...], chips: str, shape: tuple[int, ...], held: tuple[int, ...], kind: str
):
    mesh, topology, type_ = mesh_of(*sizes), Topology(chips), TensorType(shape, "bf16")
    split = Sharding(((0,), *((),) * (len(shape) - 1)), (len(mesh.atoms) - 1,), kind)
    states = [*states_of(type_, mesh, kind), split]
    table = reshard_seconds(states, states, type_, mesh, topology, held)
    pairs = list(np.ndindex(table.shape))
    for i, j in random.Random(0).sample(pairs, min(len(pairs), 400)):
        src, dst = states[i], states[j]
        if not can_reshard(src, dst):
            assert math.isinf(table[i, j]) or split in (src, dst)
        elif not math.isnan(table[i, j]):
            assert table[i, j] == reshard(src, dst, type_, mesh, topology, held).seconds
        else:
            assert split in (src, dst) or held


def test_a_table_does_not_depend_on_what_was_asked_before():
    mesh, topology, type_ = mesh_of(4, 2, 4), Topology("v4:4x4x2"), TensorType((256, 512), "f32")
    states = states_of(type_, mesh)
    one_by_one = [reshard_seconds([s], states, type_, mesh, topology)[0] for s in states]
    assert np.array_equal(reshard_seconds(states, states, type_, mesh, topology), one_by_one)


@pytest.mark.parametrize("chips", ["v5p:4x4x2", "h200:32"])
def test_paths_between_whole_axes_deliver_within_memory(chips: str):
    mesh, topology = mesh_of(4, 2, 4), Topology(chips)
    type_, large = TensorType((32, 32, 8), "f32"), TensorType((2**12, 2**12, 2**9), "f32")
    for src, dst in random.Random(1).sample(list(askable(states_of(type_, mesh))), 60):
        planned(src, dst, large, mesh, topology)
        check(planned(src, dst, type_, mesh, topology), src, dst, type_.shape, mesh)


def test_steps_between_whole_axes_are_as_good_as_steps_of_parts():
    """The same devices with an axis for every atom: there the search moves parts of the axes."""
    whole, parts = mesh_of(4, 2, 4), Mesh(None, (2, 2, 2, 2, 2), tuple("vwxyz"))
    topology, type_ = Topology("a100:32"), TensorType((2**10, 2**12, 2**9), "bf16")
    states = [state for state in states_of(type_, whole) if not state.partial]
    excess = []
    for src, dst in random.Random(2).sample(list(product(states, states)), 60):
        seconds = [reshard(src, dst, type_, mesh, topology).seconds for mesh in (whole, parts)]
        excess.append(seconds[0] / seconds[1] - 1 if seconds[1] else 0.0)
    assert max(excess) < 0.5
    assert sum(excess) / len(excess) < 0.02

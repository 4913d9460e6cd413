"""Reshards are right (simulated), cheapest (against brute force), and never need more memory."""

import random
import time
from collections.abc import Iterator
from itertools import product

import pytest

from spmd.errors import LegalityError
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, is_legal, local_shape, parse_sharding
from spmd.mesh.topology import Topology
from spmd.planning.reshard import Path, permute_pairs, reshard
from tests.planning.oracle import Oracle, all_shardings
from tests.planning.simulate import COMBINE, check

H200 = Topology("h200:8")


def mesh_of(*sizes: int, dcn: tuple[int, ...] = ()) -> Mesh:
    return Mesh(None, sizes, "xyzw"[: len(sizes)], dcn)


def askable(nodes: list[Sharding]) -> Iterator[tuple[Sharding, Sharding]]:
    for src, dst in product(nodes, nodes):
        if set(dst.partial) <= set(src.partial):
            yield src, dst


def check_memory(path: Path, src: Sharding, dst: Sharding, type_: TensorType, mesh: Mesh) -> None:
    def held(sharding: Sharding) -> int:
        return TensorType(local_shape(type_.shape, sharding, mesh), type_.dtype).bytes

    limit = max(held(src), held(dst))
    for step in path.steps:
        assert is_legal(step.after, type_.shape, mesh), step
        assert max(held(step.before), held(step.after)) <= limit, (src, dst, step)


def check_optimal(oracle: Oracle, src: Sharding, dst: Sharding) -> Path:
    path = reshard(src, dst, oracle.type, oracle.mesh, oracle.topology)
    seconds, sent = oracle.distance(src, dst)
    assert path.seconds == pytest.approx(seconds, rel=1e-7, abs=1e-13), (src, dst, path)
    if path.seconds == pytest.approx(seconds, rel=1e-12, abs=1e-14):
        assert path.bytes >= 0 and sent >= 0
    check_memory(path, src, dst, oracle.type, oracle.mesh)
    return path


# Sizes where latency decides, where it is a trade, and where bytes decide; and dims that can only
# be split so far.
SHAPES_1 = [(16,), (2**16,), (2**26,)]
SHAPES_2 = [(16, 16), (256, 256), (2**13, 2**13), (2, 2**20), (4, 2)]


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES_1, *SHAPES_2], ids=str)
def test_every_pair_on_tiny_meshes_is_optimal(sizes: tuple[int, ...], shape: tuple[int, ...]):
    shape = tuple(size * 3 for size in shape) if 3 in sizes else shape
    mesh = mesh_of(*sizes)
    oracle = Oracle(TensorType(shape, "f32"), mesh, H200)
    for src, dst in askable(oracle.nodes):
        check_optimal(oracle, src, dst)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("shape", [(2**18,), (256, 256), (2**13, 2**13), (4, 2**18)], ids=str)
def test_sampled_pairs_on_eight_devices_are_optimal(
    sizes: tuple[int, ...], shape: tuple[int, ...]
):
    shape = tuple(size * 3 for size in shape) if 3 in sizes else shape
    oracle = Oracle(TensorType(shape, "f32"), mesh_of(*sizes), H200)
    pairs = list(askable(oracle.nodes))
    for src, dst in random.Random(0).sample(pairs, min(len(pairs), 300)):
        check_optimal(oracle, src, dst)

"""Reshards on larger meshes, by search and in reports; `test_pairs.py` looks at every small one."""

import random

import pytest

from spmd.errors import LegalityError
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, is_legal
from spmd.mesh.topology import Topology
from spmd.reshard.paths import reshard
from spmd.reshard.search import cheapest
from tests.mesh.shardings import parse_sharding, random_sharding
from tests.reshard.oracle import Oracle
from tests.reshard.simulate import COMBINE, check, mesh_of
from tests.reshard.test_pairs import askable, planned

A100 = Topology("a100:8")
MESH = Mesh(None, (4, 2), ("data", "model"))


def forget() -> None:
    reshard.cache_clear()
    cheapest.cache_clear()


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("side", [3 * 2**8, 3 * 2**11, 3 * 2**14])
def test_measured_figures_cost_little_of_the_optimum(sizes: tuple[int, ...], side: int):
    oracle = Oracle(TensorType((side, side), "f32"), mesh_of(*sizes), Topology("h200:8"))
    pairs = list(askable(oracle.nodes))
    for src, dst in random.Random(4).sample(pairs, min(len(pairs), 120)):
        path = planned(src, dst, oracle.type, oracle.mesh, oracle.topology)
        seconds, _ = oracle.distance(src, dst)
        assert path.seconds <= 1.2 * seconds + 1e-12, (src, dst, path)


@pytest.mark.parametrize("kind", COMBINE)
def test_every_kind_of_reduction_is_delivered(kind: str):
    src = Sharding(((0,), ()), (1, 2), kind)
    for dst in (Sharding(((0,), (1, 2))), Sharding(((), ())), Sharding(((2,), (0,)), (1,), kind)):
        check(reshard(src, dst, TensorType((8, 8), "i64"), MESH, A100), src, dst, (8, 8), MESH)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sizes", "chips"), [((4, 4), "a100:16"), ((2, 4, 6), "v5p:4x4x3"), ((4, 4, 8), "v4:4x4x8")]
)
def test_larger_meshes_are_delivered_within_memory(sizes: tuple[int, ...], chips: str):
    mesh, topology, rng = mesh_of(*sizes), Topology(chips), random.Random(3)
    type_ = TensorType((384, 384, 384), "f32")
    small = (384, 384) if mesh.size > 64 else (96, 96, 96)
    for _ in range(12):
        src = random_sharding(rng, mesh, 3, 0.2)
        dst = random_sharding(rng, mesh, 3, 0.0)
        planned(src, dst, type_, mesh, topology)
        src, dst = (Sharding(s.dims[: len(small)], s.partial, s.kind) for s in (src, dst))
        if all(is_legal(s, small, mesh) for s in (src, dst)):
            path = reshard(src, dst, TensorType(small, "i64"), mesh, topology)
            check(path, src, dst, small, mesh)


@pytest.mark.parametrize("chips", ["v4:4x4x1", "a100:16"])
@pytest.mark.parametrize(
    ("partial", "most", "mean"), [(False, 1.25, 0.1), (True, 1.25, 0.1), (True, 1e-9, 1e-9)]
)
def test_the_directed_search_is_close_to_optimal_and_the_other_is_optimal(
    chips: str, partial: bool, most: float, mean: float, monkeypatch: pytest.MonkeyPatch
):
    if most > 1:
        monkeypatch.setattr("spmd.reshard.search.is_small", lambda question: False)
    forget()
    type_, mesh = TensorType((2**12, 2**12), "f32"), mesh_of(4, 4)
    oracle = Oracle(type_, mesh, Topology(chips), partial)
    rng, excess = random.Random(4), []
    for _ in range(60):
        src = random_sharding(rng, mesh, 2, 0.2 if partial else 0.0)
        dst = random_sharding(rng, mesh, 2, 0.0)
        if src != dst:
            path = planned(src, dst, type_, mesh, oracle.topology)
            excess.append(path.seconds / max(oracle.distance(src, dst)[0], 1e-12) - 1)
    forget()
    assert max(excess) < most
    assert sum(max(x, 0) for x in excess) / len(excess) < mean


def test_paths_do_not_depend_on_what_was_asked_before():
    mesh, type_, rng = mesh_of(8, 4), TensorType((256, 256), "f32"), random.Random(6)
    pairs = [
        (random_sharding(rng, mesh, 2, 0.2), random_sharding(rng, mesh, 2, 0.0)) for _ in range(20)
    ]
    forward = [reshard(src, dst, type_, mesh, A100) for src, dst in pairs]
    forget()
    backward = [reshard(src, dst, type_, mesh, A100) for src, dst in reversed(pairs)]
    assert list(map(repr, forward)) == list(map(repr, backward[::-1]))


# Corners, and what is refused.


@pytest.mark.parametrize(
    ("sizes", "chips"),
    [((4, 2), "a100:8"), ((16, 4), "h200:64"), ((8, 2), "v4:2x2x4")],  # links: alike, of two speeds
)
def test_a_scalar_is_reduced(sizes: tuple[int, ...], chips: str):
    mesh = mesh_of(*sizes)
    src = Sharding((), tuple(range(len(mesh.atoms))), "add")
    path = planned(src, Sharding(()), TensorType((), "f32"), mesh, Topology(chips))
    assert {step.kind for step in path.steps} == {"all_reduce"}


def test_an_empty_tensor_goes_anywhere():
    src, dst = parse_sharding("[{data}, {}]", MESH), parse_sharding("[{}, {data}]", MESH)
    assert reshard(src, dst, TensorType((0, 8), "f32"), MESH, A100).bytes == 0


def test_a_dim_that_does_not_divide_stays_as_it_is():
    src, dst = parse_sharding("[{data}, {model}]", MESH), parse_sharding("[{data}, {}]", MESH)
    path = reshard(src, dst, TensorType((10, 8), "f32"), MESH, A100)
    assert [step.kind for step in path.steps] == ["all_gather"]
    assert path.bytes == 3 * 4 * 4  # three rows of ten, padded to twelve; half of eight columns


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("[{data}]", "[{}]", (8, 8)),
        ("[{}]", "[{}] partial mul {data}", (8,)),
        ("[{}] partial max {data}", "[{}] partial min {data}", (8,)),
        ("[{}] partial max {data}", "[{}] partial add {data:(1)2}", (8,)),
    ],
)
def test_what_cannot_be_asked_is_refused(src: str, dst: str, shape: tuple[int, ...]):
    with pytest.raises(LegalityError, match="no reshard"):
        reshard(
            parse_sharding(src, MESH),
            parse_sharding(dst, MESH),
            TensorType(shape, "f32"),
            MESH,
            A100,
        )

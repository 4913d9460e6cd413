"""Every pair of shardings of small meshes: delivered, cheapest, within memory, and executed.

Values of one to three dims, on meshes of up to three axes, sub-axes included; sources may be
partial, targets over a part of that, or over more (a mask). Where there are too many pairs a sample
is looked at; `-m heavy` looks at all of them.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, permutations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, is_legal, local_shape, replicated
from spmd.mesh.topology import Topology
from spmd.reshard.paths import Path, reshard, torn_dims
from spmd.reshard.search import EXACT_DIGITS, questions
from tests.reshard.oracle import Oracle, all_shardings
from tests.reshard.simulate import check, mesh_of

Pair = tuple[Sharding, Sharding]

A100 = Topology("a100:8")
SIZES = [(2, 2), (4, 2), (2, 2, 2), (8,), (3, 2)]
LONGER = (1, 2**8 + 1, 2**20 + 1)
"""Values are planned for as if their last dim were so many times longer (it divides by no more than
before): latency decides, it is a trade, and bytes decide."""


def shapes_of(mesh: Mesh, rank: int) -> list[tuple[int, ...]]:
    """Dims with room for every atom, and one with little: sizes that tiles can be simulated at."""
    full = 3 * mesh.size
    return list(dict.fromkeys([(full,) * rank, (2, *(full,) * (rank - 1))]))


def askable(nodes: Sequence[Sharding]) -> Iterator[Pair]:
    """The pairs whose target is partial over nothing that the source is not."""
    return (p for p in product(nodes, nodes) if set(p[1].partial) <= {*p[0].partial})


def planned(src: Sharding, dst: Sharding, type_: TensorType, mesh: Mesh, chip: Topology) -> Path:
    """The path, after a check that it stays within memory and divides."""
    path = reshard(src, dst, type_, mesh, chip)
    held = [
        TensorType(local_shape(type_.shape, s, mesh), type_.dtype).bytes
        for s in (src, *(step.after for step in path.steps))
    ]
    assert max(held) <= max(held[0], held[-1]), (src, dst, path)
    here = src
    for step in path.steps:
        assert step.before == here
        here = step.after
        assert is_legal(here, type_.shape, mesh), step
    assert here == dst
    return path


def sampled(pairs: Iterable[Pair], count: int | None) -> list[Pair]:
    """Some of the pairs, or all."""
    every = list(pairs)
    return every if count is None else random.Random(0).sample(every, min(count, len(every)))


def check_pairs(oracle: Oracle, shape: Sequence[int], count: int | None) -> None:
    """Cheapest at the oracle's size, and delivered at a size that can be simulated."""
    mesh, chip = oracle.mesh, oracle.topology
    for src, dst in sampled(askable(oracle.nodes), count):
        path = planned(src, dst, oracle.type, mesh, chip)
        seconds, _ = oracle.distance(src, dst)
        assert path.seconds == pytest.approx(seconds, rel=1e-9, abs=1e-13), (src, dst, path)
        check(path, src, dst, shape, mesh)


def check_mesh(mesh: Mesh, chip: Topology, rank: int, count: int | None) -> None:
    for shape in shapes_of(mesh, rank):
        for longer in LONGER:
            type_ = TensorType((*shape[:-1], shape[-1] * longer), "f32")
            check_pairs(Oracle(type_, mesh, chip), shape, count)


EVERY = pytest.param(None, marks=pytest.mark.heavy, id="every")


@pytest.mark.parametrize("count", [16, EVERY])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pairs_are_delivered_cheapest_and_within_memory(
    sizes: tuple[int, ...], rank: int, count: int | None
):
    check_mesh(mesh_of(*sizes), A100, rank, count)


UNEQUAL = [("v5e:2x2", (2, 1)), ("v5e:2x2", (1, 2)), ("v5e:2x4", ()), ("v4:2x2x2", ())]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rank", "count"),
    [(2, 30), *(pytest.param(r, None, marks=pytest.mark.heavy) for r in (1, 2, 3))],
)
@pytest.mark.parametrize(("chip", "dcn"), UNEQUAL, ids=str)
def test_pairs_over_unequal_links(chip: str, dcn: tuple[int, ...], rank: int, count: int | None):
    check_mesh(mesh_of(4, 2, dcn=dcn), Topology(chip), rank, count)


def masked(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[Pair]:
    """Pairs whose target is partial over what the source is not."""
    nodes = all_shardings(TensorType(shape, "f32"), mesh)
    for src, dst in product(nodes, nodes):
        if not set(dst.partial) <= set(src.partial):
            yield src, dst


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_becomes_partial_adds_up_to_the_value(sizes: tuple[int, ...], rank: int):
    mesh = mesh_of(*sizes)
    shape = shapes_of(mesh, rank)[0]
    for src, dst in sampled(masked(mesh, shape), 50):
        path = planned(src, dst, TensorType(shape, "f32"), mesh, A100)
        last = path.steps[-1]
        assert last.kind == "mask"
        assert set(last.axes) == set(dst.partial).difference(src.partial)
        assert (
            path.seconds > reshard(src, last.before, TensorType(shape, "f32"), mesh, A100).seconds
        )
        check(path, src, dst, shape, mesh)


# Dims that do not divide, and larger meshes.


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("shape", [(10,), (10, 10), (7, 12)], ids=str)
def test_no_permute_tears_a_padded_piece(sizes: tuple[int, ...], shape: tuple[int, ...]):
    mesh = mesh_of(*sizes)
    nodes = all_shardings(TensorType((36,) * len(shape), "f32"), mesh, partial=len(sizes) < 3)
    for src, dst in sampled(askable(nodes), 400):
        path = reshard(src, dst, TensorType(shape, "f32"), mesh, Topology("a100:12"))
        ends = [(step.before, step.after) for step in path.steps]
        assert all(a[1] == b[0] for a, b in pairwise(ends))
        assert not ends or (ends[0][0], ends[-1][1]) == (src, dst)
        assert not any(torn_dims(step, shape, mesh) for step in path.steps)


def named_pairs(mesh: Mesh, rank: int) -> Iterator[Pair]:
    """Whole axes on dims, at most one axis on each end partial."""
    axes = list(mesh.axis_atoms.values())
    for order in permutations(range(len(axes))):
        for homes in product(range(rank + 1), repeat=len(axes)):
            dims: list[tuple[int, ...]] = [()] * (rank + 1)
            for i in order:
                dims[homes[i]] += axes[i]
            src = Sharding(tuple(dims[:rank]))
            yield src.with_partial(dims[rank], "add"), replicated(rank)
            yield src, Sharding((*src.dims[1:], src.dims[0]))
            yield src.with_partial(dims[rank], "add"), Sharding((*src.dims[1:], src.dims[0]))


@pytest.mark.parametrize("chip", ["a100:4096", "v4:16x16x16"])
def test_paths_on_4096_devices_stay_within_memory(chip: str):
    large = mesh_of(64, 64)
    type_ = TensorType((2**14, 2**13), "f32")
    for src, dst in named_pairs(large, 2):
        planned(src, dst, type_, large, Topology(chip))


def test_twelve_atoms_ask_no_more_than_two():
    large, small = mesh_of(64, 64), mesh_of(2, 2)
    for many, few in zip(named_pairs(large, 2), named_pairs(small, 2), strict=True):
        counts = [
            len(next(questions(*pair, (2**14, 2**13), (), mesh, Topology("v4:16x16x16")))[0].digits)
            for mesh, pair in ((large, many), (small, few))
        ]
        assert counts[0] <= max(counts[1], EXACT_DIGITS)


# Questions: what does not matter is not in them.


def test_neither_what_stays_nor_names_are_part_of_the_question():
    mesh = mesh_of(2, 2, 2)
    src, dst = Sharding(((0, 1), ()), (2,), "add"), Sharding(((0,), (1,)), (2,), "add")
    question, names = next(questions(src, dst, (8, 8), (), mesh, A100))
    assert [digit.sizes for digit in question.digits] == [(2,)]
    assert (question.src, question.dst, question.partial) == (((), (0,)), ((0,), ()), ())
    assert names.digits == ((1,),)
    assert names.kept == ((0,), ())
    mesh, other = mesh_of(4, 2), mesh_of(2, 4)
    first, _ = next(
        questions(Sharding(((0, 1), (), ())), Sharding(((), (0, 1), ())), (8, 8, 1), (), mesh, A100)
    )
    second, _ = next(
        questions(Sharding(((), (1, 2))), Sharding(((1, 2), ())), (8, 8), (), other, A100)
    )
    assert first == second


# On devices.


def specs(mesh: spmd.Mesh, rank: int, count: int) -> list[tuple[Any, Any, tuple[str, ...]]]:
    """A sample of (spec at first, spec wanted, axes that are partial at first)."""
    rng = random.Random(rank)
    found = []
    for _ in range(count):
        ends = []
        owed: tuple[str, ...] = ()
        for end in range(2):
            dims: list[tuple[str, ...]] = [()] * rank
            for name in rng.sample(mesh.axis_names, len(mesh.axis_names)):
                home = rng.randrange(rank + 2)
                if home < rank:
                    dims[home] += (name,)
                elif home == rank and not end:
                    owed += (name,)
            ends.append(tuple(axes or None for axes in dims))
        found.append((ends[0], ends[1], owed))
    return found


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2), (8,), (3, 2)], ids=str)
def test_many_reshards_in_one_program(sizes: tuple[int, ...]):
    mesh = spmd.make_mesh(**dict(zip("xyz", sizes, strict=False)))
    cases = [case for rank in (1, 2, 3) for case in specs(mesh, rank, 6)]
    rng = np.random.default_rng(0)
    full = 2 * mesh.size
    args = [rng.integers(0, 9, (full,) * (len(src) + 1)).astype(np.float32) for src, _, _ in cases]

    def fn(*values: Any) -> list[jax.Array]:
        """Sums over a split dim are partial; the marks before and after say from where to where."""
        out = []
        for x, (src, dst, owed) in zip(values, cases, strict=True):
            x = spmd.mark_sharding(x, mesh, (owed or None, *src))
            out.append(spmd.mark_sharding(jnp.sum(x, axis=0), mesh, dst))
        return out

    step = spmd.jit(fn, mesh=mesh, options=spmd.Options(planner="greedy"))
    for got, x in zip(step(*args), args, strict=True):
        np.testing.assert_array_equal(np.asarray(got), x.sum(0))

"""Shardings: legality, local shapes and offsets, and the text form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.errors import SpecError
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, format_sharding, is_legal, local_shape, replicated
from tests.mesh.shardings import local_offset, parse_sharding, random_sharding

MESH = Mesh(None, (4, 6, 2), ("data", "model", "x"))
randoms = st.randoms(use_true_random=False)


@given(randoms, st.integers(0, 3))
def test_text_reads_back(rng, rank: int):
    sharding = random_sharding(rng, MESH, rank, 0.2 if rank else 1.0)
    assert parse_sharding(format_sharding(sharding, MESH), MESH) == sharding


@pytest.mark.parametrize(
    "text",
    [
        "", "{data}", "[{data]", "[{data} and {x}]", "[{nothing}]", "[{}] partial {x}",
        "[{}] partial add {}", "[{data:2}]", "[{data:(2)4}]", "[{data:(3)2}]", "[{model:(2)2}]",
    ],
)  # fmt: skip
def test_text_that_is_no_sharding(text: str):
    with pytest.raises(SpecError):
        parse_sharding(text, MESH)


def test_legality():
    data = MESH.atoms_of(["data"])
    assert is_legal(Sharding((data, ())), (8, 3), MESH)
    assert not is_legal(Sharding((data, ())), (6, 3), MESH)
    assert not is_legal(Sharding((data,)), (8, 3), MESH)
    assert not is_legal(Sharding((data, data)), (8, 8), MESH)
    assert not is_legal(Sharding((data, ()), data, "add"), (8, 8), MESH)
    assert not is_legal(Sharding(((), ()), data, ""), (8, 8), MESH)
    assert not is_legal(Sharding(((), ()), (), "add"), (8, 8), MESH)


@given(randoms)
def test_tiles_cover_the_value_equally_often(rng):
    sharding = random_sharding(rng, MESH, 2, 0.2)
    shape = (24, 48)
    if not is_legal(sharding, shape, MESH):
        return
    starts = [local_offset(shape, sharding, MESH, p) for p in range(MESH.size)]
    pieces = math.prod(MESH.extent(axes) for axes in sharding.dims)
    assert len(set(starts)) == pieces
    assert all(starts.count(start) == MESH.size // pieces for start in starts)
    assert math.prod(local_shape(shape, sharding, MESH)) * pieces == math.prod(shape)


def test_dims_that_do_not_divide_are_rounded_up_and_partial_atoms_come_and_go():
    sharding = parse_sharding("[{data}]", MESH)
    assert local_shape((10,), sharding, MESH) == (3,)
    # over {2, 2}: 5 and 5, each into 3 and 2: pieces start at 0, 3, 5, 8
    assert local_offset((10,), sharding, MESH, MESH.size - 1) == (8,)
    sharding = replicated(2).with_partial((2, 0, 0), "add")
    assert sharding == Sharding(((), ()), (0, 2), "add")
    assert sharding.used == {0, 2} and sharding.rank == 2
    assert sharding.full() == replicated(2) == sharding.with_partial((), "add")

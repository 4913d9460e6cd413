"""`fetch` and its plan, against numpy: every device gets what it needs, in few rounds."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.halo import Need, Window, exchange, reads_of
from spmd.ir.legality import check_program
from spmd.ir.program import Program
from spmd.ir.types import TensorType
from spmd.lowering.emit import emit_local
from spmd.lowering.execute import executable
from spmd.lowering.expand import expand
from spmd.lowering.local.dims import Split
from spmd.lowering.local.fetch import fetch
from spmd.lowering.partition import Partitioned
from spmd.mesh.sharding import Axes, Sharding, piece_sizes, tiles

MESHES = {
    "4x2": spmd.Mesh(None, (4, 2), ("data", "model")),
    "8": spmd.Mesh(None, (8,), ("data",)),
    "2x2x2": spmd.Mesh(None, (2, 2, 2), ("data", "model", "x")),
    "2x3": spmd.Mesh(None, (2, 3), ("data", "model")),
}
SPLITS = (
    ("4x2", ("data",)), ("4x2", ("model", "data")), ("8", ("data",)),
    ("2x2x2", ("x", "data")), ("2x3", ("model",)), ("2x3", ("model", "data")),
)  # fmt: skip


def windows(size: int) -> list[Window]:
    """The usual kinds of windows over a dim, then random ones."""
    usual = [
        Window(size), Window(size, reverse=True), Window(size, low=1, span=3),
        Window(size, low=-3), Window(size, low=size // 2), Window(2 * size, low=size),
        Window(-(-size // 2), stride=2, low=1, span=3), Window(max(2, size // 3), stride=3),
        Window(2 * size + 1, low=2, dilation=2, span=3), Window(size, low=size - 1, span=size),
        Window(5, low=100),
    ]  # fmt: skip
    rng = np.random.RandomState(size)
    for _ in range(9):
        tiled, stride, dilation, span = (int(n) for n in rng.randint(1, (2 * size, 4, 4, 6)))
        low = int(rng.randint(-size // 2, size // 2 + 1))
        usual.append(Window(tiled, stride, low, dilation, span, bool(rng.randint(2))))
    return usual


def wanted(x: np.ndarray[Any, Any], need: Need, fill: float) -> np.ndarray[Any, Any]:
    """What all devices get, one behind the other."""
    rows = []
    for start, low, high in zip(need.starts, need.lows, need.highs, strict=True):
        places = range(start, start + need.length)
        rows += [x[e] if low <= e < high else np.full_like(x[0], fill) for e in places]
    return np.stack(rows)


def tiles_of(x: np.ndarray[Any, Any], axes: Axes, mesh: spmd.Mesh) -> np.ndarray[Any, Any]:
    """All tiles of the first dim one behind the other, with NaN for padding."""
    piece = piece_sizes(len(x), axes, mesh)[-1]
    rows = np.full((mesh.extent(axes) * piece, *x.shape[1:]), np.nan, x.dtype)
    for i in range(mesh.extent(axes)):
        start, own = tiles(len(x), axes, mesh)[i]
        rows[i * piece : i * piece + own] = x[start : start + own]
    return rows


def fetching(size: int, axes: Axes, mesh: spmd.Mesh, needs: list[Need], fill: float | None) -> Any:
    """A function of the tiles that gives what each need asks for."""
    b = Builder()
    b.begin()
    x = b.value(TensorType((piece_sizes(size, axes, mesh)[-1], 2), "f32"))
    scalar = None if fill is None else b.constant(fill, "f32")
    outs = [fetch(b, x, Split(0, size, axes, mesh), need, axes, scalar) for need in needs]
    body = b.end([x], outs)
    names = tuple(f"result{i}" for i in range(len(outs)))
    program = Program("fetch", tuple(b.types), body, ("x",), names)
    split = Sharding((axes, ()))
    check_program(program, "local")
    local = Partitioned(expand(program, mesh), mesh, (split,), (split,) * len(outs))
    return executable(emit_local(local))


@pytest.mark.parametrize(
    ("name", "split", "size"),
    [(*split, size) for i, split in enumerate(SPLITS) for size in ((2, 21), (5, 16))[i % 2]],
)
def test_every_device_gets_what_it_needs(name: str, split: tuple[str, ...], size: int) -> None:
    mesh = MESHES[name]
    axes = mesh.atoms_of(split)
    needs = [reads_of(window, size, axes, mesh).need for window in windows(size)]
    x = np.random.RandomState(size).rand(size, 2).astype(np.float32)
    fill = None if zlib.crc32(f"{name}{split}{size}".encode()) % 2 else 7.0
    got = fetching(size, axes, mesh, needs, fill)(tiles_of(x, axes, mesh))
    for need, window, rows in zip(needs, windows(size), got, strict=True):
        np.testing.assert_array_equal(rows, wanted(x, need, fill or 0.0), err_msg=str(window))


@pytest.mark.parametrize("size", [3, 8, 21])
@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_reads_cover_what_windows_see(name: str, split: tuple[str, ...], size: int) -> None:
    """Every element that an own position of a tile sees is among those that its device gets."""
    mesh = MESHES[name]
    axes = mesh.atoms_of(split)
    for w in windows(size):
        reads = reads_of(w, size, axes, mesh)
        for i in range(mesh.extent(axes)):
            start, own = tiles(w.tiled, axes, mesh)[i]
            places = range(start, start + own)
            if w.reverse:
                places = range(w.tiled - start - own, w.tiled - start)
            base = {o * w.stride - w.low + k for o in places for k in range(w.span)}
            seen = {e for e in range(size) if e * w.dilation in base}
            low, high = reads.need.lows[i], reads.need.highs[i]
            assert seen <= set(range(low, high)), (w, i)
            start = reads.need.starts[i]
            assert low == high or start <= low < high <= start + reads.need.length, (w, i)


def rounds(window: Window, size: int, name: str = "8") -> Any:
    mesh = MESHES[name]
    axes = mesh.atoms_of(["data"])
    return exchange(reads_of(window, size, axes, mesh).need, size, axes, mesh)


def test_rounds_carry_no_more_than_the_halo_and_who_needs_everything_gathers() -> None:
    assert rounds(Window(64), 64).rounds == ()
    assert rounds(Window(64, low=1, span=3), 64).lengths == (1, 1)
    assert rounds(Window(64, low=9, span=10), 64).lengths == (1, 8)
    assert rounds(Window(64, low=-3), 64).lengths == (3,)
    assert rounds(Window(64, reverse=True), 64).lengths == (8,)
    assert rounds(Window(128, low=64), 64).lengths == (8, 8)
    assert rounds(Window(64, low=63, span=64), 64).gather
    assert not rounds(Window(64, low=20, span=21), 64).gather


# What the planner makes of it.

IMAGE = jax.ShapeDtypeStruct((8, 512, 512, 64), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)
MESH = MESHES["4x2"]
SPEC = (None, "data", None, None)


def conv(x: Any, k: Any) -> Any:
    return lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_a_large_image_exchanges_its_borders() -> None:
    spec = ("model", "data")
    compiled = spmd.jit(conv, mesh=MESH, in_specs=(spec, ()), out_specs=spec).compile(IMAGE, KERNEL)
    assert [c.kind for c in compiled.collectives] == ["collective_permute"] * 2
    for c in compiled.collectives:
        assert c.bytes == 8 // 2 * 1 * 512 * 64 * 4
        assert c.reason == "convolution reads its neighbours' pieces of dim 1 of operand 0"
        assert "test_fetch.py" in c.source
    assert compiled.out_shardings.spec[1] == "data"


def test_a_kernel_gradient_is_a_sum_of_pieces() -> None:
    def loss(x: Any, k: Any) -> Any:
        return (conv(x, k) ** 2).sum()

    step = spmd.jit(jax.grad(loss, 1), mesh=MESH, in_specs=(SPEC, None))
    kinds = [c.kind for c in step.compile(IMAGE, KERNEL).collectives]
    assert "all_gather" not in kinds
    assert kinds.count("all_reduce") + kinds.count("reduce_scatter") == 1
    assert kinds.count("collective_permute") <= 4


def test_running_totals_exchange_totals() -> None:
    x = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    spec = (None, "data")
    step = spmd.jit(lambda x: jnp.cumsum(x, 1), mesh=MESH, in_specs=(spec,), out_specs=spec)
    (gather,) = step.compile(x).collectives
    assert gather.kind == "all_gather"
    assert gather.bytes == 64 * 3 * 4


def test_updating_a_split_cache_moves_nothing() -> None:
    cache = jax.ShapeDtypeStruct((4096, 128), jnp.float32)
    row = jax.ShapeDtypeStruct((1, 128), jnp.float32)
    at = jax.ShapeDtypeStruct((), jnp.int32)
    update = lambda cache, row, at: lax.dynamic_update_slice(cache, row, (at, 0))  # noqa: E731
    step = spmd.jit(update, mesh=MESH, in_specs=(("data", None), None, None))
    compiled = step.compile(cache, row, at)
    assert compiled.collectives == ()
    assert compiled.out_shardings.spec[0] == "data"

"""Sums that travel while their product is computed: before -> after, in ops, bytes and values."""

# ruff: noqa: E501 (program texts)

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from benchmarks.hlo.collectives import hlo_collectives
from benchmarks.hlo.modelled import modelled
from spmd.ir.program import Program
from spmd.lowering.rewrites.ring import ring
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import CHIPS, DTYPES, Link, Topology
from spmd.predict.timeline import predict_timeline
from tests.compilers import needs_libtpu
from tests.ir.text_parse import parse_program
from tests.lowering.rewrites.local_programs import names, rewritten, sent

pytestmark = pytest.mark.exact_plans

ONE = Mesh(None, (8,), ("data",))
TWO = Mesh(None, (4, 2), ("data", "model"))
SLOW = dataclasses.replace(
    CHIPS["v5e"],
    flops=tuple((dtype, 1e6) for dtype in DTYPES),
    hbm_bandwidth=1e12,
    ici=Link(bandwidth=1e6, latency=0.0),
)
TPUS = Topology("v5e:2x4", chip=SLOW)
"""Products of a few rows take as long there as what is sent: even such sums travel."""


def after(text: str, mesh: Mesh, topology: Topology = TPUS) -> Program:
    return rewritten(lambda p: ring(p, mesh, topology), text, mesh)


def scattered(axes: str, dim: int, pieces: int, body: str = "add<f32>", more: str = "") -> str:
    """A product of 16 x 24, summed and scattered."""
    shape = [16, 24]
    shape[dim] //= pieces
    result = "x".join(map(str, shape))
    return f"""program @p(%0: tensor<3x5x16xf32> "x", %1: tensor<3x5x24xf32> "y") {{
      %2 = stablehlo.dot_general %0, %1 {{dot_dimension_numbers = dot(lhs_contract = [0, 1], rhs_contract = [0, 1])}} : (tensor<3x5x16xf32>, tensor<3x5x24xf32>) -> tensor<16x24xf32>
      %3 = stablehlo.reduce_scatter %2 {{axes = {{{axes}}}, body = {body}, scatter_dimension = {dim}}} : (tensor<16x24xf32>) -> tensor<{result}xf32>
      return %3 "z"{more}
    }}"""


@pytest.mark.parametrize(
    ("mesh", "axes", "pieces", "dim"),
    [(TWO, "data", 4, 0), (TWO, "model", 2, 1), (TWO, "model, data", 8, 0), (ONE, "data", 8, 1)],
)
def test_pieces_go_round(mesh: Mesh, axes: str, pieces: int, dim: int) -> None:
    text = scattered(axes, dim, pieces)
    program = after(text, mesh)
    found = names(program)
    assert found.count("dot_general") == pieces
    assert found.count("collective_permute") == pieces - 1
    assert "reduce_scatter" not in found
    assert sent(program, mesh) == sent(parse_program(text, mesh), mesh)
    notes = [op.loc.note for op in program.walk() if op.label == "collective_permute"]
    assert notes[0].endswith("from its device)")


def test_over_a_whole_slice_pieces_go_both_ways() -> None:
    """Half of the pieces go to the next device, the others to the last; none goes farther."""
    program = after(scattered("data", 0, 8), ONE)
    pairs = [op.kind.attrs["pairs"] for op in program.walk() if op.label == "collective_permute"]
    ahead = [all((a + 1) % 8 == c for a, c in found) for found in pairs]
    behind = [all((a - 1) % 8 == c for a, c in found) for found in pairs]
    assert (ahead.count(True), behind.count(True)) == (4, 3)
    # The same devices in an order in which neighbours are far from each other, and a part of them.
    for mesh, axes, pieces in ((TWO, "model, data", 8), (TWO, "data", 4)):
        found = after(scattered(axes, 0, pieces), mesh)
        sets = {op.kind.attrs["pairs"] for op in found.walk() if op.label == "collective_permute"}
        assert len(sets) == 1


@pytest.mark.parametrize(
    ("first", "other"), [("data:(1)2", "data:(2)4"), ("data:(1)4", "data:(4)2")]
)
def test_two_steps_are_one_sum(first: str, other: str) -> None:
    """Where they are along one dim, and nobody reads what is between them."""

    def two_steps(first: str, other: str, dim: int = 0, more: str = "") -> str:
        count, rest = int(first[-1]), int(other[-1])
        half = f"{16 // count}x24"
        result = f"{16 // count // rest}x24" if dim == 0 else f"{16 // count}x{24 // rest}"
        return f"""program @p(%0: tensor<3x5x16xf32> "x", %1: tensor<3x5x24xf32> "y") {{
          %2 = stablehlo.dot_general %0, %1 {{dot_dimension_numbers = dot(lhs_contract = [0, 1], rhs_contract = [0, 1])}} : (tensor<3x5x16xf32>, tensor<3x5x24xf32>) -> tensor<16x24xf32>
          %3 = stablehlo.reduce_scatter %2 {{axes = {{{first}}}, body = add<f32>, scatter_dimension = 0}} : (tensor<16x24xf32>) -> tensor<{half}xf32>
          %4 = stablehlo.reduce_scatter %3 {{axes = {{{other}}}, body = add<f32>, scatter_dimension = {dim}}} : (tensor<{half}xf32>) -> tensor<{result}xf32>
          return %4 "z"{more}
        }}"""

    found = names(after(two_steps(first, other), ONE))
    assert "reduce_scatter" not in found
    assert found.count("dot_general") == 8
    for apart in (two_steps(first, other, 1), two_steps(first, other, more=', %3 "w"')):
        assert "reduce_scatter" in names(after(apart, ONE))


def test_what_is_made_of_products_is_made_in_pieces() -> None:
    """A gradient's terms of several products, in a wider type and transposed, are one sum."""
    text = """program @p(%0: tensor<3x16xbf16> "x", %1: tensor<3x24xbf16> "y", %2: tensor<24x16xbf16> "z") {
      %3 = stablehlo.dot_general %0, %1 {dot_dimension_numbers = dot(lhs_contract = [0], rhs_contract = [0])} : (tensor<3x16xbf16>, tensor<3x24xbf16>) -> tensor<16x24xbf16>
      %4 = stablehlo.transpose %3 {permutation = [1, 0]} : (tensor<16x24xbf16>) -> tensor<24x16xbf16>
      %5 = stablehlo.add %4, %2 : (tensor<24x16xbf16>, tensor<24x16xbf16>) -> tensor<24x16xbf16>
      %6 = stablehlo.convert %5 : (tensor<24x16xbf16>) -> tensor<24x16xf32>
      %7 = stablehlo.reduce_scatter %6 {axes = {data}, body = add<f32>, scatter_dimension = 1} : (tensor<24x16xf32>) -> tensor<24x4xf32>
      return %7 "z"
    }"""
    found = names(after(text, TWO))
    assert "reduce_scatter" not in found
    assert found.count("dot_general") == found.count("transpose") == found.count("convert") == 4
    assert "reduce_scatter" in names(after(text.replace("%4, %2 :", "%2, %2 :"), TWO))


def test_other_sums_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    summed, read_twice = (scattered("data", 0, 4, more=more) for more in ("", ', %2 "w"'))
    most = scattered("data", 0, 4, "max<f32>")
    for text, machine in ((summed, "h200:8"), (summed, "v5e:2x4"), (most, ""), (read_twice, "")):
        topology = Topology(machine) if machine else TPUS
        assert "collective_permute" not in names(after(text, TWO, topology))
    monkeypatch.setattr("spmd.lowering.rewrites.ring.MOST_DEVICES", 2)
    assert "collective_permute" not in names(after(summed, TWO))


@pytest.mark.parametrize(("rows", "parts"), [(512, 15), (1 << 16, 0)])
def test_a_sum_stays_where_its_pieces_take_longer(rows: int, parts: int) -> None:
    """Of many rows it takes longer to cut pieces out of operands than to wait for the sum."""
    mesh, topology = Mesh(None, (16,), ("data",)), Topology("v5e:4x4")
    text = f"""program @p(%0: tensor<{rows}x8192xbf16> "x", %1: tensor<{rows}x8192xbf16> "y") {{
      %2 = stablehlo.dot_general %0, %1 {{dot_dimension_numbers = dot(lhs_contract = [0], rhs_contract = [0])}} : (tensor<{rows}x8192xbf16>, tensor<{rows}x8192xbf16>) -> tensor<8192x8192xbf16>
      %3 = stablehlo.reduce_scatter %2 {{axes = {{data}}, body = add<bf16>, scatter_dimension = 0}} : (tensor<8192x8192xbf16>) -> tensor<512x8192xbf16>
      return %3 "z"
    }}"""
    before = parse_program(text, mesh)
    taken_apart = ring(before, mesh, topology)
    assert names(taken_apart).count("collective_permute") == parts
    seconds = [predict_timeline(p, mesh, topology).seconds for p in (before, taken_apart)]
    assert seconds[1] <= seconds[0]


@pytest.mark.parametrize("slice_", ["v5p:2x2x4", "v5p:8x8x8"])
def test_travelling_sums_slow_no_step(slice_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights over all chips, the same rows on each: among many chips pieces are thin."""
    topology = Topology(slice_)
    mesh = Mesh(None, (topology.count,), ("data",))
    w = spmd.mark_sharding(jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16), mesh, ("data",))
    rows = jax.ShapeDtypeStruct((4096 * topology.count, 8192), jnp.bfloat16)
    x = spmd.mark_sharding(rows, mesh, ("data",))

    def lower() -> Any:
        return spmd.jit(step, mesh=mesh).lower(w, x, topology=topology)

    allowed = lower()
    permutes = [c for c in allowed.collectives if c.kind == "collective_permute"]
    assert bool(permutes) == (topology.count == 16)
    monkeypatch.setattr("spmd.compiler.ring", lambda program, *_: program)
    assert allowed.timeline.seconds <= lower().timeline.seconds


def step(w: Any, x: Any) -> Any:
    return w - jax.grad(lambda w: jnp.sum(jnp.square(x @ w)))(w)


def test_a_step_is_what_it_was() -> None:
    """From the marks to the devices."""
    mesh = spmd.make_mesh(data=8)
    rng = np.random.RandomState(0)
    w, x = (rng.randint(-3, 4, shape).astype(np.float32) for shape in ((256, 256), (8192, 256)))
    w_, x_ = (spmd.mark_sharding(v, mesh, ("data", None)) for v in (w, x))
    options = spmd.Options(topology=TPUS, check=True)
    jitted = spmd.jit(step, mesh=mesh, out_specs=("data", None), options=options)
    compiled = jitted.compile(w_, x_)
    assert [c.kind for c in compiled.collectives].count("collective_permute") == 7
    np.testing.assert_array_equal(np.asarray(jitted(w_, x_)), w - 2 * x.T @ (x @ w))


def product_and_rows(x: Any, y: Any) -> Any:
    """A kernel, as far as the compiler can tell: it calls a library."""
    unit = jnp.abs(jnp.linalg.qr(jnp.eye(2))[0][0, 0])
    return x.T @ y * unit, x.sum(1)


spmd.register_composite(
    "test.product_and_rows",
    "b i, b j -> i j, b",
    kinds={"b": "reduce"},
    reduction="add",
    kernels={"cpu": product_and_rows},
    flops=lambda kind: 1e9,
)


def test_a_kernel_that_makes_a_sum_stays_whole() -> None:
    """It takes the shapes that it was made for, and makes more than the sum."""
    mesh = spmd.make_mesh(data=8)
    x, y = (np.arange(64 * n, dtype=np.float32).reshape(64, n) % 5 for n in (16, 24))

    def step(x: Any, y: Any) -> Any:
        product, rows = jax.lax.composite(product_and_rows, "test.product_and_rows")(x, y)
        return spmd.mark_sharding(product, mesh, ("data", None)), rows

    options = spmd.Options(topology=TPUS, check=True)
    jitted = spmd.jit(step, mesh=mesh, in_specs=(("data", None),) * 2, options=options)
    assert "reduce_scatter" in [c.kind for c in jitted.compile(x, y).collectives]
    for got, want in zip(jitted(x, y), (x.T @ y, x.sum(1)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.thorough
@needs_libtpu
@pytest.mark.parametrize(
    ("sizes", "permutes"), [((4, 4), 3), pytest.param((16, 1), 15, marks=pytest.mark.heavy)]
)
def test_the_tpu_compiler_waits_for_no_permute(sizes: tuple[int, int], permutes: int) -> None:
    """Each is under way beside a product; what it makes of a reduce-scatter would be waited for."""
    mesh = spmd.Mesh(None, sizes, ("data", "model"))
    x, y = (jax.ShapeDtypeStruct((1 << 15, 8192), jnp.bfloat16) for _ in range(2))
    args = [spmd.mark_sharding(x, mesh, ("data",)), spmd.mark_sharding(y, mesh, ("data", "model"))]

    def step(x: Any, y: Any) -> Any:
        return spmd.mark_sharding(x.T @ y, mesh, ("data", "model"))

    text = spmd.jit(step, mesh=mesh).compile(*args, topology=Topology("v5e:4x4")).as_text("hlo")
    assert [c.kind for c in hlo_collectives(text)] == ["collective_permute"] * permutes
    schedule = modelled(text, mesh, Topology("v5e:4x4"))
    assert schedule.large == permutes and schedule.large_hidden >= permutes - 1

"""Manual regions: programs with `jax.shard_map`, partitioned, against plain `jax.jit`."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from benchmarks.hlo.collectives import hlo_collectives
from spmd.mesh.spec import jax_mesh
from spmd.options import Options
from tests.close import partitioned
from tests.ir.dialect.cases import random_spec
from tests.lowering.manual_programs import (
    BROADCAST,
    CHANNEL,
    EVEN_GROUPS,
    EVERYONE,
    IDS,
    NAMED,
    PROGRAMS,
    SEVERAL_OPERANDS,
    SUM,
    Manual,
    W,
    X,
    manual,
    region,
)
from tests.programs import sent_by_kind

MESHES: dict[str, dict[str, int]] = {
    "8": {"x": 8},
    "4x2": {"x": 4, "y": 2},
    "2x2x2": {"x": 2, "y": 2, "z": 2},
}
MESH = spmd.Mesh(None, (4, 2), ("x", "y"))
BY_USER = "written by the user in shard_map"

TOGETHER = 6
"""Programs that are run as one, each with specs of its own."""


def groups(programs: Sequence[Manual]) -> list[Any]:
    return [
        pytest.param(programs[i : i + TOGETHER], id=f"from {programs[i].name}")
        for i in range(0, len(programs), TOGETHER)
    ]


def named(name: str) -> Any:
    return next(p for p in PROGRAMS if p.name == name).make(jax_mesh(MESH))


def gradients(fn: Any) -> Any:
    def loss(x: Any, w: Any) -> Any:
        leaves = jax.tree.leaves(fn(x, w))
        return sum(jnp.sum(jnp.sin(y)) for y in leaves if jnp.issubdtype(y.dtype, jnp.floating))

    return jax.value_and_grad(loss, argnums=(0, 1))


def specs_for(name: str, mesh: spmd.Mesh) -> Any:
    """Both arguments split at random: not as the region needs them."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    return tuple(random_spec(rng, a.shape, mesh) for a in (X, W))


def tolerance(names: Collection[str]) -> float:
    """More where sums in another order are felt: one takes sines of large sums.

    Beside float64 we are off by 2e-5 there, plain jax.jit by 5e-5; how much depends on the CPU.
    """
    return 2e-4 if "inside_scan" in names else 2e-5


def assert_all_same(fns: Mapping[str, Any], mesh: spmd.Mesh, is_marked: bool) -> None:
    """The functions as one program, their arguments open, or split at random."""

    def all_of(given: Any) -> dict[str, Any]:
        return {name: fn(*given[name]) for name, fn in fns.items()}

    specs = ({name: specs_for(name, mesh) for name in fns},) if is_marked else None
    args = dict.fromkeys(fns, (X, W))
    partitioned(all_of, args, mesh=mesh, in_specs=specs, tolerance=tolerance(fns))


def on_meshes() -> list[Any]:
    """All programs on `4x2`, some on `8`; `test_gradients` has the values on 2x2x2, too."""
    some = PROGRAMS[::4]
    return [
        pytest.param(case.values[0], name, id=f"{case.id} on {name}", marks=marks)
        for name, programs, marks in (
            ("4x2", PROGRAMS, ()),
            ("8", some, ()),
            ("8", [p for p in PROGRAMS if p not in some], pytest.mark.heavy),
            ("2x2x2", PROGRAMS, pytest.mark.heavy),
        )
        for case in groups(programs)
    ]


@pytest.mark.parametrize(("programs", "mesh_name"), on_meshes())
def test_values(programs: Sequence[Manual], mesh_name: str) -> None:
    axes = MESHES[mesh_name]
    mesh = spmd.make_mesh(**axes)
    fns = {p.name: p.make(jax_mesh(mesh)) for p in programs if len(axes) >= p.axes}
    assert_all_same(fns, mesh, is_marked=mesh_name != "4x2")


@pytest.mark.parametrize("programs", groups([p for p in PROGRAMS if p.gradient]))
def test_gradients(programs: Sequence[Manual]) -> None:
    mesh = spmd.make_mesh(**MESHES["2x2x2"])
    fns = {p.name: gradients(p.make(jax_mesh(mesh))) for p in programs}
    assert_all_same(fns, mesh, is_marked=True)


def test_the_mesh_of_the_region_is_the_programs_with_its_order_of_devices() -> None:
    mesh = spmd.Mesh([5, 2, 7, 0, 3, 6, 1, 4], (4, 2), ("x", "y"))
    fn = next(p for p in PROGRAMS if p.name == "gather_in_another_order").make(jax_mesh(mesh))
    partitioned(fn, X, W, mesh=mesh)
    other = spmd.make_mesh(x=4, y=2)
    with pytest.raises(spmd.MeshError, match="devices in another order") as caught:
        spmd.jit(fn, mesh=other).lower(X, W)
    assert "pass the mesh of shard_map" in str(caught.value)
    fn = PROGRAMS[0].make(jax_mesh(MESH))
    assert spmd.jit(fn).lower(X, W).mesh == MESH
    with pytest.raises(spmd.MeshError, match="two different meshes") as caught:
        spmd.jit(fn, mesh=spmd.make_mesh(x=4)).lower(X, W)
    assert "test_manual.py" in str(caught.value)


@pytest.mark.parametrize("program", PROGRAMS[::4], ids=lambda program: program.name)
def test_the_region_may_have_another_mesh_of_the_same_devices(program: Manual) -> None:
    fn = program.make(jax_mesh(spmd.make_mesh(**MESHES["2x2x2"])))
    partitioned(fn, X, W, mesh=spmd.make_mesh(p=4, q=2), tolerance=tolerance([program.name]))


def test_explicit_axes_want_the_types_that_in_specs_say() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    fn = next(p for p in PROGRAMS if p.name == "all_axes").make(mesh)
    with pytest.raises(spmd.FrontendError, match="over Explicit axes") as caught:
        spmd.jit(fn, mesh=mesh).lower(X, W)
    assert "jax.sharding.reshard before" in str(caught.value)


# What is planned.


def test_nothing_moves_but_what_the_user_wrote() -> None:
    fn = manual(jax_mesh(MESH), lambda x, w: lax.psum(x @ w, "x"), (P("x", None), P()), P())
    specs: dict[str, Any] = {"in_specs": (("x", None), (None, "y")), "out_specs": (None, "y")}
    compiled = partitioned(fn, X, W, mesh=MESH, **specs)
    (record,) = compiled.collectives
    assert (record.kind, record.axes, record.reason) == ("all_reduce", ("x",), BY_USER)
    assert "test_manual.py" in record.source
    assert record.bytes == 2 * 3 * (16 // 4) * (8 // 2) * 4 // 4  # a ring over 4, y splits columns
    assert compiled.out_shardings.spec == P(None, "y")
    assert BY_USER in compiled.explain(prices=False)


def test_free_axes_split_the_inside() -> None:
    """A contraction over a free axis inside the region is summed over it, with the users' sum."""

    fn = manual(jax_mesh(MESH), lambda x, w: jnp.tanh(lax.psum(x @ w, "x")), (P("x"), P()), P())
    specs: dict[str, Any] = {"in_specs": (("x", "y"), ("y", None)), "out_specs": (None, None)}
    compiled = partitioned(fn, X, W, mesh=MESH, **specs)
    kinds = {(c.kind, c.axes) for c in compiled.collectives}
    assert ("all_reduce", ("x",)) in kinds
    assert "partial add {y}" in compiled.as_text("planned")


def test_reshards_inside_leave_manual_axes_alone() -> None:
    """Along `x` values differ: no step over the free axes may take it to help, however cheap."""
    mesh = spmd.make_mesh(x=2, y=2, z=2)

    def body(x: Any) -> Any:
        x = spmd.mark_sharding(jnp.sin(x), mesh, (("y", "z"), None))
        x = spmd.mark_sharding(x * 2, mesh, (None, ("z", "y")))
        return spmd.mark_sharding(x + 1, mesh, ("z", "y"))

    fn = manual(jax_mesh(mesh), body, P("x"), P("x"))
    compiled = spmd.jit(fn, mesh=mesh, options=Options(check=True)).compile(X)
    np.testing.assert_allclose(compiled(X), 2 * np.sin(X) + 1, rtol=1e-6)
    assert compiled.collectives
    assert all("x" not in c.axes for c in compiled.collectives)


def test_equal_ops_inside_and_outside_are_planned_apart() -> None:
    """The same op over `x` is split outside, and cannot be inside."""
    body = manual(jax_mesh(MESH), lambda w: jnp.sin(jnp.sin(w)) + lax.axis_index("x"), P(), P("x"))

    def fn(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.sin(spmd.mark_sharding(w, MESH, ("x",)))), body(w)

    partitioned(fn, X, W, mesh=MESH)


@pytest.mark.usefixtures("exact_plans")
def test_axes_that_name_groups() -> None:
    fn = named("groups")
    whole = (None, None)
    lowered = spmd.jit(fn, mesh=MESH, in_specs=(whole, whole)).lower(X, W)
    kinds = [(c.kind, c.axes) for c in lowered.collectives]
    assert kinds == [("all_gather", ("x",)), ("reduce_scatter", ("x",))]
    gathered, scattered = lowered.collectives
    # One of two members sends its own rows to the other; y splits the columns.
    assert gathered.bytes == 4 * 8 * 4 // 2
    assert scattered.bytes == gathered.bytes
    assert "groups = [[0, 6], [2, 4], [1, 7], [3, 5]]" in lowered.as_text("local")


def test_no_permute_waits_for_devices_that_went_another_way() -> None:
    """A convolution over a free axis, in a branch that half of the devices take."""
    x = (np.arange(8 * 4096) % 11).astype(np.float32).reshape(8, 1, 4096)
    kernel = jnp.ones((1, 1, 3), jnp.float32)

    def convolved(y: Any) -> Any:
        return lax.conv_general_dilated(y, kernel, (1,), "SAME") * 2

    def body(x: Any) -> Any:
        x = spmd.mark_sharding(x, MESH, (None, None, "y"))
        y = lax.cond(lax.axis_index("x") % 2 == 0, convolved, lambda y: y + 1, x)
        return spmd.mark_sharding(y, MESH, (None, None, "y"))

    fn = manual(jax_mesh(MESH), body, P("x"), P("x"))
    compiled = spmd.jit(fn, mesh=MESH, options=Options(check=True)).compile(x)
    kinds = {(c.kind, c.axes) for c in compiled.collectives}
    assert kinds == {("all_gather", ("y",))}
    want = np.where(np.arange(8).reshape(8, 1, 1) // 2 % 2 == 0, convolved(x), x + 1)
    np.testing.assert_allclose(compiled(x), want, rtol=1e-6)

    def always(x: Any) -> Any:
        return convolved(spmd.mark_sharding(x, MESH, (None, None, "y")))

    always_there = manual(jax_mesh(MESH), always, P("x"), P("x"))
    lowered = spmd.jit(always_there, mesh=MESH, out_specs=("x", None, "y")).lower(x)
    assert {c.kind for c in lowered.collectives} == {"collective_permute"}


def test_origins_name_the_region() -> None:
    fn = manual(jax_mesh(MESH), lambda x: x * 2, P("x"), P("x"))
    lowered = spmd.jit(lambda x: fn(x + 1), mesh=MESH).lower(X)
    assert "specs of shard_map at" in str(lowered.explain("x"))


@pytest.mark.parametrize("name", ["gathers", "scatters", "exchanges", "groups", "scan_inside"])
def test_xla_moves_the_bytes_that_are_listed(name: str) -> None:
    compiled = spmd.jit(named(name), mesh=MESH, in_specs=(("x", None), ())).compile(X, W)
    assert compiled.collectives
    assert sent_by_kind(compiled.collectives) == sent_by_kind(
        hlo_collectives(compiled.as_text("hlo"))
    )


# Modules.

A = np.arange(32, dtype=np.float32).reshape(8, 4)
BLOCKS = A.reshape(4, 2, 4)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (SEVERAL_OPERANDS, np.tile(2 * BLOCKS.sum(0), (4, 1))),
        (EVERYONE, np.tile(2 * BLOCKS.sum(0), (4, 1))),
        (IDS, (BLOCKS + np.arange(4).reshape(4, 1, 1)).reshape(8, 4)),
    ],
    ids=["several_operands", "everyone", "ids"],
)
def test_modules(text: str, want: Any) -> None:
    compiled = spmd.compile_stablehlo(text, MESH, options=Options(check=True))
    np.testing.assert_allclose(np.asarray(compiled(A)[0]), want)


def test_a_broadcast_is_kept_for_backends_that_have_it() -> None:
    lowered = lowered_module(BROADCAST)
    (record,) = lowered.collectives
    assert (record.kind, record.axes, record.reason) == ("collective_broadcast", ("x",), BY_USER)
    assert '"stablehlo.collective_broadcast"' in lowered.as_text("emitted")
    assert "dense<[[0, 2, 4, 6], [1, 3, 5, 7]]>" in lowered.as_text("emitted")


def lowered_module(text: str) -> Any:
    """A module's stages, checked, without XLA."""
    options = Options(topology=spmd.Topology("cpu:8"), check=True)
    return spmd.lower_stablehlo(text, spmd.make_mesh(x=4, y=2), options=options)


REFUSED = {
    "axes that are not manual": (
        f"""%r = "stablehlo.all_reduce"(%a) <{{{CHANNEL}, use_global_device_ids,
          replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7]]> : tensor<4x2xi64>}}> {SUM}
          : (tensor<2x4xf32>) -> tensor<2x4xf32>"""
    ),
    "between replicas": (
        f"""%r = "stablehlo.all_reduce"(%a) <{{{EVEN_GROUPS}}}> {SUM}
          : (tensor<2x4xf32>) -> tensor<2x4xf32>"""
    ),
    "differ in size": (
        f"""%r = "stablehlo.all_reduce"(%a) <{{{CHANNEL}, use_global_device_ids,
          replica_groups = dense<[[0, 2, 4], [6, -1, -1], [1, 3, 5], [7, -1, -1]]>
          : tensor<4x3xi64>}}> {SUM} : (tensor<2x4xf32>) -> tensor<2x4xf32>"""
    ),
    "not among the 8": (
        f"""%r = "stablehlo.collective_permute"(%a) <{{{CHANNEL},
          source_target_pairs = dense<[[0, 9]]> : tensor<1x2xi64>}}>
          : (tensor<2x4xf32>) -> tensor<2x4xf32>"""
    ),
}


@pytest.mark.parametrize("why", sorted(REFUSED))
def test_collectives_that_no_region_may_have(why: str) -> None:
    with pytest.raises(spmd.UnsupportedOpError, match=why) as caught:
        lowered_module(region(REFUSED[why]))
    assert "\n  fix: " in str(caught.value)


def test_named_computations_are_inlined_with_their_marks() -> None:
    compiled = spmd.compile_stablehlo(NAMED, MESH, options=Options(check=True))
    np.testing.assert_allclose(compiled(A)[0], -np.sin(A), rtol=1e-5)
    planned = compiled.as_text("planned")
    assert planned.count("spmd.mark") == 2
    assert "[{}, {y}]" in planned


# Marks inside, and checks.


def test_marks_inside_name_free_axes_only() -> None:
    fn = manual(jax_mesh(MESH), lambda x: spmd.mark_sharding(x, MESH, ("x", None)), P("x"), P("x"))
    with pytest.raises(spmd.SpecError, match=r"inside a jax\.shard_map over it") as caught:
        spmd.jit(fn, mesh=MESH).lower(X)
    assert "mark the other axes alone" in str(caught.value)

    whole = manual(jax_mesh(MESH), lambda x: spmd.mark_sharding(x, MESH, ()), P("x"), P("x"), True)
    np.testing.assert_array_equal(spmd.jit(whole, mesh=MESH)(X), X)


@pytest.mark.parametrize("name", ["nested", "inside_scan", "uneven", "groups"])
def test_verify_runs_the_whole_program_on_the_mesh(name: str) -> None:
    verification = spmd.jit(named(name), mesh=MESH).compile(X, W).verify(X, W)
    assert verification, str(verification)


def test_of_a_wrong_program_with_a_region_results_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from spmd.lowering.local import table as local

    step = manual(jax_mesh(MESH), lambda x: lax.psum(jnp.sin(x), "x"), P("x"), P())
    monkeypatch.setattr(local, "_LOCAL", {**local._LOCAL, "stablehlo.sine": lambda op: op.operands})
    found = spmd.jit(step, mesh=MESH, in_specs=(("x", "y"),)).compile(X).verify(X)
    assert not found
    assert found.culprit is None
    assert "jax.shard_map" in str(found)

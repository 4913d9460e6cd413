"""Collectives between hosts and within them: before -> after, in ops, slow bytes and values."""

# ruff: noqa: E501 (program texts)

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ir.program import Program
from spmd.lowering.rewrites.two_level import two_level
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from tests.ir.text_parse import parse_program
from tests.lowering.rewrites.local_programs import names, rewritten, sent

CPU = Topology("cpu:8")
HOSTS = Topology("cpu:8", chip=dataclasses.replace(CPU.chip, per_host=4))
"""Two hosts of four devices, by device ids."""

BOTH = Mesh(None, (8,), ("data",), (2,))
"""An axis whose major part crosses hosts, as `HybridMesh` makes it."""

APART = Mesh(None, (2, 4), ("host", "data"), (2, 1))


def after(text: str, mesh: Mesh = BOTH, topology: Topology = CPU) -> Program:
    return rewritten(lambda p: two_level(p, mesh, topology), text, mesh)


def all_reduce(axes: str, shape: str, body: str = "add<f32>") -> str:
    return f"""program @p(%0: tensor<{shape}xf32> "x") {{
      %1 = stablehlo.all_reduce %0 {{axes = {{{axes}}}, body = {body}}} : (tensor<{shape}xf32>) -> tensor<{shape}xf32>
      return %1 "y"
    }}"""


@pytest.mark.parametrize(
    ("mesh", "axes", "body"), [(BOTH, "data", "add<f32>"), (APART, "data, host", "max<f32>")]
)
def test_a_sum_crosses_hosts_scattered(mesh: Mesh, axes: str, body: str) -> None:
    program = after(all_reduce(axes, "3x8192", body), mesh)
    assert names(program) == ["reduce_scatter", "all_reduce", "all_gather"]
    assert sent(program, mesh, CPU) == 3 * 8192 * 4 // 4  # a quarter, there and back


def test_hosts_are_known_by_device_ids_too_and_sums_over_one_kind_of_link_stay() -> None:
    mesh = Mesh(None, (8,), ("data",))
    assert names(after(all_reduce("data", "8192"), mesh, CPU)) == ["all_reduce"]
    assert len(names(after(all_reduce("data", "8192"), mesh, HOSTS))) == 3
    for axes in ("data", "host"):
        assert names(after(all_reduce(axes, "8192"), APART)) == ["all_reduce"]


def test_a_sum_whose_dims_do_not_divide_is_padded() -> None:
    program = after(all_reduce("data", "3x8191"))
    assert [n for n in names(program) if "_" in n] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert sent(program, BOTH, CPU) == (3 * 8191 + 3) // 4 * 4


def test_a_sum_stays_outside_of_a_branch_that_some_devices_take() -> None:
    def sum_over(axis: str, made: int, read: int) -> str:
        return f"%{made} = stablehlo.all_reduce %{read} {{axes = {{{axis}}}, body = add<f32>}} : (tensor<8192xf32>) -> tensor<8192xf32>"

    def after_two(*lines: str) -> list[str]:
        # Not run: were the sums one, devices of one host would wait for those of the other.
        text = ['program @p(%0: tensor<8192xf32> "x") {', sum_over("host", 1, 0), *lines, "}"]
        return names(two_level(parse_program("\n".join(text), APART), APART, CPU))

    together = after_two(sum_over("data", 2, 1), 'return %2 "y"')
    assert together == ["reduce_scatter", "all_reduce", "all_gather"]
    apart = after_two(
        "%2 = spmd.axis_index {axes = {host}} : () -> tensor<i32>",
        "%3 = stablehlo.case %2 : (tensor<i32>) -> tensor<8192xf32> {",
        f"region() {{ {sum_over('data', 4, 1)} return %4 }}",
        "region() { return %0 }",
        "}",
        'return %3 "y"',
    )
    assert apart == ["all_reduce", "axis_index", "all_reduce", "case"]


def gather(axes: str, rows: int, dim: int) -> str:
    shape = [rows, 6]
    shape[dim] *= 8
    result = "x".join(map(str, shape))
    return f"""program @p(%0: tensor<{rows}x6xf32> "x") {{
      %1 = stablehlo.all_gather %0 {{all_gather_dim = {dim}, axes = {{{axes}}}}} : (tensor<{rows}x6xf32>) -> tensor<{result}xf32>
      return %1 "y"
    }}"""


def scatter(axes: str, rows: int, dim: int) -> str:
    shape = [rows, 16]
    shape[dim] //= 8
    result = "x".join(map(str, shape))
    return f"""program @p(%0: tensor<{rows}x16xf32> "x") {{
      %1 = stablehlo.reduce_scatter %0 {{axes = {{{axes}}}, body = add<f32>, scatter_dimension = {dim}}} : (tensor<{rows}x16xf32>) -> tensor<{result}xf32>
      return %1 "y"
    }}"""


@pytest.mark.parametrize(
    ("mesh", "axes", "dim"), [(BOTH, "data", 0), (APART, "host, data", 1), (APART, "data, host", 0)]
)
def test_a_gather_crosses_hosts_first_and_a_reduce_scatter_last(
    mesh: Mesh, axes: str, dim: int
) -> None:
    program = after(gather(axes, 1024, dim), mesh)
    turned = [] if axes == "data, host" else ["reshape", "transpose", "reshape"]
    assert names(program) == ["all_gather", "all_gather", *turned]
    assert sent(program, mesh, CPU) == 1024 * 6 * 4
    notes = [op.loc.note for op in program.walk() if op.label == "all_gather"]
    assert notes == ["(between hosts, part 1 of 2)", "(within hosts, part 2 of 2)"]
    program = after(scatter(axes, 1024, dim), mesh)
    assert [n for n in names(program) if "_" in n] == ["reduce_scatter", "reduce_scatter"]
    assert sent(program, mesh, CPU) == 1024 * 16 * 4 // 4 // 2


@pytest.mark.parametrize("make", [gather, scatter])
def test_where_only_latency_counts_the_cheaper_way_is_taken(make: object) -> None:
    """Two starts instead of one pay off only if the rounds within a host are quicker."""
    chip = dataclasses.replace(CPU.chip, dcn=CPU.chip.dcn._replace(latency=CPU.chip.ici.latency))
    even = Topology("cpu:8", chip=chip)
    assert len(names(after(make("data", 8, 0), BOTH, even))) == 1  # type: ignore[operator]


def test_a_training_step_sends_less_between_hosts() -> None:
    """Over all axes of a hybrid mesh, from the marks to the devices."""
    mesh = spmd.HybridMesh(ici={"data": 4}, dcn={"data": 2})
    w = np.random.RandomState(0).randint(-3, 4, (65, 131)).astype(np.float32)
    x = np.random.RandomState(1).randint(-3, 4, (512, 65)).astype(np.float32)

    def step(w: Any, x: Any) -> Any:
        x = spmd.mark_sharding(x, mesh, ("data", None))
        grad = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return spmd.mark_sharding(w - grad, mesh, (None, None))

    jitted = spmd.jit(step, mesh=mesh, options=spmd.Options(topology=CPU, check=True))
    compiled = jitted.compile(w, x)
    slow = [c for c in compiled.collectives if c.axes == ("data:(1)2",)]
    assert [c.kind for c in compiled.collectives] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert sum(c.bytes for c in slow) == (65 * 131 + 1) // 4 * 4
    assert [c.reason.partition(":")[0] for c in compiled.collectives] == [
        "sum of dot_general over data"
    ] * 3
    assert all("test_two_level.py" in c.source for c in compiled.collectives)
    np.testing.assert_array_equal(np.asarray(jitted(w, x)), w - 2 * x.T @ (x @ w))

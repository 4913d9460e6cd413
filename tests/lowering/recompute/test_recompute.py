"""Programs that hold less and make values again: the same values, less memory, as little work."""

# ruff: noqa: E501 (program texts)

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from benchmarks.programs.program import marked
from spmd.ir.control_flow import Index
from spmd.ir.legality import check_program
from spmd.ir.program import Op, OpKind, Program
from spmd.ir.text import format_program
from spmd.lowering.recompute import AGAIN, Costs, pairs_of, recompute
from spmd.lowering.rewrites.schedule import Clock
from spmd.predict.memory import peak_memory
from tests.close import close
from tests.ir.text_parse import parse_program
from tests.lowering.rewrites.local_programs import arguments, rewritten, run
from tests.programs import in_order

pytestmark = pytest.mark.exact_plans

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))
LAYERS, ROWS, WIDTH = 6, 16, 8

AMPLE = 1 << 40
"""A limit that keeps blocks as they are: loops alone collect less."""

Golden = Callable[[str, str], None]


def layer(x: Any, w: Any) -> Any:
    return x + jnp.exp(jnp.sin(x @ w)) @ w.T


def scanned(ws: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)


def backwards(ws: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, ws, reverse=True)[0] ** 2)


def nested(ws: Any, x: Any) -> Any:
    blocks = ws.reshape(2, 3, *ws.shape[1:])
    inner = lambda x, ws: (lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0], None)  # noqa: E731
    return jnp.sum(lax.scan(inner, x, blocks)[0] ** 2)


def counted(ws: Any, x: Any) -> Any:
    """What a layer does depends on its number."""

    def body(x: Any, iw: Any) -> Any:
        i, w = iw
        return layer(x, w) * jnp.sin(i.astype(jnp.float32)), None

    return jnp.sum(lax.scan(body, x, (jnp.arange(LAYERS), ws))[0] ** 2)


def unrolled(ws: Any, x: Any) -> Any:
    for i in range(LAYERS):
        x = layer(x, ws[i])
    return jnp.sum(x**2)


@cache
def local(fn: Callable[..., Any]) -> Program:
    """One device's program of a gradient, weights split along `data` and their columns."""
    ws = marked(MESH, (None, "data", "model"), (LAYERS, WIDTH, WIDTH))
    x = marked(MESH, ("data", None), (ROWS, WIDTH))
    jitted = spmd.jit(jax.grad(fn), mesh=MESH, options=spmd.Options(recompute=False))
    return jitted.lower(ws, x, topology=spmd.Topology("h200:8")).stages.optimized.program


def held_less(program: Program, price: float, limit: int = 0) -> Program:
    found, _ = recompute(program, MESH, spmd.Topology("h200:8"), price, limit)
    check_program(found, "optimized")
    return found


def peak(program: Program) -> int:
    return peak_memory(program).peak


@pytest.mark.thorough
@pytest.mark.parametrize("fn", (scanned, nested, counted, unrolled))
def test_values_are_the_same_at_every_price(fn: Callable[..., Any]) -> None:
    program = local(fn)
    args = arguments(program, MESH)
    args = [a / 10 if np.issubdtype(a.dtype, np.floating) else a for a in args]
    wanted = run(program, MESH, args)
    sizes = set()
    for price in (1e-13, 1e-7, 1e-4):
        less = held_less(program, price)
        sizes.add(peak(less))
        close(run(less, MESH, args), wanted, 2e-4)
    assert min(sizes) < peak(program)
    assert len(sizes) > 1


def test_at_no_price_nothing_changes() -> None:
    program = local(unrolled)
    assert format_program(held_less(program, 1e-30)) == format_program(program)
    assert format_program(held_less(program, 1e-4, peak(program))) == format_program(program)


def collected(program: Program) -> list[int]:
    """How many stacks lie between each pair of loops."""
    return [len(pair.stacks) for pair in pairs_of(program.body, Index(program))]


@pytest.mark.parametrize("fn", (scanned, backwards, counted))
def test_loops_collect_their_inputs_alone(fn: Callable[..., Any]) -> None:
    program = local(fn)
    (before,) = collected(program)
    (after,) = collected(held_less(program, 1e-4, AMPLE))
    assert before > 1
    assert after == 1


def test_what_a_loop_collects_and_an_inner_one_is_run_again(golden: Golden) -> None:
    less = held_less(local(scanned), 1e-4, AMPLE)
    golden("recompute_loop", in_order(format_program(less, mesh=MESH)))
    loops = [op for op in held_less(local(nested), 1e-4, AMPLE).walk() if op.is_loop]
    again = [op for op in loops if AGAIN in op.loc.note]
    assert len(loops) == 5
    assert len(again) == 1


BLOCK = """program @p(%0: tensor<64x16xf32> "w", %1: tensor<16x64xf32> "x") {
  %2 = stablehlo.all_gather %0 {all_gather_dim = 1, axes = {data}} : (tensor<64x16xf32>) -> tensor<64x64xf32>
  %3 = stablehlo.dot_general %1, %2 {dot_dimension_numbers = dot(lhs_contract = [1], rhs_contract = [0])} : (tensor<16x64xf32>, tensor<64x64xf32>) -> tensor<16x64xf32>
  %4 = stablehlo.tanh %3 : (tensor<16x64xf32>) -> tensor<16x64xf32>
  %5 = stablehlo.dot_general %4, %4 {dot_dimension_numbers = dot(lhs_contract = [0], rhs_contract = [0])} : (tensor<16x64xf32>, tensor<16x64xf32>) -> tensor<64x64xf32>
  %6 = stablehlo.dot_general %5, %5 {dot_dimension_numbers = dot(lhs_contract = [0], rhs_contract = [0])} : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %7 = stablehlo.dot_general %4, %6 {dot_dimension_numbers = dot(lhs_contract = [1], rhs_contract = [0])} : (tensor<16x64xf32>, tensor<64x64xf32>) -> tensor<16x64xf32>
  %8 = stablehlo.dot_general %7, %2 {dot_dimension_numbers = dot(lhs_contract = [1], rhs_contract = [1])} : (tensor<16x64xf32>, tensor<64x64xf32>) -> tensor<16x64xf32>
  return %8 "y"
}"""
"""At %6 a gathered weight and an activation are held, beside two products."""


def test_what_a_block_holds(golden: Golden) -> None:
    less = rewritten(lambda program: held_less(program, 1e-4), BLOCK, MESH)
    assert peak(less) < peak(parse_program(BLOCK, MESH))
    golden("recompute_block", format_program(less, mesh=MESH))


def test_what_must_not_be_done_twice_has_no_price() -> None:
    program = local(scanned)
    costs = Costs(Clock(program, MESH, spmd.Topology("h200:8")), 1.0)
    loop = next(op for op in program.walk() if op.is_loop)
    call = Op(OpKind("stablehlo.custom_call", (), (), {"call_target_name": "print"}), (), ())
    cond, body = loop.regions
    noisy = loop._replace(regions=(cond, body._replace(ops=(*body.ops, call))))
    assert 0 < costs.again(loop) < math.inf
    assert costs.again(noisy) == math.inf

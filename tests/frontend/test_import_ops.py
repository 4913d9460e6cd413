"""What the importer makes of ops: locations, scalar bodies, regions."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Frame, Loc
from spmd.ir.types import numpy_dtype
from tests.frontend.imported import X, assert_source, imported, inner_call, line_of, ops, parsed


def calls_and_scans(x, weights):
    def body(carry, weight):
        carry = carry @ weight
        return inner_call(carry), carry

    with jax.named_scope("first"):
        x = inner_call(x)
    x, _ = jax.lax.scan(body, x, weights)
    return jnp.take(x, jnp.arange(2), axis=0).sum()


def test_the_source_of_an_op_is_the_users_line():
    found = imported(calls_and_scans, X, jnp.ones((3, 4, 4)))
    (dot,) = ops(found, "dot_general")
    assert_source(dot, calls_and_scans, "carry @ weight", "calls_and_scans.<locals>.body")
    (gather,) = ops(found, "gather")  # inside jax's own `_take`
    assert_source(gather, calls_and_scans, "jnp.take", "calls_and_scans")


def test_an_inlined_call_keeps_its_own_line_its_callers_and_their_scopes():
    first, second = ops(imported(calls_and_scans, X, jnp.ones((3, 4, 4))), "exponential")
    for op, caller in ((first, "x = inner_call"), (second, "return inner_call")):
        lines = [frame.line for frame in op.loc.frames]
        assert line_of(calls_and_scans, caller) in lines
    assert "/first/" in first.loc.scope
    assert "/while/body/" in second.loc.scope
    for op in (first, second):
        assert op.loc.scope.startswith("jit(calls_and_scans)/")
        assert op.loc.scope.count("jit(calls_and_scans)") == 1
        assert op.loc.scope.endswith("/jit(inner_call)/exp")


def test_the_lines_of_a_gradient_are_those_of_the_forward_ops():
    found = imported(jax.grad(calls_and_scans), X, jnp.ones((3, 4, 4)))
    dots = ops(found, "dot_general")
    assert len(dots) == 2
    for dot in dots:
        assert_source(dot, calls_and_scans, "carry @ weight", "calls_and_scans.<locals>.body")
    assert "transpose" in dots[1].loc.scope


def test_source_leaves_out_libraries_and_the_compiler_itself():
    from spmd.ir import program

    ours = Frame(program.__file__, 1, "f")
    library = Frame("/lib/site-packages/x.py", 2, "g")
    user = Frame("/home/me/spmd/train.py", 3, "h")
    assert Loc("", (library, ours, user)).source == "/home/me/spmd/train.py:3 (h)"
    assert Loc("", (library, ours)).source == str(library)
    assert Loc().source == ""


@pytest.mark.parametrize(
    ("fn", "dtype", "reducer"),
    [
        (jnp.sum, "f32", "add"),
        (jnp.max, "f32", "max"),
        (jnp.min, "i32", "min"),
        (jnp.prod, "f32", "mul"),
        (jnp.all, "i1", "and"),
        (jnp.any, "i1", "or"),
        (partial(jax.lax.reduce_xor, axes=(0,)), "i32", "xor"),
    ],
)
def test_reducers_are_recognised_and_their_init_is_neutral(fn, dtype, reducer):
    (op,) = ops(imported(fn, jnp.ones((4,), numpy_dtype(dtype))), "reduce")
    assert op.kind.attrs["body"] == reducer_body(reducer, dtype)
    assert op.kind.attrs["reducer"] == reducer
    assert op.kind.attrs["spmd.neutral"] is True
    assert op.regions == ()


def test_an_init_that_counts_is_not_neutral():
    def fn(x, init):
        return jax.lax.reduce(x, init, jax.lax.add, (0,))

    for init in (0.0, 2.0):
        (op,) = ops(imported(lambda x, i=init: fn(x, i), X), "reduce")
        assert op.kind.attrs["spmd.neutral"] is (init == 0)
    (op,) = ops(imported(fn, X, jnp.float32(0)), "reduce")
    assert op.kind.attrs["spmd.neutral"] is False


def test_other_bodies_have_no_reducer_and_are_closed():
    found = imported(lambda x: (jnp.argmax(x, 0), jnp.sort(x)), X)
    for name, count in (("reduce", 4), ("sort", 2)):
        (op,) = ops(found, name)
        body = op.kind.attrs["body"]
        assert op.kind.attrs["reducer"] == ""
        assert len(body.region.args) == count
        assert {inner.loc for inner in body.region.ops} == {Loc()}
        assert sorted(
            [*body.region.args, *(v for inner in body.region.ops for v in inner.results)]
        ) == list(range(len(body.types)))


def test_bodies_take_constants_from_around_them():
    """MLIR's folding lifts constants out of bodies, as in artifacts that jax writes."""
    (op,) = ops(
        parsed(
            """
            func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
              %zero = stablehlo.constant dense<0.0> : tensor<f32>
              %0 = "stablehlo.sort"(%x) <{dimension = 0 : i64, is_stable = true}> ({
              ^bb0(%a: tensor<f32>, %b: tensor<f32>):
                %1 = stablehlo.add %a, %zero : tensor<f32>
                %2 = stablehlo.compare LT, %1, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
                stablehlo.return %2 : tensor<i1>
              }) : (tensor<4xf32>) -> tensor<4xf32>
              return %0 : tensor<4xf32>
            }
            """
        ),
        "sort",
    )
    names = [inner.name for inner in op.kind.attrs["body"].region.ops]
    assert names == ["stablehlo.constant", "stablehlo.add", "stablehlo.compare"]


def test_constants_of_a_body_are_not_those_of_the_function():
    """Value 2 of the sort's body is a zero; value 2 of the function, an init, is an argument."""
    found = parsed(
        """
        func.func @main(%x: tensor<4xf32>, %y: tensor<4xf32>, %init: tensor<f32>) -> tensor<f32> {
          %0 = "stablehlo.sort"(%x) <{dimension = 0 : i64, is_stable = true}> ({
          ^bb0(%a: tensor<f32>, %b: tensor<f32>):
            %zero = stablehlo.constant dense<0.0> : tensor<f32>
            %1 = stablehlo.add %a, %zero : tensor<f32>
            %2 = stablehlo.compare LT, %1, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
            stablehlo.return %2 : tensor<i1>
          }) : (tensor<4xf32>) -> tensor<4xf32>
          %3 = stablehlo.reduce(%0 init: %init) applies stablehlo.add across dimensions = [0]
            : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
          return %3 : tensor<f32>
        }
        """
    )
    (op,) = ops(found, "reduce")
    assert op.kind.attrs["spmd.neutral"] is False


def test_select_and_scatter_names_both_bodies():
    def pooled(x):
        window = (2, 2), (2, 2), "VALID"
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window).sum()

    (op,) = ops(imported(jax.grad(pooled), X), "select_and_scatter")
    assert op.kind.attrs["scatter"] == reducer_body("add", "f32")
    assert op.kind.attrs["reducer"] == "add"
    assert op.kind.attrs["select"].region.ops[0].name == "stablehlo.compare"


def test_equal_kinds_are_one_object():
    first, second = ops(imported(lambda x: (x.sum(0), (x + 1).sum(0)), X), "reduce")
    assert first.kind is second.kind


def test_control_flow_keeps_its_regions_and_reads_values_from_outside():
    found = imported(lambda x, i: jax.lax.cond(i > 0, lambda: x * 2, lambda: x), X, 1)
    (op,) = ops(found, "case")
    outside, doubled = op.regions
    (x, _) = found.program.body.args
    assert outside.args == outside.ops == ()
    assert outside.results == (x,)
    assert x in doubled.ops[-1].operands
    (loop,) = ops(imported(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + i, x), X), "while")
    cond, body = loop.regions
    assert len(cond.args) == len(body.args) == len(body.results) == len(loop.results)
    assert len(cond.results) == 1

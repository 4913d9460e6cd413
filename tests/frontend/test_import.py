"""What the importer makes of modules: constants, ops, regions, calls, marks and locations."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

from spmd.errors import FrontendError
from spmd.frontend.importer.module import import_module
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Frame, Loc
from spmd.ir.types import _NUMPY_DTYPES, Dense, TensorType, numpy_dtype
from tests.ir.examples import stablehlo

X = jnp.ones((4, 4))


def imported(fn, *args, **options):
    return import_module(stablehlo(fn, *args, **options))


def parsed(text):
    with mlir.make_ir_context():
        return import_module(ir.Module.parse(text))


def ops(imported, name):
    return [op for op in imported.program.walk() if op.name == f"stablehlo.{name}"]


@jax.jit
def inner_call(x):
    return jnp.exp(x)


def line_of(fn, text):
    """The line of its file on which a function's source has some text."""
    lines, start = inspect.getsourcelines(fn)
    return start + next(i for i, line in enumerate(lines) if text in line)


def assert_source(op, fn, text, function):
    assert op.loc.source == f"{inspect.getsourcefile(fn)}:{line_of(fn, text)} ({function})"


# Modules that the importer refuses, and which function it takes.

IDENTITY = "(%0: tensor<f32>) -> tensor<f32> { return %0 : tensor<f32> }"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "func.func @main(%0: tensor<?xf32, #stablehlo.bounds<4>>) { return }",
            "the module has a dynamic shape",
        ),
        (
            "func.func @main(%0: tensor<2xf32, 5 : i32>) { return }",
            "tensor<2xf32, 5 : i32> cannot be partitioned",
        ),
        (
            "func.func @main(%0: tuple<tensor<f32>>) { return }",
            "tuple<tensor<f32>> cannot be partitioned",
        ),
        (
            """func.func @main(%0: tensor<4xf32>, %1: tensor<f32>) -> tensor<f32> {
              %2 = "stablehlo.reduce"(%0, %1) ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
                %c = stablehlo.add %a, %1 : tensor<f32>
                stablehlo.return %c : tensor<f32>
              }) {dimensions = array<i64: 0>} : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
              return %2 : tensor<f32>
            }""",
            "stablehlo.add reads a value that is not visible",
        ),
    ],
)
def test_bad_modules_are_refused(text, message):
    with pytest.raises(FrontendError, match=re.escape(message)):
        parsed(text)


# What the importer takes from a module besides ops: names, shardings, meshes.


def test_arguments_and_results_are_named_and_the_only_function_is_taken():
    module = stablehlo(lambda p: {"loss": p["w"], "n": [p["w"]]}, {"w": X})
    program = import_module(module).program
    assert program.name == "main"
    assert program.arg_names == ("arg0",)
    assert program.result_names == ("['loss']", "['n'][0]")
    assert import_module(module, ["params/w"]).program.arg_names == ("params/w",)
    assert parsed(f"func.func @step{IDENTITY}").program.name == "step"


# What the importer makes of ops: locations, scalar bodies, regions.


def calls_and_scans(x, weights):
    def body(carry, weight):
        carry = carry @ weight
        return inner_call(carry), carry

    with jax.named_scope("first"):
        x = inner_call(x)
    x, _ = jax.lax.scan(body, x, weights)
    return jnp.take(x, jnp.arange(2), axis=0).sum()


def test_the_source_of_an_op_and_of_its_gradient_is_the_users_line():
    found = imported(calls_and_scans, X, jnp.ones((3, 4, 4)))
    (dot,) = ops(found, "dot_general")
    assert_source(dot, calls_and_scans, "carry @ weight", "calls_and_scans.<locals>.body")
    (gather,) = ops(found, "gather")  # inside jax's own `_take`
    assert_source(gather, calls_and_scans, "jnp.take", "calls_and_scans")
    found = imported(jax.grad(calls_and_scans), X, jnp.ones((3, 4, 4)))
    dots = ops(found, "dot_general")
    assert len(dots) == 2
    for dot in dots:
        assert_source(dot, calls_and_scans, "carry @ weight", "calls_and_scans.<locals>.body")
    assert "transpose" in dots[1].loc.scope


def test_an_inlined_call_keeps_its_own_line_its_callers_and_their_scopes():
    first, second = ops(imported(calls_and_scans, X, jnp.ones((3, 4, 4))), "exponential")
    for op, caller in ((first, "x = inner_call"), (second, "return inner_call")):
        assert line_of(calls_and_scans, caller) in [frame.line for frame in op.loc.frames]
    assert "/first/" in first.loc.scope
    assert "/while/body/" in second.loc.scope
    for op in (first, second):
        assert op.loc.scope.startswith("jit(calls_and_scans)/")
        assert op.loc.scope.count("jit(calls_and_scans)") == 1
        assert op.loc.scope.endswith("/jit(inner_call)/exp")


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
        (jnp.sum, "f32", "add"), (jnp.max, "f32", "max"), (jnp.min, "i32", "min"),
        (jnp.prod, "f32", "mul"), (jnp.all, "i1", "and"), (jnp.any, "i1", "or"),
        (partial(jax.lax.reduce_xor, axes=(0,)), "i32", "xor"),
    ],
)  # fmt: skip
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


def test_equal_kinds_are_one_object():
    first, second = ops(imported(lambda x: (x.sum(0), (x + 1).sum(0)), X), "reduce")
    assert first.kind is second.kind


# Constants of every dtype, as the importer reads them.


def constant(elements, type_):
    text = f"""func.func @main() -> {type_} {{
      %0 = stablehlo.constant dense<{elements}> : {type_}
      return %0 : {type_}
    }}"""
    (op,) = parsed(text).program.body.ops
    return op.kind.attrs["value"]


def literals(dtype):
    """Two numbers as MLIR writes them, and as an array."""
    if dtype == "i1":
        return ("true", "false"), np.array([True, False])
    if dtype.startswith("complex"):
        return ("(1.5, -2.0)", "(0.1, 0.0)"), np.array([1.5 - 2j, 0.1], numpy_dtype(dtype))
    if dtype.lstrip("u").startswith("i"):
        low = "0" if dtype.startswith("u") else "-2"
        return (low, "1"), np.array([int(low), 1]).astype(numpy_dtype(dtype))
    return ("2.0", "0.5"), np.array([2.0, 0.5]).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", _NUMPY_DTYPES)
def test_constants_of_every_dtype(dtype):
    (a, b), array = literals(dtype)
    cases = {
        (): (a, array[0]),
        (3,): (a, np.broadcast_to(array[0], (3,))),
        (2, 2): (f"[[{a}, {b}], [{b}, {a}]]", np.stack([array, array[::-1]])),
        (150, 2): ("[" + ", ".join([f"[{a}, {b}]"] * 150) + "]", np.stack([array] * 150)),
        (0, 2): ("", np.zeros((0, 2)).astype(array.dtype)),
        (1, 1): (f"[[{b}]]", array[1:].reshape(1, 1)),
    }
    for shape, (elements, expected) in cases.items():
        found = constant(elements, TensorType(shape, dtype))
        assert found == Dense.of(expected, dtype)
        assert found.type.shape == shape
        assert found.array().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "f8E5M2", "complex<f32>"])
@pytest.mark.parametrize("count", [1, 2, 200])
def test_special_numbers_keep_their_bits(dtype, count):
    part = numpy_dtype(dtype.removeprefix("complex<").removesuffix(">"))
    for number in (np.nan, -np.nan, np.inf, -np.inf):
        element = np.array(number).astype(part)
        bits = "0x" + element.tobytes()[::-1].hex().upper()
        one = element.tobytes()
        if dtype.startswith("complex"):
            bits, one = f"(-0.0, {bits})", np.array(-0.0, part).tobytes() + one
        found = constant("[" + ", ".join([bits] * count) + "]", TensorType((count,), dtype))
        assert found == Dense(TensorType((count,), dtype), one, True)


# Marks inside of programs. Manual regions are tested where they are lowered.


def test_groups_may_be_said_as_axes_and_parts_of_axes():
    text = """
    sdy.mesh @mesh = <["x"=2, "y"=4]>
    func.func @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {
      %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{"x", "y"}, {}]>]
          out_shardings=[<@mesh, [{"x", "y"}, {}]>] manual_axes={"x", "y"} (%b: tensor<1x4xf32>) {
        %1 = "stablehlo.all_reduce"(%b) ({ ^bb0(%p: tensor<f32>, %q: tensor<f32>):
          %s = stablehlo.add %p, %q : tensor<f32>
          stablehlo.return %s : tensor<f32>
        }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
          use_global_device_ids, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh,
            axes = [#stablehlo.axis_ref<name = "x">,
                    #stablehlo.axis_ref<name = "y", sub_axis_info = (2)2>]>
        } : (tensor<1x4xf32>) -> tensor<1x4xf32>
        sdy.return %1 : tensor<1x4xf32>
      } : (tensor<8x4xf32>) -> tensor<8x4xf32>
      return %0 : tensor<8x4xf32>
    }"""
    (reduction,) = ops(parsed(text), "all_reduce")
    assert reduction.kind.attrs["axes"] == (0, 2)  # the atoms are those of x, y:(1)2 and y:(2)2

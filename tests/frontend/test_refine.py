"""Modules with dynamic shapes, at static ones: as if they had been exported so."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import spmd
from spmd.errors import FrontendError
from spmd.frontend.artifact import calls_of, function_artifact
from spmd.frontend.importer.module import parse_module
from spmd.frontend.refine import is_dynamic, refine, symbols_of
from tests.close import close
from tests.frontend.test_hostile import chain


def struct(*shape: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def doubled(x: Any, y: Any, *, scale: float) -> Any:
    rows = jnp.arange(x.shape[0], dtype=x.dtype)[:, None]
    return jnp.concatenate([x, x]) * y + scale, rows + x


def everything(x_ND: Any, steps: Any) -> Any:
    """One composite at several sizes, loops over a dim, helpers of jax that are called twice."""
    n = x_ND.shape[0]
    pair = jax.lax.composite(doubled, "test.doubled")
    twice, rows = pair(x_ND, 2.0, scale=3.0)
    four, _ = pair(twice, 0.5, scale=1.0)
    halves = rows.reshape(n // 2, 2, -1).sum(1) + jnp.ones((n // 2, 1)) * (n % 4)
    row = lambda i: jax.lax.dynamic_index_in_dim(x_ND, i, keepdims=False)  # noqa: E731
    total = jax.lax.fori_loop(0, n, lambda i, sum_D: sum_D + row(i) * i, jnp.zeros(x_ND.shape[1]))
    last = jax.lax.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, c[1] * 1.5), (0, four))
    return last[1], halves, total, jnp.float32(n) + x_ND.mean()


@pytest.fixture(scope="module")
def artifact() -> bytes:
    (n,) = export.symbolic_shape("n", constraints=["mod(n, 2) == 0", "n >= 4"])
    return function_artifact(everything, (struct(n, 4), struct(dtype=jnp.int32)), platform="cpu")[0]


@pytest.mark.parametrize("size", [4, 10])
def test_composites_loops_and_calls_at_two_sizes(artifact: bytes, size: int) -> None:
    module = parse_module(artifact)
    assert is_dynamic(module)
    assert symbols_of(module) == ("n",)
    before = str(module)
    refined = refine(module, [(size, 4), ()], {"n": size})
    assert str(module) == before
    assert not is_dynamic(refined)
    assert "?" not in str(refined)
    assert calls_of(refined).composites == {"test.doubled": 2}
    x = np.random.default_rng(size).standard_normal((size, 4)).astype(np.float32)
    compiled = spmd.compile_stablehlo(refined, spmd.make_mesh(data=2), [("data",), None])
    close(compiled(x, 3), everything(x, jnp.int32(3)), 1e-5)


def test_the_compilers_own_ops_stay_whole() -> None:
    """Each sees its operands at their sizes."""
    b, t = export.symbolic_shape("b, t", constraints=["t >= 8"])

    def shapes(b: Any, t: Any) -> list[jax.ShapeDtypeStruct]:
        wide, narrow = struct(b, t, 4, 8), struct(b, t, 2, 8)
        cache, new = struct(1, t, 4, 2, 2, 8), struct(1, 1, 2, 2, 8)
        quantized = struct(6, 32, dtype=jnp.int8), struct(6)
        return [wide, narrow, narrow, cache, new, struct(1, dtype=jnp.int32), *quantized]

    def layer(q: Any, k: Any, v: Any, cache: Any, new: Any, at_1: Any, w: Any, scales: Any) -> Any:
        heads = spmd.ops.attention(q, k, v)
        table, slots = jnp.arange(4)[None, None], jnp.zeros((1, 1), int)
        first = jnp.asarray([[0, 1]])
        cache = spmd.ops.paged_update(cache, new, table, slots, at_1[None])
        grouped = q[:1, :1].reshape(1, 1, 2, 2, 8)
        decoded = spmd.ops.paged_attention(grouped, cache, table, slots, at_1[None], first)
        flat = decoded.reshape(1, 32)
        return heads, cache, spmd.ops.linear(flat, {"values": w, "scales": scales})

    data, *_ = function_artifact(layer, shapes(b, t), platform="cpu")
    module, rng = parse_module(data), np.random.default_rng(0)
    structs = shapes(8, 16)
    arrays = [(rng.standard_normal(x.shape) * 2).astype(x.dtype) for x in structs]
    arrays[5] = np.array([5], np.int32)
    refined = refine(module, [x.shape for x in structs], {"b": 8, "t": 16})
    lowered = spmd.lower_stablehlo(refined, spmd.make_mesh(data=4, model=2))
    kinds = [op.kind for op in lowered.stages.program.body.ops]
    names = [kind.attrs["name"] for kind in kinds if kind.name == "stablehlo.composite"]
    assert sorted(names) == [
        "spmd.attention", "spmd.linear", "spmd.paged_attention", "spmd.paged_update",
    ]  # fmt: skip
    close(lowered.compile()(*arrays), jax.jit(layer)(*arrays), 1e-4)


CONSTANT_FIRST = """module {
  func.func public @main(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
    %three = stablehlo.constant dense<3> : tensor<i32>
    %0 = stablehlo.composite "test.scaled" %three, %x {decomposition = @scaled}
      : (tensor<i32>, tensor<?x4xf32>) -> tensor<?x4xf32>
    return %0 : tensor<?x4xf32>
  }
  func.func private @scaled(%k: tensor<i32>, %x: tensor<?x4xf32>) -> tensor<?x4xf32> {
    %0 = stablehlo.convert %k : (tensor<i32>) -> tensor<f32>
    %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x4xf32>) -> tensor<i32>
    %1 = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
    %four = stablehlo.constant dense<4> : tensor<1xi32>
    %2 = stablehlo.concatenate %1, %four, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
    %3 = stablehlo.dynamic_broadcast_in_dim %0, %2, dims = []
      : (tensor<f32>, tensor<2xi32>) -> tensor<?x4xf32>
    %4 = stablehlo.multiply %x, %3 : tensor<?x4xf32>
    return %4 : tensor<?x4xf32>
  }
}"""


def test_a_composite_keeps_a_constant_operand() -> None:
    """The passes would write it into the decomposition, and the composite would lack an operand."""
    refined = refine(parse_module(CONSTANT_FIRST), [(8, 4)])
    assert "optimization_barrier" not in str(refined)
    assert '"test.scaled" %c, %arg0' in str(refined)
    x = np.ones((8, 4), np.float32)
    (ours,) = spmd.compile_stablehlo(refined, spmd.make_mesh(data=8))(x)
    np.testing.assert_array_equal(ours, 3 * x)


def test_marks_inside_calls_and_composites(mesh: spmd.Mesh) -> None:
    """A function that is called at two sizes, and a composite, each with a mark of its own."""

    def marked(x: Any) -> Any:
        return jnp.sin(spmd.mark_sharding(x, mesh, ("data", None)))

    def fn(x: Any) -> Any:
        inner = jax.jit(marked)
        return jax.lax.composite(marked, "test.marked")(x) + inner(x) + inner(x[:4]).sum()

    (n,) = export.symbolic_shape("n", constraints=["n >= 4"])
    data, *_ = function_artifact(fn, [struct(n, 4)], platform="cpu")
    refined = refine(parse_module(data), [(8, 4)], {"n": 8})
    assert str(refined).count("sdy.sharding_constraint") == 3
    x = np.random.default_rng(0).standard_normal((8, 4), np.float32)
    (ours,) = spmd.compile_stablehlo(refined, mesh)(x)
    np.testing.assert_allclose(ours, fn(x), rtol=1e-5)


def body(text: str) -> str:
    return f"module {{ func.func @main(%x: tensor<?x4xf32>, %i: tensor<2xi32>) {text} }}"


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        (CONSTANT_FIRST, [(8, 5)], "argument 0 cannot have the shape (8, 5)"),
        (CONSTANT_FIRST, [(8,)], "argument 0 cannot have the shape (8,)"),
        (CONSTANT_FIRST, [], "0 shapes are given for 1 arguments"),
        (
            body("""-> tensor<?x?xf32> {
              %0 = stablehlo.dynamic_reshape %x, %i
                : (tensor<?x4xf32>, tensor<2xi32>) -> tensor<?x?xf32>
              return %0 : tensor<?x?xf32> }"""),
            [(8, 4), (2,)],
            "a dim depends on data: stablehlo.dynamic_reshape gives tensor<?x?xf32>",
        ),
        (
            body("""-> tensor<?x4xf32> {
              %0 = func.call @main(%x, %i) : (tensor<?x4xf32>, tensor<2xi32>) -> tensor<?x4xf32>
              return %0 : tensor<?x4xf32> }"""),
            [(8, 4), (2,)],
            "function @main calls itself",
        ),
        (
            "func.func @main(%n: tensor<f32> {jax.global_constant}, %x: tensor<?xf32>) {\nreturn }",
            [(8,)],
            "the module is malformed",
        ),
        (
            body("""-> tensor<?x4xf32> {
              %0 = func.call @f(%x) : (tensor<?x4xf32>) -> tensor<?x4xf32>
              return %0 : tensor<?x4xf32> }
              func.func private @f(tensor<?x4xf32>) -> tensor<?x4xf32>"""),
            [(8, 4), (2,)],
            "function @f has no body in the module",
        ),
        (chain(40, 2).replace("8x4", "?x4"), [(8, 4)], "the module has more than 250000 ops"),
    ],
    ids=["static dim", "rank", "count", "data", "recursion", "symbol", "body", "calls"],
)
def test_what_cannot_be_is_one_error(text: str, shapes: list[tuple[int]], message: str) -> None:
    with pytest.raises(FrontendError, match=re.escape(message)):
        refine(parse_module(text), shapes)


def test_a_symbol_without_a_value_is_named(artifact: bytes) -> None:
    with pytest.raises(FrontendError, match="the module has the symbolic dim n, which has no size"):
        refine(parse_module(artifact), [(4, 4), ()])

"""Modules that `jax.export` wrote with symbolic dims, and others with dynamic ones."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import spmd
from spmd.cli import explain, verify
from spmd.cli.main import main
from spmd.errors import SpmdError

MESH = {"data": 4, "model": 2}


def model(params: Any, x: Any, y: Any, fixed: Any) -> Any:
    hidden = jax.nn.softmax(params["w"] @ x)
    pairs = params["w"].reshape(params["w"].shape[0] // 2, 2, 4).sum(1)
    return {"a": hidden, "b": jnp.concatenate([hidden, hidden]), "c": y + 1, "d": pairs * fixed}


def arguments(n: Any, k: Any, make: Any) -> tuple[Any, ...]:
    return {"w": make((n, 4))}, make((4, k)), make((2 * n + k // 2, n + 1)), make((4,))


@pytest.fixture(scope="module")
def exported() -> export.Exported:
    n, k = export.symbolic_shape("n, k", constraints=["mod(n, 4) == 0", "k >= n"])
    structs = arguments(n, k, lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    return export.export(jax.jit(model))(*structs)


def form(exported: export.Exported, name: str) -> Any:
    if name == "exported":
        return exported
    return exported.mlir_module_serialized if name == "bytes" else exported.mlir_module()


@pytest.mark.parametrize(
    ("name", "sizes"), [("exported", (8, 16)), ("bytes", (16, 16)), ("text", (4, 6))]
)
def test_the_same_as_jax(exported: export.Exported, name: str, sizes: tuple[int, int]) -> None:
    n, k = sizes
    rng = np.random.default_rng(n)
    given = arguments(n, k, lambda shape: np.asarray(rng.standard_normal(shape), np.float32))
    compiled = spmd.compile_stablehlo(
        form(exported, name), spmd.make_mesh(**MESH), [("data", None), None, None, None],
        symbols={"n": n, "k": k},
    )  # fmt: skip
    assert compiled.in_shardings[0].spec == jax.sharding.PartitionSpec("data", None)
    wanted = jax.tree.leaves(model(*given))
    for ours, theirs in zip(compiled(*jax.tree.leaves(given)), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


UNNAMED = """module { func.func @main(%x: tensor<?x4xf32>, %y: tensor<4xf32>) -> tensor<?x4xf32> {
  %0 = stablehlo.sine %x : tensor<?x4xf32>
  return %0 : tensor<?x4xf32>
} }"""


@pytest.mark.parametrize("shapes", [[(8, 4), None], {"arg0": (8, 4), "arg1": (4,)}])
def test_dims_without_names_get_shapes(shapes: Any) -> None:
    mesh = spmd.make_mesh(**MESH)
    if isinstance(shapes, list):
        shapes[1] = (4,)
    compiled = spmd.compile_stablehlo(UNNAMED, mesh, arg_shapes=shapes)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_allclose(compiled(x, x[0])[0], np.sin(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("source", "given", "message"),
    [
        ("text", {}, "argument arg0 has the shape (n, 4), and n has no value"),
        ("exported", {"symbols": {"n": 8}}, "argument arg1 has the shape (4, k), and k has no"),
        ("text", {"symbols": {"n": 8, "q": 8}}, "the module has no symbol 'q'"),
        ("text", {"symbols": {"n": 6, "k": 8}}, "symbolic shape constraint"),
        ("text", {"symbols": {"n": 8, "k": 4}}, "symbolic shape constraint"),
        (UNNAMED, {}, "argument arg0 has the shape (?, 4), and ? has no value"),
        (UNNAMED, {"symbols": {"n": 8}}, "the module has no symbol 'n'"),
        (UNNAMED, {"arg_shapes": {"z": (8, 4)}}, "'z' matches no argument"),
        (UNNAMED, {"arg_shapes": [(8, 4)]}, "arg_shapes needs one entry for each argument"),
        (UNNAMED, {"arg_shapes": [(8, 5), None]}, "argument 0 cannot have the shape (8, 5)"),
        (UNNAMED.replace("?", "8"), {"symbols": {"n": 8}}, "the module's shapes are static"),
    ],
)
def test_sizes_that_are_missing_or_wrong(
    exported: export.Exported, source: str, given: Any, message: str
) -> None:
    module = source if "module" in source else form(exported, source)
    with pytest.raises(SpmdError, match=re.escape(message)):
        spmd.lower_stablehlo(module, spmd.make_mesh(**MESH), **given)


def test_symbols_are_flags_of_the_commands(
    exported: export.Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.mlir"
    file.write_text(exported.mlir_module())
    assert explain.main([str(file), "--symbols", "n=8,k=16", "--noprices"]) == 0
    assert verify.main([str(file), "--symbols", "n=8,k=16"]) == 0
    assert main(["explain", str(file)]) == 2
    assert "n has no value" in capsys.readouterr().err


def test_jit_of_what_was_exported_for_any_size() -> None:
    """Its shapes are refined at each call, marks inside it count, and so do gradients."""
    mesh = spmd.make_mesh(**MESH)

    def layers(x: Any, w: Any) -> Any:
        x = spmd.mark_sharding(x, mesh, ("data", None))
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

    (n,) = export.symbolic_shape("n")
    structs = jax.ShapeDtypeStruct((n, 8), jnp.float32), jax.ShapeDtypeStruct((3, 8, 8), "float32")
    called = export.export(jax.jit(layers))(*structs)

    def loss(x: Any, w: Any) -> Any:
        return (called.call(x, w)[:8] * called.call(jnp.concatenate([x, x]), w)[8:]).sum()

    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 8)).astype(np.float32)
    w = rng.standard_normal((3, 8, 8)).astype(np.float32)
    ours = spmd.jit(jax.value_and_grad(called_loss := loss), mesh=mesh)(x, w)
    theirs = jax.value_and_grad(called_loss)(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)


def running(x: Any) -> Any:
    """What jax writes as calls that no pass of StableHLO knows, one behind the other."""
    totals = [fn(x, 0) for fn in (jnp.cumsum, jax.lax.cummax, jax.lax.cummin, jax.lax.cumlogsumexp)]
    totals += [jax.lax.cumprod(jnp.tanh(x), 0, reverse=True), jnp.cumsum(jnp.cumsum(x > 0, 0), 1)]
    return totals, jax.lax.fori_loop(0, 3, lambda _, y: jnp.cumsum(y, 0) / 8 + x, x)


def windows(x: Any) -> Any:
    """Windows as large as a symbolic dim, with strides, padding and dilation, of two tensors."""
    rows, add = x.shape[0], jax.lax.add
    padding, dilated = ((1, 0), (1, 2)), {"base_dilation": (2, 1), "window_dilation": (1, 3)}
    starts = np.float32(0), np.float32(-np.inf)
    both = (x, x * 2), starts, lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1]))
    return (
        jax.lax.reduce_window(x, 0.0, add, (rows - 2, 2), (1, 1), "VALID"),
        jax.lax.reduce_window(x, 0.0, add, (rows - 2, 2), (2, 1), padding, **dilated),
        jax.lax.reduce_window(*both, (rows, 2), (1, 1), "SAME"),
    )


def chosen(x: Any) -> Any:
    first = jax.lax.approx_max_k(x, 3, reduction_dimension=0)
    return first, jax.lax.approx_min_k(x.T, x.shape[0] - 2), jax.lax.top_k(x.T, x.shape[0] - 2)


def drawn(x: Any) -> Any:
    key = jax.random.key(0, impl="rbg")
    bits = jax.random.bits(jax.random.key(3, impl="unsafe_rbg"), x.shape[:1], jnp.uint8)
    return x + jax.random.normal(key, x.shape), bits


def every_call(x: Any) -> Any:
    return running(x), windows(x), chosen(x), drawn(x)


@pytest.mark.parametrize("x64", [False, True])
def test_calls_that_stand_for_ops(x64: bool) -> None:
    """By themselves, and called inside of another program."""
    mesh, (b,) = spmd.make_mesh(data=8), export.symbolic_shape("b", constraints=["b >= 6"])
    x = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    with jax.enable_x64(x64):
        saved = export.export(jax.jit(every_call))(jax.ShapeDtypeStruct((b, 8), x.dtype))
        wanted = jax.tree.leaves(jax.jit(every_call)(x))
        ours = spmd.compile_stablehlo(saved, mesh, [("data", None)], symbols={"b": 16})(x)
        called = [] if x64 else jax.tree.leaves(spmd.jit(lambda x: saved.call(x), mesh=mesh)(x))
    for got in filter(None, (ours, called)):
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_symbolic_dims_of_a_function() -> None:
    """A function is compiled for sizes that are known; what is exported is for any."""
    mesh, (b,) = spmd.make_mesh(data=8), export.symbolic_shape("b")
    struct = jax.ShapeDtypeStruct((b, 8), np.float32)
    step: Any = spmd.jit(jnp.tanh, mesh=mesh, in_specs=(("data", None),))
    with pytest.raises(SpmdError, match="argument 0 of tanh has the symbolic dim b") as caught:
        step.lower(struct)
    assert "spmd.compile_stablehlo(exported, mesh, symbols={'b': 8})" in str(caught.value.fix)
    compiled = spmd.compile_stablehlo(export.export(step)(struct), mesh, symbols={"b": 8})
    x = np.ones((8, 8), np.float32)
    np.testing.assert_allclose(compiled(x)[0], np.tanh(x), rtol=1e-5)

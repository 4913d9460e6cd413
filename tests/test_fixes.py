"""What errors say under `fix:`, done to the letter.

`test_texts_of_the_sources` reads all of it; `tests/conftest.py` checks what any test's errors say
with their names and sizes in it. Here the recipes are followed: what is in the message is run, and
the program then computes what `jax.jit` does.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import cpu_sparse

import spmd
from spmd.api.stablehlo import static_module
from spmd.errors import SpmdError
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import whole
from spmd.ir.program import OpKind
from spmd.ir.types import TensorType
from tests.fixes import NAMES, pieces, problems
from tests.markdown import ROOT

X, W = np.random.default_rng(0).standard_normal((2, 8, 8), np.float32)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def fix_of(program: Callable[[], Any]) -> list[str]:
    with pytest.raises(SpmdError) as caught:
        program()
    found = list(pieces(str(caught.value.fix)))
    assert found, caught.value
    return found


def run(code: str, **own: Any) -> Any:
    """Runs code of a fix; of a keyword argument it returns the value."""
    if re.match(r"\w+=", code):
        code = f"list(dict({code}).values())[0]"
    return eval(code, {**NAMES, **own})


def text_of(node: Any) -> str:
    """Returns the text of a literal; what is filled in when it is written is `NAME`."""
    parts = [text_of(child) for child in ast.iter_child_nodes(node)]
    if isinstance(node, ast.FormattedValue):
        return "NAME"
    return str(node.value) if isinstance(node, ast.Constant) else "".join(parts)


def test_texts_of_the_sources() -> None:
    texts: dict[str, str] = {}
    for folder in ("spmd", "models", "serving", "pytorch", "scripts"):
        for path in Path(ROOT, folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                called = getattr(getattr(node, "func", None), "id", "")
                values = [k.value for k in getattr(node, "keywords", ()) if k.arg == "fix"]
                if called in ("Refusal", "refusal"):
                    values += getattr(node, "args", ())
                texts |= {f"{path.name}:{value.lineno}": text_of(value) for value in values}
    assert len(texts) > 150
    assert sum(bool(list(pieces(text))) for text in texts.values()) > 45
    assert not {place: found for place, text in texts.items() if (found := problems(text))}


@pytest.mark.parametrize(
    "text",
    [
        "write spmd.mke_mesh(data=4)", "pass spmd.Topology()",
        "call jax.random.key()", "read exported.calls(x)", "give symbols={'n': }", "use f(x)",
        "spmd.register_rule('f', 'i -> i', kind='replicate')", "take .get_text(x)",
        "Topology('v5e:4x4').sav(path)", "Topology('v5e:4x4').save()",
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(text: str) -> None:
    assert problems(text)


# Kernels that nobody registered.

CALLS: dict[str, list[tuple[int, ...]]] = {
    "one operand": [(64, 16)], "four, of three ranks": [(5,), (5,), (9,), (8, 4)], "a scalar": [()],
    "scalars": [(), ()], "none": [], "more dims than letters": [(2,) * 8] * 4,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_rules_that_are_proposed_are_read(name: str) -> None:
    """Whatever the operands are, each line registers a rule by which nothing is split."""
    operands = tuple(TensorType(shape, "f32") for shape in CALLS[name])

    def kind(line: int) -> OpKind:
        attrs = {"call_target_name": f"test_proposed {name} {line}"}
        return OpKind("stablehlo.custom_call", operands, (TensorType((3, 2), "f32"),), attrs)

    lines = fix_of(lambda: rule_of(kind(0)))
    assert len(lines) == (1 if name == "more dims than letters" else 2)
    for i, _ in enumerate(lines):
        own = kind(i)
        run(fix_of(lambda: rule_of(own))[i])  # noqa: B023
        assert rule_of(own) == whole(own)


@pytest.mark.parametrize("line", [0, 1])
def test_a_kernel_runs_by_the_rule_that_is_proposed(mesh: spmd.Mesh, line: int) -> None:
    """A product of rows of a sparse matrix, as a kernel of the user's with four operands."""
    ((_, kernel, _),) = cpu_sparse.registrations()["cpu"]
    target = f"test_sparse_rows_{line}"
    jax.ffi.register_ffi_target(target, kernel, platform="cpu")
    rows = np.arange(9, dtype=np.int32)

    def fn(values: Any, x: Any) -> Any:
        call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((8, 8), np.float32))
        return call(values * 2, rows, rows[:8], jnp.tanh(x)) @ x

    def ours() -> Any:
        return spmd.jit(fn, mesh=mesh, in_specs=("data", ("data", "model")))(X[0], X)

    run(fix_of(ours)[line])
    np.testing.assert_allclose(ours(), jax.jit(fn)(X[0], X), rtol=1e-5, atol=1e-5)


# Meshes, specs and calls.


def jitted(**options: Any) -> Any:
    return spmd.jit(layer, **options)(X, W)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "mesh"), ({"mesh": "data"}, "mesh"),
        ({"backend": "cpu"}, "mesh"), ({"device": jax.devices()[1]}, "mesh"),
        ({"mesh": spmd.make_mesh(data=8), "options": {"check": True}}, "options"),
    ],
)  # fmt: skip
def test_a_call_after_its_options_are_mended(options: dict[str, Any], name: str) -> None:
    code = fix_of(lambda: jitted(**options))
    kept = {k: v for k, v in options.items() if k == "mesh" and name != "mesh"}
    got = jitted(**kept, **{name: run(code[0], device=options.get("device"))})
    np.testing.assert_allclose(got, layer(X, W), rtol=1e-5)
    for context in code[1:]:
        with run(context):
            np.testing.assert_allclose(jitted(), layer(X, W), rtol=1e-5)


def test_ways_to_write_what_was_meant(mesh: spmd.Mesh) -> None:
    marked: Any = spmd.mark_sharding
    own: dict[str, Any] = {"fn": layer, "mesh": mesh}
    no_function: Any = mesh
    for code in fix_of(lambda: spmd.jit(no_function)):
        step = run(code, **own)
        step = step if code.count("fn") else step(layer)
        np.testing.assert_allclose(step(X, W), layer(X, W), rtol=1e-5)

    (mark,) = fix_of(lambda: marked(mesh, X, ("data", None)))
    assert run(mark, tensor=X, spec=("data", None), **own).shape == X.shape
    tree = {"w": W, "b": W[0]}
    (mark,) = fix_of(lambda: marked(tree, mesh, ("data",)))
    marked = run(mark, tree=tree, **own)
    assert not marked["b"].sharding.is_fully_replicated
    step = spmd.jit(lambda xw, y: layer(*xw) + y, mesh=mesh, in_specs=(("data", "model"), None))
    assert run(fix_of(lambda: step((X, W), W))[0]) == jax.sharding.PartitionSpec("data", "model")


def test_compiled_programs(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x, w: layer(x, w).sum(), mesh=mesh)
    compiled = step.compile(X, W)
    (code,) = fix_of(lambda: jax.grad(compiled)(X, W))
    gradients = run(code, fn=lambda x, w: layer(x, w).sum(), mesh=mesh)(X, W)
    np.testing.assert_allclose(gradients, jax.grad(lambda x: layer(x, W).sum())(X), atol=1e-5)
    (code,) = fix_of(lambda: step.lower(X, W).compiler_ir("hlo"))
    assert "ENTRY" in run(code, compiled=compiled)
    (code,) = fix_of(lambda: compiled.explain("nothing"))
    assert "%2" in run(code, compiled=compiled)
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    (code,) = fix_of(lambda: step(struct, W))
    assert code == ".compile(...)"
    assert step.compile(struct, W).out_info.shape == ()

    placed = jax.device_put(X, compiled.in_shardings[0])
    donating = spmd.jit(lambda x, y: (x + 1, y * 2), mesh=mesh, donate_argnums=0)
    code, _ = fix_of(lambda: donating(placed, placed))
    np.testing.assert_array_equal(donating(placed, run(code, array=placed))[1], X * 2)


def test_keys_of_an_exported_program(mesh: spmd.Mesh) -> None:
    normal = spmd.jit(lambda key: jax.random.normal(key, (8,)), mesh=mesh)
    data, wrapped, made = fix_of(lambda: normal.lower(jax.random.key(0)).export())

    def fn(data: Any, x: Any) -> Any:
        ref = run(made, x=x)
        ref[...] += jax.random.normal(run(wrapped, data=data), (8,))
        return jax.freeze(ref)

    args = run(data, key=jax.random.key(0)), X[0]
    saved = spmd.jit(fn, mesh=mesh).lower(*args).export()
    got, want = spmd.jit(saved.call, mesh=mesh)(*args), jax.jit(fn)(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_sizes_of_symbolic_dims(mesh: spmd.Mesh) -> None:
    (b,) = jax.export.symbolic_shape("b")
    structs = jax.ShapeDtypeStruct((b, 8), X.dtype), W
    export, compiling = fix_of(lambda: spmd.jit(layer, mesh=mesh).lower(*structs))

    def exported(*given: Any) -> Any:
        return jax.export.export(jax.jit(layer))(*given)

    assert export == "jax.export.export(fn)"
    compiled = run(compiling, exported=exported(*structs), mesh=mesh)
    np.testing.assert_allclose(compiled(X, W)[0], layer(X, W), rtol=1e-5)
    module = exported(*structs).mlir_module()
    (symbols,) = fix_of(lambda: spmd.compile_stablehlo(module, mesh))
    assert static_module(module, run(symbols)) is not None

    text = "func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {\n"
    text += "return %x : tensor<?x8xf32> }"
    (shapes,) = fix_of(lambda: spmd.compile_stablehlo(text, mesh))
    compiled = spmd.compile_stablehlo(text, mesh, arg_shapes=run(shapes))
    np.testing.assert_array_equal(compiled(X)[0], X)


def test_topologies_and_rules(mesh: spmd.Mesh, tmp_path: Path) -> None:
    saving, loading = fix_of(lambda: spmd.Topology("v9:8"))
    path = str(tmp_path / "own.json")
    run(saving, path=path)
    assert spmd.jit(layer, mesh=mesh).lower(X, W, topology=run(loading, path=path)).cost > 0

    def register(**more: Any) -> None:
        spmd.register_rule("test_fixes_total", "i j -> i", kinds={"j": "reduce"}, **more)

    (reduction,) = fix_of(register)
    register(reduction=run(reduction))
    (mesh_of_one, mesh_of_two) = fix_of(lambda: spmd.make_mesh((4, 2), data=8))
    assert run(mesh_of_one) == run(mesh_of_two)

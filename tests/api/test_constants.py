"""Arrays that a function closes over: they lie in pieces, and nobody passes them."""

from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.api import Compiled
from spmd.frontend.normalize import LARGE
from spmd.lowering.local import table as local
from tests.two_processes import run_both

TABLE = np.random.default_rng(0).standard_normal((512, 256), np.float32)
X = np.random.default_rng(1).standard_normal((512, 256), np.float32)


def placed(mesh: spmd.Mesh, x: Any = X) -> Any:
    return spmd.mark_sharding(x, mesh, ("data", "model"))


def shifted(x: Any) -> Any:
    return x + TABLE * x.sum()


def equal(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4), got, want)


def test_they_lie_in_pieces_and_are_placed_once(
    mesh: spmd.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    jitted = spmd.jit(shifted, mesh=mesh)
    compiled = jitted.compile(placed(mesh))
    (constant,) = compiled.executable.constants
    assert constant.sharding.shard_shape(TABLE.shape) == (128, 128)
    np.testing.assert_array_equal(constant, TABLE)
    for _ in range(3):  # the first call, and those that jax's dispatch knows
        equal(jitted(placed(mesh)), shifted(X))
    assert compiled.executable.constants[0] is constant
    equal(compiled(placed(mesh)), shifted(X))
    assert compiled.verify(placed(mesh))
    assert compiled.measure(placed(mesh), steps=2).seconds > 0
    monkeypatch.setattr(Compiled, "run", lambda *_: pytest.fail("a known call came to Python"))
    equal(jitted(placed(mesh)), shifted(X))


def test_memory_counts_the_pieces(mesh: spmd.Mesh) -> None:
    piece = TABLE.nbytes // 8
    options = spmd.Options(memory_limit=4 * piece)
    lowered = spmd.jit(shifted, mesh=mesh, options=options).lower(placed(mesh))
    assert (lowered.memory.arguments, lowered.memory.constants) == (piece, piece)
    compiled = lowered.compile()
    assert (compiled.memory.arguments, compiled.memory.constants) == (piece, piece)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * piece
    assert compiled.memory.peak_bytes == compiled.predicted_memory.peak


def test_they_are_no_arguments_to_the_user_and_reports_have_them_apart(
    mesh: spmd.Mesh, tmp_path: Path
) -> None:
    compiled = spmd.jit(shifted, mesh=mesh).compile(placed(mesh))
    assert len(jax.tree.leaves(compiled.in_shardings)) == 1
    assert len(jax.tree.leaves(compiled.input_shardings)) == 1
    summary, text = compiled.summary(), compiled.explain(prices=False)
    assert "arguments    1, 1 of them split" in summary
    assert "constants    1, 1 of them split; 64 KiB (unpartitioned 512 KiB, 8x less)" in summary
    assert "arguments: 1, 1 of them split" in text
    assert "constants: 1, 1 of them split" in text
    assert "constants/0" in compiled.explain("constants/0")
    compiled.report(tmp_path / "report.html", prices=False)
    assert ">Constants<" in (tmp_path / "report.html").read_text()
    lowered = spmd.jit(lambda x: x * 2, mesh=mesh).lower(placed(mesh))
    assert "constants:" not in lowered.explain(prices=False)
    lowered.report(tmp_path / "report.html", prices=False)
    assert ">Constants<" not in (tmp_path / "report.html").read_text()


def test_small_ones_stay_in_the_program_and_equal_ones_are_one(mesh: spmd.Mesh) -> None:
    small = TABLE.reshape(-1)[: LARGE // 4].reshape(64, 256)
    fn = lambda x: x + jnp.tile(jnp.asarray(small), (8, 1))  # noqa: E731
    lowered = spmd.jit(fn, mesh=mesh).lower(placed(mesh))
    assert lowered.stages.emitted.constants == ()
    assert lowered.memory.constants == LARGE
    copies = [TABLE.copy() for _ in range(3)]
    fn = lambda x: [x * c + i for i, c in enumerate(copies)]  # noqa: E731
    lowered = spmd.jit(fn, mesh=mesh).lower(placed(mesh))
    assert len(lowered.stages.emitted.constants) == 1
    assert list(spmd.auto(shifted, mesh, X).specs) == ["x"]  # how they lie is the plan's


def test_inside_of_loops_and_under_transformations(mesh: spmd.Mesh) -> None:
    weights = np.stack([TABLE[:256] / 16] * 3)

    def loss(x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) + TABLE, None), x, weights)
        return (h**2).sum()

    options = spmd.Options(check=True)
    inner = spmd.jit(loss, mesh=mesh, options=options)
    for fn in (jax.grad(loss), jax.grad(inner)):
        jitted = spmd.jit(fn, mesh=mesh, options=options)
        assert len(jitted.compile(placed(mesh)).stages.emitted.constants) == 2
        equal(jitted(placed(mesh)), jax.grad(loss)(X))
    equal(jax.jit(jax.vmap(inner))(X[None])[0], loss(X))


def test_of_any_type_and_size(mesh: spmd.Mesh) -> None:
    types = ("bfloat16", "int8", "bool", "complex64", "int4")
    large = np.abs(np.tile(TABLE, (4, 1))) > 1
    tables = [jnp.asarray(np.roll(large, i, 1)).astype(t) for i, t in enumerate(types)]

    def chosen(x: Any) -> Any:
        return [jnp.where(x > 0, jnp.real(table[:512]).astype(x.dtype), x) for table in tables]

    compiled = spmd.jit(chosen, mesh=mesh).compile(placed(mesh))
    assert len(compiled.stages.emitted.constants) == 5
    equal(compiled(placed(mesh)), jax.jit(chosen)(X))
    with jax.enable_x64(True):
        table = TABLE.astype(np.float64) + 1e-12
        jitted = spmd.jit(lambda x: x * table, mesh=mesh)
        x = placed(mesh, X.astype(np.float64))
        np.testing.assert_array_equal(jitted(x), X.astype(np.float64) * table)
    odd = np.tile(TABLE, (1, 3))[:511, :767]
    x = np.ones((511, 767), np.float32)
    jitted = spmd.jit(lambda x: jnp.cumsum(x + odd, 0), mesh=mesh)
    equal(jitted(x), np.cumsum(x + odd, 0))


def test_beside_donated_arguments(mesh: spmd.Mesh) -> None:
    jitted = spmd.jit(lambda state, x: (state + x * TABLE, x.sum()), mesh=mesh, donate_argnums=0)
    state = placed(mesh, jnp.zeros_like(X))
    for _ in range(3):
        state, _ = jitted(state, placed(mesh))
    equal(state, 3 * X * TABLE)


def test_verify_finds_a_wrong_op(mesh: spmd.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a constant: pieces of the program take it as an argument."""
    broken = {"stablehlo.subtract": lambda op: (op.b.binary("add", *op.operands),)}
    monkeypatch.setattr(local, "_LOCAL", {**local._LOCAL, **broken})
    compiled = spmd.jit(lambda x: jnp.sin(x * TABLE) - x, mesh=mesh).compile(placed(mesh))
    found = compiled.verify(placed(mesh))
    assert found.culprit is not None and found.culprit.op is not None
    assert found.culprit.op.label == "subtract"


def test_exported_they_are_in_the_text_and_modules_may_have_them(mesh: spmd.Mesh) -> None:
    lowered = spmd.jit(shifted, mesh=mesh).lower(placed(mesh))
    data = lowered.export().serialize()
    equal(jax.jit(jax.export.deserialize(data).call)(placed(mesh)), shifted(X))
    module = jax.jit(shifted).lower(X).as_text()
    compiled = spmd.compile_stablehlo(module, mesh, [("data", "model")])
    assert len(compiled.stages.emitted.constants) == 1
    equal(compiled(X)[0], shifted(X))


def test_two_processes() -> None:
    """Each places its own pieces; where their constants differ, both say so."""
    for said in run_both(Path(__file__).with_name("constants_of_two_processes.py")):
        assert said == {"is_right": True, "piece": [128, 256], "differing": "constants"}

"""`verify`: both programs on the same arguments, and the first op that is wrong by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.ir.types import TensorType
from spmd.lowering.local import table as local
from spmd.verify import Tolerance, Verification, compare, default_rtol
from tests.greedy import greedy_plans as greedy_plans

HERE = __file__
MESH = spmd.Mesh(None, (4, 2), ("data", "model"))
X = np.random.RandomState(0).rand(8, 16).astype(np.float32)
W = np.random.RandomState(1).rand(16, 16).astype(np.float32)


def line_of(text: str) -> str:
    """`file.py:12` of the only line of this file that ends with a comment."""
    with open(HERE, encoding="utf-8") as file:
        found = [n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    assert len(found) == 1, found
    return f"{HERE}:{found[0]} "


@pytest.fixture
def subtract_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong local lowering."""
    broken = {"stablehlo.subtract": lambda op: (op.b.binary("add", *op.operands),)}
    monkeypatch.setattr(local, "_LOCAL", {**local._LOCAL, **broken})


def verified(fn: Callable[..., Any], *args: Any, **options: Any) -> Verification:
    specs = (("data", None), (None, "model"))[: len(args)]
    return spmd.jit(fn, mesh=MESH, in_specs=specs, **options).compile(*args).verify(*args)


def straight(x: Any, w: Any) -> Any:
    h = jnp.tanh(x @ w)
    h = spmd.mark_sharding(h, MESH, ("data", "model"))
    a = jnp.exp(h) @ w.T
    b = a - x  # straight
    return {"sum": (b * 2).sum(0), "product": a}


def in_a_loop(x: Any, w: Any) -> Any:
    h = jnp.tanh(x @ w)

    def body(c: Any, i: Any) -> Any:
        c = jnp.sin(c) + h
        c = c - i  # loop
        return c * 0.5, c.sum(0)

    return lax.scan(body, h, jnp.asarray([0.0, 0.0, 0.25]))


def test_right_programs_agree() -> None:
    for fn in (straight, in_a_loop):
        found = verified(fn, X, W)
        assert found
        assert found.ok
        assert found.culprit is None
        assert "results agree" in str(found)
        assert str(found).count("ok ") == len(found.comparisons)


@pytest.mark.parametrize(
    ("fn", "comment", "inside"),
    [(straight, "straight", ()), (in_a_loop, "loop", ("iteration 3 of stablehlo.while",))],
)
def test_names_the_op_that_is_wrong(
    fn: Any, comment: str, inside: tuple[str, ...], subtract_adds: None
) -> None:
    found = verified(fn, X, W)
    assert not found
    if fn is straight:  # of its results one has no difference in it
        assert {c.name: c.ok for c in found.comparisons} == {"sum": False, "product": True}
    culprit = found.culprit
    assert culprit is not None
    assert culprit.op is not None
    assert culprit.op.name == "stablehlo.subtract"
    assert line_of(comment) in culprit.op.loc.source + " "
    text = str(found)
    assert f"at: {line_of(comment)}" in text
    assert "DIFFERS" in text
    assert "operand 0:" in text
    assert "result 0:" in text
    assert len(culprit.inside) == len(inside)
    for place, wanted in zip(culprit.inside, inside, strict=True):
        assert place.startswith(wanted)
        assert HERE in place


def test_donated_and_marked_arguments_survive_keys_and_keywords_too() -> None:
    x = spmd.mark_sharding(jnp.asarray(X), MESH, ("data", None))
    assert spmd.jit(lambda x: x * 2 + 1, mesh=MESH, donate_argnums=(0,)).compile(x).verify(x)
    np.testing.assert_array_equal(np.asarray(x), X)

    def fn(key: Any, *, x: Any) -> Any:
        return jax.random.normal(key, x.shape) + x, jax.random.split(key)[0]

    key = jax.random.key(0)
    assert spmd.jit(fn, mesh=MESH).compile(key, x=X).verify(key, x=X)


def test_tolerances_are_the_users_and_wrong_structure_is_an_error() -> None:
    compiled = spmd.jit(lambda x: (x @ x.T).sum(), mesh=MESH, in_specs=(("data", "model"),))
    assert compiled.compile(X).verify(X)
    exact = compiled.compile(X).verify(X, rtol=0.0, atol=0.0)
    assert exact.ok == (exact.comparisons[0].max_abs == 0)
    with pytest.raises(spmd.ArgumentError, match="another structure"):
        compiled.compile(X).verify(X, X)


def test_of_a_module() -> None:
    module = """
    module {
      func.func public @forward(%x: tensor<8x4xf64>, %n: tensor<4xi64>) -> (tensor<8x4xf64>) {
        %m = stablehlo.convert %n : (tensor<4xi64>) -> tensor<4xf64>
        %b = stablehlo.broadcast_in_dim %m, dims = [1] : (tensor<4xf64>) -> tensor<8x4xf64>
        %y = func.call @add(%x, %b) : (tensor<8x4xf64>, tensor<8x4xf64>) -> tensor<8x4xf64>
        return %y : tensor<8x4xf64>
      }
      func.func private @add(%x: tensor<8x4xf64>, %y: tensor<8x4xf64>) -> tensor<8x4xf64> {
        %z = stablehlo.add %x, %y : tensor<8x4xf64>
        return %z : tensor<8x4xf64>
      }
    }""".replace("@forward", "@main")
    compiled = spmd.compile_stablehlo(module, MESH, [("data", "model"), None])
    x = np.linspace(0, 1, 32).reshape(8, 4)
    found = compiled.verify(x, np.arange(4) + (1 << 40))
    assert found
    assert found.comparisons[0].type.dtype == "f64"


# Comparing.

F32, BF16, I32 = (TensorType((3,), d) for d in ("f32", "bf16", "i32"))


@pytest.mark.parametrize(
    ("type_", "got", "wanted", "ok"),
    [
        (F32, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0001], True),
        (F32, [1.0, 2.0, 3.0], [1.0, 2.0, 3.1], False),
        (F32, [0.0001, 0.0, 3.0], [0.0, 0.0, 3.0], True),
        (F32, [np.nan, np.inf, 3.0], [np.nan, np.inf, 3.0], True),
        (F32, [np.nan, 2.0, 3.0], [1.0, 2.0, 3.0], False),
        (F32, [1.0, -np.inf, 3.0], [1.0, np.inf, 3.0], False),
        (F32, [1.0, 2.0, 3.0], [1.0, np.inf, 3.0], False),
        (I32, [1, 2, 3], [1, 2, 3], True),
        (I32, [1, 2, 3], [1, 2, 4], False),
    ],
)
def test_compare(type_: TensorType, got: Any, wanted: Any, ok: bool) -> None:
    found = compare("x", type_, np.asarray(got), np.asarray(wanted), Tolerance(1e-4))
    assert found.ok == ok
    assert ("DIFFERS" in str(found)) != ok


def test_tolerance_by_the_narrowest_type_and_none_for_integers() -> None:
    assert default_rtol([F32, I32]) < default_rtol([F32, BF16])
    assert default_rtol([I32]) == default_rtol([F32])
    assert default_rtol([F32, TensorType((), "f8E4M3FN")]) > default_rtol([BF16])
    assert default_rtol([TensorType((), "complex<f64>")]) < default_rtol([F32])
    wide = TensorType((1,), "i64")
    found = compare("x", wide, np.asarray([2**62]), np.asarray([2**62 + 1]), Tolerance(1e-4))
    assert not found.ok

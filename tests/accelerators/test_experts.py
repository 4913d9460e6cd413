"""A mixture of experts on real accelerators, which have kernels for it: beside a loop over experts.

See `test_attention.py` for the command.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.ops import experts
from tests.accelerators.devices import COUNT, DEVICES
from tests.close import close
from tests.ops.test_experts import loss, operands, plain

SPLITS: dict[str, dict[str, Any]] = {
    "rows": {"rows": ("x", None, None)},
    "experts": {"in": ("x", None, None), "out": ("x", None, None)},
    "both": dict.fromkeys(("rows", "in", "out"), ("x", None, None)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_experts(name: str) -> None:
    mesh, specs = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT), SPLITS[name]

    def mark(name: str, x: Any) -> Any:
        return spmd.mark_sharding(x, mesh, specs[name]) if name in specs else x

    args = operands(b=2 * COUNT, s=16, count=2 * COUNT + 2 * (COUNT == 1), h=64, m=128)
    step = spmd.jit(loss(experts, mark), mesh=mesh)
    with jax.default_matmul_precision("float32"):
        close(step(*args), jax.jit(loss(plain))(*args), 1e-3)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [3, 150])
def test_experts_in_eight_bits(rows: int, dtype: str) -> None:
    """With biases and the activation that is cut off, as gpt-oss has them."""
    mesh = spmd.make_mesh(devices=DEVICES[:1], x=1)
    x, gates, chosen, *weights = operands(3, b=1, s=rows, count=9, h=256, m=192)
    values = [jnp.asarray(64 * w / jnp.abs(w).max(), dtype) for w in weights[:3]]
    scales = tuple(0.01 + 0.02 * jnp.abs(w).max(-1) for w in weights[:3])
    biases = tuple(jnp.asarray(w, jnp.bfloat16) for w in weights[3:])

    def run(x: Any, *operands: Any) -> Any:
        return experts(x, *operands, scales=scales, biases=biases, limit=2.0)

    x = jnp.asarray(x, jnp.bfloat16)
    found = spmd.jit(run, mesh=mesh)(x, gates, chosen, *values)
    wide = [v.astype(jnp.float32) * s[..., None] for v, s in zip(values, scales, strict=True)]
    given = {"biases": [b.astype(jnp.float32) for b in biases], "limit": 2.0}
    with jax.default_matmul_precision("float32"):
        close(found, plain(x.astype(jnp.float32), gates, chosen, *wide, **given), 0.02)


@pytest.mark.parametrize("inner", [256, 192, 72], ids=["wide tiles", "narrow tiles", "no tiles"])
def test_experts_in_half_precision(inner: int) -> None:
    """Of groups of many sizes, among them empty ones; the same twice, bit for bit."""
    mesh = spmd.make_mesh(devices=DEVICES[:1], x=1)
    args = operands(b=3, s=150, count=9, h=256, m=inner)
    halves = [x if x.dtype == "int32" else jnp.asarray(x / 4, jnp.bfloat16) for x in args]
    step = spmd.jit(loss(experts), mesh=mesh)
    found, again = step(*halves), step(*halves)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert jnp.array_equal(a, b)
    wide = [x if x.dtype == "int32" else x.astype(jnp.float32) for x in halves]
    with jax.default_matmul_precision("float32"):
        close(found[1], jax.jit(loss(plain))(*wide)[1], 0.02)

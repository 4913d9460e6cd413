"""Programs imported from jitted functions, with every kind of op, attribute, body and region."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from spmd.frontend.importer.module import import_module
from spmd.ir.program import Program

WEIGHTS = {"in": jnp.ones((4, 8)), "out": jnp.ones((8, 2), jnp.bfloat16)}
BATCH = jnp.ones((16, 4))
INDICES = jnp.arange(6, dtype=jnp.int32)


def train_step(weights, batch):
    def loss(weights):
        h = jax.nn.gelu(batch @ weights["in"])
        return jnp.mean((h.astype(jnp.bfloat16) @ weights["out"]).astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), weights, grads), value


def scan_with_residuals(x, weights):
    def body(carry, weight):
        carry = jnp.tanh(carry @ weight)
        return carry, carry.sum(axis=0)

    def loss(x, weights):
        last, sums = jax.lax.scan(body, x, weights)
        return last.sum() + (sums**2).sum()

    return jax.grad(loss, argnums=(0, 1))(x, weights)


def control_flow(x, i):
    x = jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: x + 1, x)
    x = jax.lax.cond(x.sum() > 3, jnp.sin, lambda x: -x, x)
    return jax.lax.switch(i, [lambda x: x * 2, jnp.cos, lambda x: x @ x], x)


def take_and_its_gradient(table, indices):
    def loss(table):
        return (jnp.take(table, indices, axis=0) ** 2).sum()

    return loss(table), jax.grad(loss)(table)


def sorts_and_windows(x):
    pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")
    return jnp.sort(x, axis=-1), jnp.argmax(x, axis=0), jnp.cumsum(x, axis=1), pooled


def constants():
    return (
        np.arange(4, dtype=ml_dtypes.bfloat16) / 3,
        np.array([-3, 7, 0], ml_dtypes.int4),
        np.array([[True, False], [False, False]]),
        np.full((3, 5), np.nan, np.float32),
        np.array([np.inf, -np.inf, -0.0, 0.1], np.float32),
        np.array([1 + 2j, np.nan], np.complex64),
        np.arange(100, dtype=np.uint8),
        np.zeros((0, 3), np.float16),
        jnp.float8_e5m2(1.5),
    )


def batched_dot(q, k):
    return jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest")


def convolution(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "train_step": (train_step, (WEIGHTS, BATCH)),
    "scan": (scan_with_residuals, (jnp.ones((2, 4)), jnp.ones((3, 4, 4)))),
    "control_flow": (control_flow, (jnp.ones((4, 4)), jnp.int32(1))),
    "take": (take_and_its_gradient, (BATCH, INDICES)),
    "sorts": (sorts_and_windows, (BATCH,)),
    "constants": (constants, ()),
    "batched_dot": (batched_dot, (jnp.ones((2, 3, 4, 5)), jnp.ones((2, 3, 6, 5)))),
    "convolution": (convolution, (jnp.ones((1, 2, 8, 8)), jnp.ones((3, 2, 3, 3)))),
}


def stablehlo(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A function's StableHLO module, lowered for a CPU."""
    traced = jax.jit(fn, keep_unused=True, **options).trace(*args)
    return traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")


def program_of(fn: Callable[..., Any], *args: Any) -> Program:
    return import_module(stablehlo(fn, *args)).program


def example(name: str) -> Program:
    fn, args = FUNCTIONS[name]
    return program_of(fn, *args)

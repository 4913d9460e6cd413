"""jax.numpy beyond networks: linear algebra, indexing, control flow."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.corpus.program import Made, integers, normal

BATCH, SIZE = 8, 4


def positive(a: Any) -> Any:
    """A well-conditioned positive definite matrix for each matrix."""
    return a @ a.swapaxes(-1, -2) + 2 * jnp.eye(a.shape[-1])


def linalg_gradients() -> Made:
    """Gradients through qr, cholesky, solve, eigh, svd and slogdet of a parameter and a batch."""

    def loss(w: Any, a: Any, b: Any) -> Any:
        spd = positive(a @ w)
        _, r = jnp.linalg.qr(a @ w)
        values, vectors = jnp.linalg.eigh(spd)
        rebuilt = jnp.einsum("bij,bj,bkj->bik", vectors, jnp.sqrt(values), vectors)
        x = jnp.linalg.solve(jnp.linalg.cholesky(spd), b)
        singular = jnp.linalg.svd(a + w, compute_uv=False)
        return (
            jnp.sum(jnp.abs(r)) + jnp.sum(rebuilt**2) + jnp.sum(x**2)
            + jnp.sum(jnp.log(singular)) + jnp.linalg.slogdet(spd)[1].sum()
        )  # fmt: skip

    a = normal(0, BATCH, SIZE, SIZE) + 2 * jnp.eye(SIZE)
    args = (normal(1, SIZE, SIZE) * 0.3 + jnp.eye(SIZE), a, normal(2, BATCH, SIZE, 2))
    return Made(jax.value_and_grad(loss, (0, 1, 2)), args, ("params", "batch", "batch"))


def indexing() -> Made:
    """Gather, scatter, segment sums, roll, dynamic slices, pad, where, meshgrid; gradients."""

    def reads(table: Any, n: Any, x: Any) -> Any:
        return [
            table[n],
            jnp.take_along_axis(x, n, 1),
            table.at[n[:, 0]].add(x[:, :8]),
            table.at[n[:, 1], 2].set(3.0),
            table.at[n[:, 0]].max(x[:, :8]),
            jax.ops.segment_sum(x, n[:, 2], num_segments=16),
            jnp.roll(x, 3, 0) + jnp.roll(x, (1, 2), (0, 1)),
            lax.dynamic_slice(x, (n[0, 0] % 4, n[0, 1] % 4), (4, 4)),
            lax.dynamic_update_slice(x, table[:2, :4], (n[0, 2] % 6, 3)),
            jnp.pad(x, ((1, 2), (0, 3)), mode="reflect"),
            jnp.where(x > 0, x, -0.1 * x)[::-1, ::2],
            jnp.repeat(x, 2, 0) + jnp.tile(x, (2, 1)),
            jnp.tril(x) + jnp.triu(x, 2),
            x[:, None, :4] * jnp.stack(jnp.meshgrid(x[0, :4], x[1, :4])).sum(0),
            jnp.concatenate([x, x[:4]]).reshape(4, -1),
            jnp.convolve(x[:, 0], table[0], mode="same"),
            jnp.interp(x, jnp.linspace(-3, 3, 8), table[0]),
        ]

    def loss(table: Any, n: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.cos(r)) for r in reads(table, n, x))

    def fn(table: Any, n: Any, x: Any) -> Any:
        return reads(table, n, x), jax.grad(loss, (0, 2))(table, n, x)

    args = (normal(0, 16, 8), integers(1, 8, BATCH, 3), normal(2, BATCH, 8))
    return Made(fn, args, ("params", "batch", "batch"))


def control_flow() -> Made:
    """while_loop until convergence, fori_loop with a traced bound, cond, switch, map, scan."""

    def fn(w: Any, x: Any, steps: Any) -> Any:
        def not_done(carry: Any) -> Any:
            x, old, count = carry
            return (jnp.max(jnp.abs(x - old)) > 1e-3) & (count < 50)

        def newton(carry: Any) -> Any:
            x, _, count = carry
            return 0.5 * jnp.tanh(x @ w) + 0.1, x, count + 1

        fixed, _, count = lax.while_loop(not_done, newton, (x, x + 1.0, 0))
        looped = lax.fori_loop(0, steps, lambda i, y: jnp.sin(y @ w) + i, x)
        chosen = lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: x - 1.0)
        switched = lax.switch(steps % 3, [jnp.sin, jnp.cos, lambda a: a @ w], x)
        mapped = lax.map(lambda row: jnp.outer(row, row).sum(0), x, batch_size=2)
        until = jax.vmap(lambda a: lax.while_loop(lambda b: b.sum() < 9, lambda b: b + 1.0, a))(x)
        return fixed, count, looped, chosen, switched, mapped, until

    args = (normal(0, SIZE, SIZE) * 0.3, normal(1, BATCH, SIZE), jnp.int32(5))
    return Made(fn, args, ("params", "batch", "open"))

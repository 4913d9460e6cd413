"""jax.numpy beyond networks: linear algebra, sorting, indexing, scans, control flow."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.corpus.program import Made
from benchmarks.corpus.training import integers, normal

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
        determinant = jnp.linalg.slogdet(spd)[1]
        return (
            jnp.sum(jnp.abs(r)) + jnp.sum(rebuilt**2) + jnp.sum(x**2)
            + jnp.sum(jnp.log(singular)) + determinant.sum()
        )  # fmt: skip

    a = normal(0, BATCH, SIZE, SIZE) + 2 * jnp.eye(SIZE)
    args = (normal(1, SIZE, SIZE) * 0.3 + jnp.eye(SIZE), a, normal(2, BATCH, SIZE, 2))
    return Made(jax.value_and_grad(loss, (0, 1, 2)), args, ("params", "batch", "batch"))


def sorting() -> Made:
    """sort, argsort, lexsort, top_k, searchsorted, unique, histogram, quantiles; gradients."""

    def fn(x: Any, n: Any) -> Any:
        edges = jnp.linspace(-2, 2, 9)
        return {
            "sort": (jnp.sort(x, 1), jnp.sort(x, 0), jnp.argsort(x, 0), jnp.argsort(x, 1)),
            "lexsort": jnp.lexsort((x[:, 0], n[:, 0])),
            "top_k": (lax.top_k(x, 3), lax.approx_max_k(x, 3, aggregate_to_topk=True)),
            "searchsorted": (jnp.searchsorted(edges, x), jnp.digitize(x, edges)),
            "unique": jnp.unique(n, size=8, fill_value=-1, return_counts=True),
            "nonzero": jnp.nonzero(n > 2, size=16, fill_value=0),
            "counts": (jnp.bincount(n.ravel(), length=6), jnp.histogram(x, edges)[0]),
            "quantiles": (jnp.median(x, 0), jnp.percentile(x, 30.0, axis=1)),
            "best": (jnp.argmax(x, 0), jnp.argmin(x, 1), jnp.argmax(x)),
            "partition": jnp.sort(jnp.partition(x, 3, axis=1)[:, :3], 1),
            "gradient": jax.grad(lambda x: jnp.sum(jnp.sort(x, 0) * jnp.arange(8.0)))(x),
            "pooled": jax.grad(lambda x: jnp.sum(lax.top_k(x, 2)[0] ** 2))(x),
        }

    return Made(fn, (normal(0, BATCH, 8), integers(1, 6, BATCH, 4)), ("batch", "batch"))


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


def cumulative() -> Made:
    """cumsum, cumprod, cummax, cumlogsumexp, associative_scan along split and unsplit dims."""

    def all_of(x: Any) -> Any:
        def along(axis: int) -> Any:
            return [
                jnp.cumsum(x, axis),
                jnp.cumprod(x, axis),
                lax.cummax(x, axis),
                lax.cumlogsumexp(x, axis, reverse=True),
                lax.associative_scan(lambda p, q: p * 0.5 + q, x, axis=axis, reverse=True),
                jnp.diff(x, axis=axis),
            ]

        return along(0), along(1)

    def fn(x: Any) -> Any:
        return all_of(x), jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(all_of(x)))))(x)

    return Made(fn, (normal(0, BATCH, 8),), ("batch",))


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

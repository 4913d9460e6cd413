"""Programs of linear algebra, Fourier transforms and random numbers; see `cases.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import lax
from jax.experimental import sparse


def matrices(*shape: int, seed: int = 0) -> Any:
    return np.random.RandomState(seed).uniform(-1, 1, shape).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> Any:
    """Symmetric positive definite matrices with distinct eigenvalues."""
    x = matrices(*shape, seed=seed)
    diagonal = np.diag(np.arange(1, shape[-1] + 1)).astype(np.float32)
    return (x @ np.swapaxes(x, -1, -2) * 0.1 + diagonal).astype(np.float32)


def triangular(*shape: int, seed: int = 0) -> Any:
    return np.tril(matrices(*shape, seed=seed) * 0.2 + 2 * np.eye(shape[-1], dtype=np.float32))


TALL = matrices(4, 8, 6, 4)
SQUARE = matrices(8, 4, 4) + 2 * np.eye(4, dtype=np.float32)
SPD = positive(8, 4, 4)
LOWER = triangular(8, 4, 4)
SIDES = matrices(8, 4, 16, seed=1)
LONG = matrices(8, 4, 16)
COMPLEX = (SQUARE + 1j * matrices(8, 4, 4, seed=3)).astype(np.complex64)


def solve(**options: Any) -> Any:
    return lambda a, b: lax.linalg.triangular_solve(a, b, **options)


def tridiagonal_solve(d: Any, b: Any) -> Any:
    return lax.linalg.tridiagonal_solve(d * 0.1, d + 3, d * 0.2, b)


def rbg(impl: str, sample: Any) -> Any:
    def fn(x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(7, impl=impl), 3)
        first, second = jax.random.split(key)
        return x * sample(first, x.shape), sample(second, (16, 8))

    return fn


def sparse_products(values: Any, x: Any) -> Any:
    """A matrix of 8 rows with two elements each, times a matrix and times a vector."""
    columns, starts = jnp.arange(0, 48, 3) % 16, jnp.arange(0, 18, 2)
    matrix = sparse.BCSR((values, columns, starts), shape=(8, 16))
    return matrix @ x, matrix @ x[:, 0]


LINALG: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("fft", jnp.fft.fft, (LONG,)),
    ("fft2", lambda x: jnp.fft.fft2(x), (LONG,)),
    ("ifft", lambda x: jnp.fft.ifft(x + 1j * x[::-1]), (LONG,)),
    ("rfft", jnp.fft.rfft, (LONG,)),
    ("irfft", lambda x: jnp.fft.irfft(x + 1j * x[::-1], n=16), (LONG,)),
    ("fft_gradient", jax.grad(lambda x: (jnp.abs(jnp.fft.rfft(x)) ** 2).sum()), (LONG,)),
    ("linalg_cholesky", jnp.linalg.cholesky, (SPD,)),
    ("linalg_cholesky_complex", lambda x: jnp.linalg.cholesky(x + 0j), (SPD,)),
    ("linalg_qr", jnp.linalg.qr, (TALL,)),
    ("linalg_qr_complete", lambda x: jnp.linalg.qr(x, mode="complete"), (TALL,)),
    ("linalg_qr_pivoting", lambda x: tuple(jsl.qr(x, pivoting=True)), (TALL[0],)),
    ("linalg_svd", lambda x: jnp.linalg.svd(x, full_matrices=False), (TALL,)),
    ("linalg_svd_values", lambda x: jnp.linalg.svd(x, compute_uv=False), (TALL,)),
    ("linalg_eigh", lambda x: tuple(jnp.linalg.eigh(x)), (SPD,)),
    ("linalg_eig", lambda x: tuple(jnp.linalg.eig(x)), (SQUARE,)),
    ("linalg_lu", lambda x: tuple(jsl.lu_factor(x)), (SQUARE,)),
    ("linalg_inv", jnp.linalg.inv, (SQUARE,)),
    ("linalg_inv_complex", jnp.linalg.inv, (COMPLEX,)),
    ("linalg_slogdet", lambda x: tuple(jnp.linalg.slogdet(x)), (SQUARE,)),
    ("linalg_solve", jnp.linalg.solve, (SQUARE, SIDES)),
    ("linalg_schur", lambda x: tuple(jsl.schur(x)), (SQUARE,)),
    ("linalg_hessenberg", lambda x: tuple(lax.linalg.hessenberg(x)), (SQUARE,)),
    ("linalg_tridiagonal", lambda x: tuple(lax.linalg.tridiagonal(x)), (SPD,)),
    ("linalg_tridiagonal_solve", tridiagonal_solve, (SIDES[..., 0], SIDES)),
    ("linalg_householder", lambda x: lax.linalg.householder_product(x, x[..., 0, :]), (TALL,)),
    ("linalg_expm", jsl.expm, (SQUARE * 0.1,)),
    ("linalg_pinv", jnp.linalg.pinv, (TALL[0],)),
    ("linalg_lstsq", lambda a, b: jnp.linalg.lstsq(a, b)[0], (TALL[0, 0], matrices(6, 8))),
    ("triangular_left", solve(left_side=True, lower=True), (LOWER, SIDES)),
    ("triangular_right", solve(lower=True), (LOWER, np.swapaxes(SIDES, 1, 2).copy())),
    ("triangular_transposed", solve(left_side=True, lower=True, transpose_a=True), (LOWER, SIDES)),
    ("triangular_of_sum",
     lambda a, x, y: lax.linalg.triangular_solve(a, x @ y, left_side=True, lower=True),
     (LOWER, matrices(8, 4, 16), matrices(8, 16, 8))),
    (
        "cholesky_gradient",
        jax.grad(lambda x: jnp.log(jnp.diagonal(jnp.linalg.cholesky(x), axis1=1, axis2=2)).sum()),
        (SPD,),
    ),
    ("sparse_products", sparse_products, (matrices(16), matrices(16, 8, seed=1))),
    ("random_threefry", rbg("threefry2x32", jax.random.normal), (SIDES[0],)),
    ("random_rbg", rbg("rbg", jax.random.normal), (SIDES[0],)),
    ("random_unsafe_rbg", rbg("unsafe_rbg", jax.random.uniform), (SIDES[0],)),
    ("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (8, 16), dtype=np.uint32),
     (np.arange(4, dtype=np.uint32),)),
)  # fmt: skip
"""(name, function, arguments)."""

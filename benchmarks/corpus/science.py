"""Scientific programs of jax's own libraries: equations, signals, small types."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax
from jax.experimental import sparse
from jax.experimental.ode import odeint

from benchmarks.corpus.program import Made, integers, normal

BATCH = 8


def ode() -> Made:
    """A neural differential equation by odeint, and its adjoint."""

    def loss(w: Any, x: Any) -> Any:
        path = odeint(lambda y, t: jnp.tanh(y @ w) * jnp.cos(t), x, jnp.linspace(0.0, 1.0, 4))
        return jnp.mean(path**2)

    args = (normal(0, 4, 4) * 0.5, normal(1, BATCH, 4))
    return Made(jax.value_and_grad(loss, (0, 1)), args, ("params", "batch"))


def signals() -> Made:
    """Convolutions, STFT, map_coordinates, scale_and_translate, polynomials, sparse matrices."""

    def fn(kernel: Any, x: Any) -> Any:
        matrix = sparse.BCOO.fromdense(jnp.eye(16)[::2], nse=8)
        rows = jnp.linspace(0.0, 6.0, 16).reshape(4, 4)
        return {
            "convolve": jsp.signal.convolve(x, kernel, mode="same"),
            "fft": jsp.signal.fftconvolve(x, kernel, mode="valid"),
            "stft": jnp.abs(jsp.signal.stft(x, nperseg=8)[2]),
            "coordinates": jsp.ndimage.map_coordinates(x, [rows, rows.T], order=1),
            "resized": jax.image.resize(x, (BATCH, 8), "cubic"),
            "poly": (jnp.polyval(kernel[0], x), jnp.vander(x[:, 0], 3)),
            "sparse": matrix @ x.T,
            "gradient": jax.grad(lambda k: jnp.sum(jsp.signal.convolve(x, k) ** 2))(kernel),
            "dct": jsp.fft.dct(x, axis=1),
            "trapezoid": jsp.integrate.trapezoid(x, axis=1),
            "covariance": (jnp.cov(x), jnp.corrcoef(x.T)),
        }

    return Made(fn, (normal(0, 2, 4), normal(1, BATCH, 16)), ("params", "batch"))


def quantized() -> Made:
    """int8 and float8 matrix products with scales, bit operations, packing, complex numbers."""

    def fn(w: Any, x: Any, n: Any) -> Any:
        scale = jnp.max(jnp.abs(x), 1, keepdims=True) / 127
        small = jnp.round(x / scale).astype(jnp.int8)
        weights = jnp.round(w * 50).astype(jnp.int8)
        product = lax.dot(small, weights, preferred_element_type=jnp.int32)
        narrow = lax.dot(
            x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16),
            w.astype(jnp.float8_e5m2).astype(jnp.bfloat16),
            preferred_element_type=jnp.float32,
        )
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        wave = lax.complex(x, x[::-1])
        return {
            "int8": (product, product * scale / 50),
            "float8": narrow,
            "bits": (bits >> 3, lax.population_count(bits), lax.clz(bits), ~n & 5, n ^ 3),
            "bytes": lax.bitcast_convert_type(bits, jnp.uint8),
            "packed": jnp.packbits(n > 2, axis=1),
            "division": (n // 4, n % -3, jnp.divmod(n, 5), jnp.gcd(n, 6)),
            "complex": (wave @ wave.conj().T, jnp.angle(wave), jnp.exp(wave * 0.1)),
            "rounded": lax.reduce_precision(x, 5, 10),
        }

    args = (normal(0, 8, 8), normal(1, BATCH, 8), integers(2, 100, BATCH, 8))
    return Made(fn, args, ("params", "batch", "batch"))

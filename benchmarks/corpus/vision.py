"""Convolutional networks in plain jax.lax."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.corpus.program import Made, cross_entropy, integers, normal, trained

BATCH = 8
LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=LAYOUT)


def batch_norm(x: Any, p: Any) -> Any:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return p["scale"] * (x - mean) * lax.rsqrt(var + 1e-5) + p["bias"]


def group_norm(x: Any) -> Any:
    b, h, w, c = x.shape
    y = x.reshape(b, h, w, 4, c // 4)
    mean, var = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    return ((y - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)


def resnet() -> Made:
    """A ResNet block stack scanned over blocks, batch norm over the split batch: one SGD step."""
    blocks = {
        "w1": 0.2 * normal(0, 3, 3, 3, 16, 16),
        "w2": 0.2 * normal(1, 3, 3, 3, 16, 16),
        "n1": {"scale": jnp.ones((3, 16)), "bias": jnp.zeros((3, 16))},
        "n2": {"scale": jnp.ones((3, 16)), "bias": jnp.zeros((3, 16))},
    }
    params = {
        "stem": 0.2 * normal(2, 5, 5, 3, 16),
        "norm": {"scale": jnp.ones(16), "bias": jnp.zeros(16)},
        "blocks": blocks,
        "head": 0.2 * normal(3, 16, 8),
    }

    def block(x: Any, p: Any) -> tuple[Any, None]:
        h = jax.nn.relu(batch_norm(conv(x, p["w1"]), p["n1"]))
        return jax.nn.relu(x + batch_norm(conv(h, p["w2"]), p["n2"])), None

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = jax.nn.relu(batch_norm(conv(images, params["stem"], 2), params["norm"]))
        window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
        x = lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")
        x, _ = lax.scan(block, x, params["blocks"])
        return cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    return trained(loss, params, normal(4, BATCH, 16, 16, 3), integers(5, 8, BATCH))


def unet() -> Made:
    """A diffusion U-Net: time embedding, group norm, conv down, conv_transpose up, skips."""
    params = {
        "time": 0.2 * normal(0, 16, 16),
        "in": 0.2 * normal(1, 3, 3, 4, 16),
        "down": 0.2 * normal(2, 3, 3, 16, 32),
        "mid": 0.1 * normal(3, 3, 3, 32, 32),
        "qkv": 0.2 * normal(4, 32, 3, 32),
        "up": 0.2 * normal(5, 2, 2, 32, 16),
        "merge": 0.2 * normal(6, 3, 3, 32, 16),
        "out": 0.2 * normal(7, 3, 3, 16, 4),
    }

    def embed(t: Any) -> Any:
        angles = t[:, None] * jnp.exp(-jnp.arange(8) / 2.0)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)

    def attend(x: Any, qkv: Any) -> Any:
        q, k, v = jnp.einsum("bhwc,ctd->tbhwd", group_norm(x), qkv)
        q, k, v = (a.reshape(len(a), -1, a.shape[-1]) for a in (q, k, v))
        return x + jax.nn.dot_product_attention(
            q[:, :, None], k[:, :, None], v[:, :, None]
        ).reshape(x.shape)

    def net(p: Any, x: Any, t: Any) -> Any:
        time = jax.nn.silu(embed(t) @ p["time"])[:, None, None]
        skip = jax.nn.silu(group_norm(conv(x, p["in"]))) + time
        h = jax.nn.silu(group_norm(conv(skip, p["down"], 2)))
        h = attend(h + conv(h, p["mid"]), p["qkv"])
        up = lax.conv_transpose(h, p["up"], (2, 2), "SAME")
        near = jax.image.resize(h[..., :16], up.shape, "nearest")
        linear = jax.image.resize(h[..., 16:], up.shape, "bilinear")
        h = conv(jnp.concatenate([up + near + linear, skip], -1), p["merge"])
        return conv(jax.nn.silu(group_norm(h)), p["out"])

    def loss(params: Any, x: Any, t: Any, key: Any) -> Any:
        noise = jax.random.normal(key, x.shape)
        level = jnp.cos(t)[:, None, None, None]
        noisy = level * x + jnp.sqrt(1 - level**2) * noise
        return jnp.mean((net(params, noisy, t) - noise) ** 2)

    times = jnp.linspace(0.1, 1.5, BATCH)
    return trained(loss, params, normal(8, BATCH, 8, 8, 4), times, random=jax.random.key(0))

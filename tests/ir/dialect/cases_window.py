"""Cases of ops that read their neighbours' pieces: convolution, pooling, slices, pads, joins."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _floats(*shape: int, seed: int = 0) -> Any:
    return np.random.RandomState(seed).uniform(0.1, 0.9, shape).astype(np.float32)


X = _floats(8, 16)
Y = _floats(8, 16, seed=1)
LINE = _floats(4, 24, seed=2)
IMAGE = _floats(4, 16, 16, 8, seed=3)
KERNEL = _floats(3, 3, 8, 8, seed=4)
START = np.asarray([5, 3, 0, 2], np.int32)


def conv(
    strides: tuple[int, ...] = (1, 1),
    padding: Any = "SAME",
    numbers: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"),
    **how: Any,
) -> Callable[[Any, Any], Any]:
    return lambda x, k: lax.conv_general_dilated(
        x, k, strides, padding, dimension_numbers=numbers, **how
    )


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Both gradients of a weighted sum of a function's result."""

    def loss(*args: Any) -> Any:
        y = fn(*args)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()

    return lambda *args: jax.grad(loss, tuple(range(len(args))))(*args)


def pool(kind: str, window: int, stride: int, padding: Any = "SAME", **how: Any) -> Any:
    """Max or average pooling over the two inner dims of an image."""
    init, op = (-jnp.inf, lax.max) if kind == "max" else (0.0, lax.add)
    sizes, strides = (1, window, window, 1), (1, stride, stride, 1)
    return lambda x: lax.reduce_window(x, init, op, sizes, strides, padding, **how)


def _totals(x: Any) -> Any:
    return (
        jnp.cumsum(x, 1), jnp.cumprod(0.3 * x, 0), lax.cumlogsumexp(x, 1), lax.cummax(x, 1),
        lax.cumsum(x, 1, reverse=True),
    )  # fmt: skip


def _arg_window(x: Any) -> Any:
    """The largest element of each window and where it is: a reduction of two operands."""

    def larger(a: Any, b: Any) -> Any:
        better = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return lax.select(better, a[0], b[0]), lax.select(better, a[1], b[1])

    places = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    inits = (np.float32(-np.inf), np.int32(2**31 - 1))
    return lax.reduce_window((x, places), inits, larger, (1, 3), (1, 2), "SAME")


Entry = tuple[str, Callable[..., Any], tuple[Any, ...]]

MOVES: tuple[Entry, ...] = (
    ("slice_strided", lambda x: jnp.sin(x)[1:8:2, 2:15:3] * 2, (X,)),
    ("slice_one", lambda x: jnp.sin(x)[3, 5:6] + 1, (X,)),
    ("slice_one_flag", lambda x: (x > 0.5)[2:3, 4], (X,)),
    ("slice_halves", lambda x: x[:, :8] * x[:, 8:], (X,)),
    ("slice_uneven", lambda x: jnp.tanh(jnp.tanh(x[:, 1:15])[:, 2:13]), (X,)),
    ("pad_uneven", lambda x: jnp.tanh(lax.pad(x, 2.0, ((0, 0, 0), (3, 2, 0)))).sum(0), (X,)),
    ("pad_interior", lambda x: lax.pad(jnp.sin(x), 0.5, ((1, 0, 1), (0, 1, 2))), (X,)),
    ("pad_negative", lambda x: lax.pad(jnp.sin(x), 0.5, ((-1, 1, 0), (2, -6, 1))), (X,)),
    ("pad_edge", lambda x: jnp.pad(x, ((0, 0), (3, 5)), mode="edge"), (X,)),
    ("pad_reflect", lambda x: jnp.pad(x, ((0, 0), (3, 5)), mode="reflect"), (X,)),
    ("pad_wrap", lambda x: jnp.pad(x, ((1, 1), (2, 6)), mode="wrap"), (X,)),
    ("roll", lambda x: jnp.roll(x, 3, axis=1), (X,)),
    ("roll_both", lambda x: jnp.roll(x, (-2, 5), axis=(0, 1)), (X,)),
    ("roll_gradient", gradients(lambda x: jnp.roll(x * x, 3, axis=1)), (X,)),
    ("concatenate_rows", lambda x, y: jnp.concatenate([x, y[:3], x[1:6]], axis=0) * 2, (X, Y)),
    ("concatenate_uneven", lambda x, y: jnp.concatenate([x[:, :5], y, x[:, 3:6]], 1), (X, Y)),
    ("concatenate_gradient", gradients(lambda x, y: jnp.concatenate([x * y, y], 1)), (X, Y)),
    ("stack", lambda x, y: jnp.stack([x, y, x + y, x - y]), (X, Y)),
    ("split", lambda x: tuple(p * 2 for p in jnp.split(x, (3, 7, 8, 12), axis=1)), (X,)),
    ("flip", lambda x: jnp.flip(x, (0, 1)) - x, (X,)),
    ("flip_uneven", lambda x: jnp.flip(jnp.sin(x)[:, :11], 1) + x[:, 2:13], (X,)),
    ("dynamic_slice_both", lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (3, 5)), (X, START)),
    ("dynamic_slice_late", lambda x, i: lax.dynamic_slice(x, (i[0] * 9, i[2] - 7), (2, 11)),
     (X, START)),
    ("dynamic_slice_one", lambda x, i: lax.dynamic_index_in_dim(x, i[0], 0), (X, START)),
    ("dynamic_slice_uneven", lambda x, i: lax.dynamic_slice(jnp.sin(x[:, :13]), (0, i[0]), (8, 4)),
     (X, START)),
    ("dynamic_update_both", lambda x, y, i: lax.dynamic_update_slice(x, y[:3, :5], (i[0], i[1])),
     (X, Y, START)),
    ("dynamic_update_late", lambda x, y, i: lax.dynamic_update_slice(x, y[:, :9], (0, i[0] * 2)),
     (X, Y, START)),
    ("dynamic_update_one", lambda x, y, i: lax.dynamic_update_slice(x, y[:1], (i[1], 0)),
     (X, Y, START)),
    ("dynamic_slice_gradient",
     lambda x, i: jax.grad(lambda x: (lax.dynamic_slice(x, (i[0], i[1]), (3, 5)) ** 2).sum())(x),
     (X, START)),
    ("associative_scan", lambda x: lax.associative_scan(jnp.add, x, axis=1), (X,)),
)  # fmt: skip

POOLS: tuple[Entry, ...] = (
    ("cumulatives", _totals, (X,)),
    ("cumsum_gradient", gradients(lambda x: jnp.cumsum(x * x, 1)), (X,)),
    ("cumprod_gradient", gradients(lambda x: jnp.cumprod(x, 1)), (X,)),
    ("cummax_gradient", gradients(lambda x: lax.cummax(x, 1)), (X,)),
    ("cumlogsumexp_gradient", gradients(lambda x: lax.cumlogsumexp(x, 1)), (X,)),
    ("cummin_uneven", lambda x: lax.cummin(jnp.sin(x)[:, :13], 1, reverse=True), (X,)),
    ("max_pool", pool("max", 3, 2), (IMAGE,)),
    ("max_pool_gradient", gradients(pool("max", 3, 2)), (IMAGE,)),
    ("max_pool_apart", gradients(pool("max", 2, 3, "VALID")), (IMAGE,)),
    ("max_pool_all", pool("max", 16, 1, "VALID"), (IMAGE,)),
    ("avg_pool", pool("avg", 2, 2), (IMAGE,)),
    ("avg_pool_all", lambda x: pool("avg", 16, 1, "VALID")(x) / 256, (IMAGE,)),
    ("avg_pool_of_sum", lambda x, w: pool("avg", 3, 1)(x @ w), (IMAGE, _floats(8, 8))),
    ("avg_pool_gradient", gradients(pool("avg", 3, 2, ((0, 0), (2, 1), (0, 3), (0, 0)))),
     (IMAGE,)),
    ("pool_dilated",
     pool("avg", 3, 2, ((0, 0), (2, 1), (1, 3), (0, 0)), base_dilation=(1, 2, 3, 1),
          window_dilation=(1, 2, 1, 1)), (IMAGE,)),
    ("pool_variadic", _arg_window, (X,)),
)  # fmt: skip

CONVOLUTIONS: tuple[Entry, ...] = (
    ("conv", conv(), (IMAGE, KERNEL)),
    ("conv_gradient", gradients(conv()), (IMAGE, KERNEL)),
    ("conv_strided", gradients(conv((2, 2))), (IMAGE, KERNEL)),
    ("conv_peer_wrong", gradients(conv((2, 2), ((2, 1), (0, 3)), rhs_dilation=(2, 1))),
     (IMAGE, KERNEL)),
    ("conv_crop", gradients(conv((1, 2), ((-1, -2), (3, -1)))), (IMAGE, KERNEL)),
    ("conv_transpose", gradients(conv((1, 1), ((1, 2), (2, 2)), lhs_dilation=(2, 2))),
     (IMAGE, KERNEL)),
    ("conv_dilated", gradients(conv((3, 1), ((2, 3), (1, 4)), lhs_dilation=(2, 3),
                                    rhs_dilation=(1, 2))), (IMAGE, KERNEL)),
    ("conv_groups", gradients(conv(feature_group_count=4)), (IMAGE, _floats(3, 3, 2, 8))),
    ("conv_depthwise", gradients(conv(feature_group_count=8)), (IMAGE, _floats(3, 3, 1, 8))),
    ("conv_depthwise_many", gradients(conv(feature_group_count=8)), (IMAGE, _floats(3, 3, 1, 16))),
    ("conv_batch_groups", gradients(conv(batch_group_count=4)), (IMAGE, KERNEL)),
    ("conv_1d", gradients(conv((1,), ((3, 0),), ("NCH", "OIH", "NCH"))),
     (_floats(4, 8, 32), _floats(8, 8, 4))),
    ("conv_long_kernel", conv((1,), ((20, 3),), ("NCH", "OIH", "NCH")),
     (_floats(4, 8, 32), _floats(8, 8, 24))),
    ("conv_1x1", gradients(conv((1, 1), "VALID")), (IMAGE, _floats(1, 1, 8, 8))),
    ("conv_odd_numbers", gradients(conv((2, 1), "SAME", ("CWNH", "WOHI", "HNWC"))),
     (_floats(8, 12, 4, 16), _floats(3, 8, 3, 8))),
    ("conv_chain", lambda x, k: conv()(jax.nn.relu(conv((2, 2))(x, k)), k).sum((1, 2)),
     (IMAGE, KERNEL)),
    ("conv_of_sum", lambda x, w, k: conv()(x @ w, k), (IMAGE, _floats(8, 8), KERNEL)),
    ("conv_no_dims", conv((), (), ("NC", "OI", "NC")), (X, _floats(8, 16, seed=5))),
)  # fmt: skip

WINDOWS = (*MOVES, *POOLS, *CONVOLUTIONS)
"""(name, function, arguments)."""

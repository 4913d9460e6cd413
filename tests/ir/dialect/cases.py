"""One small program for each op that has a rule, and random shardings to run it under."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd
from tests.ir.dialect.cases_linalg import LINALG
from tests.ir.dialect.cases_misc import MISC
from tests.ir.dialect.cases_window import WINDOWS


class Case(NamedTuple):
    """A function and its arguments; integer arrays are given as they are."""

    name: str
    fn: Callable[..., Any]
    args: tuple[np.ndarray[Any, Any], ...]


def floats(*shape: int, seed: int = 0, low: float = 0.1, high: float = 0.9) -> Any:
    return np.random.RandomState(seed).uniform(low, high, shape).astype(np.float32)


def ints(*shape: int, seed: int = 0, low: int = 0, high: int = 8) -> Any:
    return np.random.RandomState(seed).randint(low, high, shape).astype(np.int32)


MESH = spmd.Mesh(None, (4, 2), ("data", "model"))

X = floats(8, 16)
Y = floats(8, 16, seed=1)
I = ints(8, 16, low=1)  # noqa: E741
J = ints(8, 16, seed=1, low=1, high=5)


def named(module: Any, names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for name in names.split()}


UNARY = {
    **named(jnp, "abs cbrt ceil cos exp expm1 floor isfinite log log1p negative sin sqrt tan"),
    **named(jnp, "tanh arccos arcsin arctan arcsinh arctanh sinh cosh square"),
    **named(lax, "logistic rsqrt erf erf_inv erfc lgamma digamma bessel_i1e"),
    "round_nearest_afz": lambda x: lax.round(x * 9, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_nearest_even": lambda x: lax.round(x * 9, lax.RoundingMethod.TO_NEAREST_EVEN),
    "sign": lambda x: jnp.sign(x - 0.5),
    "convert": lambda x: (x * 9).astype(jnp.int32),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 7),
    "real": lambda x: jnp.real(x + 1j * x),
    "imag": lambda x: jnp.imag(2j * x),
    "bitcast_convert": lambda x: lax.bitcast_convert_type(x, jnp.uint32),
    "optimization_barrier": lambda x: lax.optimization_barrier((x, x + 1)),
    "acosh": lambda x: jnp.arccosh(x + 1),
}

INTEGER = {
    **named(lax, "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic"),
    **named(lax, "shift_right_logical div rem"),
    "popcnt": lambda x, y: lax.population_count(x + y),
    "count_leading_zeros": lambda x, y: lax.clz(x + y),
    "not": lambda x, y: ~(x + y),
}

BINARY = {
    **named(jnp, "add subtract multiply divide arctan2 maximum minimum power remainder"),
    **named(lax, "nextafter complex"),
    "compare": lambda x, y: x < y,
    "select": lambda x, y: jnp.where(x < y, x, y * 2),
    "clamp": lambda x, y: lax.clamp(0.3, x + y, 0.9),
    "zeta": lambda x, y: lax.zeta(x + 2, y),
    "polygamma": lambda x, y: lax.polygamma(jnp.round(x), y + 1),
    "scalar_select": lambda x, y: lax.select(x.sum() < y.sum(), x, y),
}

OTHER: tuple[Case, ...] = (
    Case("constant", lambda x: x + np.arange(16, dtype=np.float32), (X,)),
    Case("constant_bf16", lambda x: x.astype(jnp.bfloat16) * np.float32(1.5), (X,)),
    Case("iota", lambda x: x * lax.broadcasted_iota(jnp.float32, (8, 16), 1), (X,)),
    Case("iota_result", lambda x: (x, lax.broadcasted_iota(jnp.int32, (16, 8), 0)), (X,)),
    Case("broadcast_in_dim", lambda x: jnp.broadcast_to(x[:, None, :], (8, 4, 16)), (X,)),
    Case("broadcast_expand", lambda x: jnp.broadcast_to(x, (8, 16)), (floats(8, 1),)),
    Case("transpose", lambda x: x.transpose(2, 0, 1) * 2, (floats(8, 4, 16),)),
    Case("reshape_merge", lambda x: jnp.tanh(x.reshape(32, 16)), (floats(8, 4, 16),)),
    Case("reshape_split", lambda x: jnp.tanh(x.reshape(4, 4, 2, 8)), (floats(16, 16),)),
    Case("reshape_unrelated", lambda x: jnp.tanh(x.reshape(8, 12)), (floats(6, 16),)),
    Case("reshape_ones", lambda x: jnp.tanh(x.reshape(1, 8, 1, 16)), (X,)),
    Case("slice", lambda x: x[:, 3:11:2] * 2, (X,)),
    Case("pad", lambda x: jnp.pad(x, ((0, 0), (1, 3)), constant_values=2.0), (X,)),
    Case("pad_zero_of_sum", lambda x: lax.pad(x @ x.T, 0.0, ((1, 0, 1), (0, 0, 0))), (X,)),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y * 2], axis=1), (X, Y)),
    Case("reverse", lambda x: x[:, ::-1] + 1, (X,)),
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i[0], 0), (2, 16)), (X, ints(4))),
    Case("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y[:2], (i[0], 0)),
         (X, Y, ints(4))),
    Case("dot", lambda x, w: x @ w, (X, floats(16, 8))),
    Case("dot_batch", lambda x, y: jnp.einsum("bshd,bthd->bhst", x, y),
         (floats(4, 8, 2, 8), floats(4, 8, 2, 8, seed=1))),
    Case("dot_chain", lambda x, w, v: (x @ w) @ v, (X, floats(16, 32), floats(32, 8))),
    Case("dot_sum", lambda x, w, v: x @ w + x @ v, (X, floats(16, 8), floats(16, 8, seed=2))),
    Case("reduce_add", lambda x: x.sum(1) + 1, (X,)),
    Case("reduce_all", lambda x: x.sum() * 2, (X,)),
    Case("reduce_max", lambda x: x.max(0), (X,)),
    Case("reduce_min", lambda x: x.min(0), (X,)),
    Case("reduce_mul", lambda x: x.prod(1), (X,)),
    Case("reduce_and", lambda x: (x > 0.2).all(1), (X,)),
    Case("reduce_or", lambda x: (x > 0.8).any(0), (X,)),
    Case("reduce_xor", lambda i: lax.reduce(i, jnp.int32(3), lax.bitwise_xor, (0,)), (I,)),
    Case("reduce_init", lambda x: lax.reduce(x, jnp.float32(3.0), lax.add, (0,)), (X,)),
    Case("reduce_argmax", lambda x: jnp.argmax(x, axis=1), (X,)),
    Case("softmax", lambda x: jax.nn.softmax(x, axis=-1), (X,)),
    Case("gather_rows", lambda t, i: jnp.take(t, i, axis=0), (floats(16, 8), ints(4, 6, high=16))),
    Case("gather_columns", lambda t, i: jnp.take(t, i, axis=1), (floats(8, 16), ints(8, high=16))),
    Case("gather_out_of_range", lambda t, i: jnp.take(t, i - 4, axis=0, mode="clip"),
         (floats(8, 8), ints(16, high=16))),
    Case("gather_points", lambda t, i: t[i, i // 2], (floats(8, 16), ints(8))),
    Case("gather_batched", lambda t, i: jnp.take_along_axis(t, i, axis=1),
         (floats(8, 16), ints(8, 4, high=16))),
    Case("scatter_add", lambda t, i, u: t.at[i].add(u),
         (floats(16, 8), ints(8, high=20), floats(8, 8, seed=1))),
    Case("scatter_points", lambda t, i, u: t.at[i, i * 2].add(u),
         (floats(8, 16), ints(8), floats(8, seed=1))),
    Case("scatter_set", lambda t, i, u: t.at[i].set(u),
         (floats(16, 8), np.asarray([3, 1, 15, 8], np.int32), floats(4, 8, seed=1))),
    Case("scatter_max", lambda t, i, u: t.at[i].max(u),
         (floats(16, 8), ints(8, high=16), floats(8, 8, seed=1))),
    Case("scatter_mul", lambda t, i, u: t.at[i].multiply(u),
         (floats(16, 8), ints(8, high=16), floats(8, 8, seed=1))),
    Case(
        "embedding_gradient",
        lambda t, i: jax.grad(lambda t: (jnp.take(t, i, axis=0) ** 2).sum())(t),
        (floats(16, 8), ints(8, 4, high=16)),
    ),
    Case("sort", lambda x: jnp.sort(x, axis=1), (X,)),
    Case("argsort", lambda x: jnp.argsort(x, axis=0), (X,)),
    Case("while", lambda x: lax.fori_loop(0, 3, lambda i, c: c @ c * 0.1 + i, x), (floats(8, 8),)),
    Case("while_unknown_trips",
         lambda x: lax.while_loop(lambda c: c.sum() < 500.0, lambda c: c * 2, x), (X,)),
    Case(
        "scan",
        lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(1)), x, w),
        (floats(8, 8), floats(4, 8, 8)),
    ),
    Case(
        "scan_gradient",
        lambda x, w: jax.grad(
            lambda w: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0].sum()
        )(w),
        (floats(8, 8), floats(4, 8, 8)),
    ),
    Case(
        "case",
        lambda x, i: lax.switch(i[0], [lambda x: x * 2, lambda x: x @ x, jnp.tanh], x),
        (floats(8, 8), ints(4, low=1, high=3)),
    ),
    Case("cond", lambda x: lax.cond(x.sum() > 1, lambda x: x + 1, lambda x: x - 1, x), (X,)),
    Case("mark", lambda x: spmd.mark_sharding(x * 2, MESH, (..., "model")), (X,)),
)  # fmt: skip


def together(name: str, fns: dict[str, Callable[..., Any]], *args: Any) -> Case:
    """One program of ops whose rules are alike, each with a sharding of its own."""
    return Case(name, lambda *args: {name: fn(*args) for name, fn in fns.items()}, args)


CASES: tuple[Case, ...] = (
    together("unary", UNARY, X),
    together("binary", BINARY, X, Y),
    together("integer", INTEGER, I, J),
    *OTHER,
    *(Case(*entry) for entry in (*LINALG, *MISC, *WINDOWS)),
)


def random_spec(rng: np.random.RandomState, shape: tuple[int, ...], mesh: spmd.Mesh) -> Any:
    """A random spec whose axes divide the shape; each axis is used with good probability."""
    spec: list[Any] = [None] * len(shape)
    for name in rng.permutation(list(mesh.axis_names)):
        if not shape or rng.rand() < 0.2:
            continue
        dim = rng.randint(len(shape))
        wanted = (*(spec[dim] or ()), str(name))
        if shape[dim] % np.prod([mesh.shape[n] for n in wanted]) == 0:
            spec[dim] = wanted
    return tuple(spec)

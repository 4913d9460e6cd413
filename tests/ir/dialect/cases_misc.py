"""Programs of ops that belong to no family; see `cases.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd
from tests.ir.dialect.cases_linalg import matrices

X = matrices(8, 16)
WORDS = np.random.RandomState(0).randint(-(2**31), 2**31 - 1, (8, 16)).astype(np.int32)
Z = (X + 1j * matrices(8, 16, seed=1)).astype(np.complex64)


def complex_chain(z: Any, w: Any) -> Any:
    y = jnp.exp(z) @ jnp.conj(w).T
    ends = jnp.sort_complex(y.reshape(-1)), (y / 2).prod()
    return jnp.abs(y), jnp.angle(y + 1), (y * 2j).sum(0), *ends


def ragged(x: Any, w: Any) -> Any:
    return lax.ragged_dot(x, w, jnp.asarray([2, 1, 4, 1], jnp.int32))


def attended(x: Any, w: Any) -> Any:
    q, k = x.reshape(2, 4, 4, 4), w.reshape(2, 4, 2, 4)
    return spmd.ops.attention(q, k, k + 1)


def mixed(x: Any, w: Any) -> Any:
    """Three experts, of which each row takes two."""
    chosen = jnp.asarray([[0, 1], [2, 0], [0, 2], [0, 1], [1, 2], [0, 1], [0, 1], [0, 2]])
    rows, gates = x.reshape(2, 4, 16), jnp.abs(x[:, :2]).reshape(2, 4, 2)
    return spmd.ops.experts(
        rows, gates, chosen.reshape(2, 4, 2), w, w[::-1] + 0.1, jnp.swapaxes(w, 1, 2)
    )


def projected(x: Any, w: Any) -> Any:
    """A plain weight, with adapters, too, one of 8 bits, and one of 4 with zeros."""
    values, scales = (w * 50).astype(jnp.int8), jnp.abs(w[:, 0]) + 1
    packed = (w[:, :8] * 20).astype(jnp.int8).astype(jnp.uint8).reshape(8, 2, 4)
    quantized = {"values": values, "scales": scales}
    fine = {"values": packed, "scales": jnp.abs(w[:, :2]) + 1}
    fine["zeros"] = (w[:, :2] * 4).astype(jnp.int8)
    pair, place = (w[:4].reshape(2, 2, -1), w[:2].reshape(2, 2, -1)), jnp.arange(len(x)) % 3 - 1
    plain = (spmd.ops.linear(x, weight) for weight in (w, quantized, fine))
    return *plain, *spmd.ops.linears(x, [w], [pair], place)


def paged(x: Any, w: Any) -> Any:
    """Two groups of three slots: rows that are one of a slot, a chunk and padding."""
    slots = jnp.asarray([[0, 2, 2, 2], [1, 1, 2, 9]])
    positions = jnp.asarray([[1, 1, 2, 3], [0, 1, 0, -1]])
    table = jnp.asarray([[[0, 9], [3, 3], [1, 2]], [[2, 0], [3, 0], [1, -1]]])
    first = jnp.asarray([[0, 1, 1, 4], [0, 0, 2, 3]])
    pool = x.reshape(2, 4, 2, 2, 2, 2)
    pool = spmd.ops.paged_update(pool, w.reshape(2, 4, 2, 2, 2), table, slots, positions)
    q = w.reshape(2, 4, 2, 2, 2)
    return pool, spmd.ops.paged_attention(q, pool, table, slots, positions, first)


def called(x: Any) -> Any:
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.sin, result, x, vmap_method="expand_dims") * 2


def inspected(x: Any) -> Any:
    jax.debug.inspect_array_sharding(x, callback=lambda _: None)
    return x * 2


MISC: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("top_k", lambda x: tuple(lax.top_k(x, 3)), (X,)),
    ("top_k_gradient", jax.grad(lambda x: lax.top_k(x, 3)[0].sum()), (X,)),
    ("approx_max_k", lambda x: tuple(lax.approx_max_k(x, 4)), (X,)),
    ("approx_min_k", lambda x: tuple(lax.approx_min_k(x, 4, reduction_dimension=0)), (X,)),
    ("ragged_dot", ragged, (X, matrices(4, 16, 6))),
    ("attention", attended, (X, matrices(8, 8))),
    ("attention_gradient",
     jax.grad(lambda x, w: jnp.sum(attended(x, w) ** 2), (0, 1)), (X, matrices(8, 8))),
    ("experts", mixed, (X, matrices(3, 6, 16) / 4)),
    ("experts_gradient",
     jax.grad(lambda x, w: jnp.sum(mixed(x, w) ** 2), (0, 1)), (X, matrices(3, 6, 16) / 4)),
    ("linear", projected, (X, matrices(8, 16, seed=2))),
    ("paged_attention", paged, (X, matrices(8, 8))),
    ("mulhi", lambda x: lax.mulhi(x, x[::-1]), (WORDS,)),
    ("mulhi_unsigned", lambda x: lax.mulhi(x, x[::-1]), (WORDS.astype(np.uint32),)),
    ("mulhi_narrow", lambda x: lax.mulhi(x, x[::-1]), (WORDS.astype(np.int8),)),
    ("complex", complex_chain, (Z, Z)),
    ("complex_roots", lambda z: (jnp.sqrt(z), jnp.log(z), jnp.tanh(z), z**3, z / (z + 2)), (Z,)),
    ("callback", called, (X,)),
    ("inspected", inspected, (X,)),
    ("bitcast_wider", lambda x: lax.bitcast_convert_type(x, jnp.int8), (X,)),
    ("bitcast_narrower",
     lambda x: lax.bitcast_convert_type(x.astype(jnp.int8).reshape(8, 4, 4), jnp.int32), (WORDS,)),
)  # fmt: skip
"""(name, function, arguments)."""

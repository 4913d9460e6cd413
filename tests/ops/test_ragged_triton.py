"""Products by group, step by step in jax, beside `jax.lax.ragged_dot`: values and gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd.ops import products_triton
from spmd.ops.experts_local import ragged as plain
from tests.close import close

ROWS = 200


def loss(product: Any, x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    """A sum over the rows that are in groups."""
    is_there_R1 = (jnp.arange(ROWS) < jnp.sum(sizes_E))[:, None]
    y_RO = product(jnp.where(is_there_R1, x_RI, 0), weights_EOI, sizes_E)
    return jnp.sum(jnp.sin(jnp.where(is_there_R1, y_RO, 0).astype(jnp.float32)))


def operands(outputs: int, inputs: int, sizes: Any, dtype: Any = jnp.bfloat16) -> Any:
    rng = np.random.default_rng(outputs + inputs)
    x, w = rng.standard_normal((ROWS, inputs)), rng.standard_normal((len(sizes), outputs, inputs))
    return jnp.asarray(x, dtype), jnp.asarray(w / 8, dtype), jnp.asarray(sizes, jnp.int32)


def interpreted(*args: Any) -> Any:
    return products_triton.ragged_product(*args, interpret=True)


@functools.cache
def stepped(name: str) -> Any:
    """The loss with gradients of rows and weights, compiled once."""
    product = {"kernel": interpreted, "plain": plain}[name]
    return jax.jit(jax.value_and_grad(functools.partial(loss, product), (0, 1)))


@settings(max_examples=10)
@given(st.lists(st.integers(0, ROWS // 4), min_size=4, max_size=4))
@example([0, 0, 0, 0])
@example([50, 50, 50, 50])
def test_product_and_gradients_are_those_of_ragged_dot(sizes: list[int]) -> None:
    args = operands(128, 64, sizes)
    close(stepped("kernel")(*args), stepped("plain")(*args), 0.02)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_weights_of_eight_bits_are_converted_in_the_kernel(dtype: str) -> None:
    x, w, sizes = operands(128, 64, [50, 0, 90, 7])
    w = (16 * w).astype(dtype)
    want = plain(x, w.astype(x.dtype), sizes)
    np.testing.assert_array_equal(*(f(x, w, sizes)[:147] for f in (interpreted, plain)))
    np.testing.assert_array_equal(plain(x, w, sizes)[:147], want[:147])


@pytest.mark.parametrize(
    "args",
    [operands(64, 64, [3], jnp.float32), operands(72, 64, [3]), operands(64, 72, [3])],
    ids=["32 bits", "outputs", "inputs"],
)
def test_what_is_not_for_the_kernel(args: Any) -> None:
    assert products_triton.ragged_product(*args) is NotImplemented


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("sizes", [[3, 0, 2, 1], [20, 0, 9, 1], [40, 0, 19, 1]])
def test_few_rows(dtype: str, sizes: list[int]) -> None:
    """They look their weights up, or are the second operand of products, in tiles of 16 or 32."""
    x, w, sizes_E = operands(128, 64, sizes)
    x, w, count = x[: sum(sizes) + 2], (16 * w).astype(dtype), sum(sizes)
    close(interpreted(x, w, sizes_E)[:count], plain(x, w, sizes_E)[:count], 0.01)

"""Products with few rows on real accelerators: as the references, alone and partitioned.

See `test_attention.py` for the command.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.models.llama.quantize import quantize_weight
from spmd.ops import linear, linears
from tests.accelerators.devices import COUNT, DEVICES


def compare(function: Any, *args: Any, specs: Any = None, tolerance: float = 2e-2) -> Any:
    """Compiled by us with the platform's kernels, beside the reference under `jax.jit`."""
    mesh = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT)
    compiled = spmd.jit(function, mesh=mesh, in_specs=specs).compile(*args)
    got = np.asarray(compiled(*args), np.float32)
    want = np.asarray(jax.jit(function)(*args), np.float32)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
    return compiled


@pytest.mark.parametrize("kind", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 40, 120, 300])
def test_linear(kind: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 512)), jnp.bfloat16)
    whole = rng.standard_normal((1024, 512)).astype(np.float32)
    weight: Any = jnp.asarray(whole, jnp.bfloat16)
    if kind != "none":
        weight = jax.tree.map(jnp.asarray, quantize_weight(whole, kind))
    rounds = kind == "fp8" and rows >= 128
    compare(linear, x, weight, tolerance=4e-2 if rounds else 2e-2)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_groups_with_zeros(rows: int, dtype: Any, group: int) -> None:
    """As checkpoints of the hub have them."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 512)), jnp.bfloat16)
    values = rng.integers(0, 100, (1024, 512 // group, group // (1 + (dtype is np.uint8))))
    weight = {"values": jnp.asarray(values).astype(dtype)}
    weight["scales"] = jnp.asarray(rng.random((1024, 512 // group)), jnp.float32)
    if dtype is not jnp.float8_e4m3fn:
        weight["zeros"] = jnp.asarray(rng.integers(-8, 8, (1024, 512 // group)), jnp.int8)
    compare(linear, x, weight)


@pytest.mark.parametrize("rows", [128, 200, 512])
def test_many_rows_of_8_bit_floats(rows: int) -> None:
    """Rows are rounded to 8 bits: 3 bits of mantissa, so 6% of an entry at most."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 1024)), jnp.bfloat16)
    whole = rng.standard_normal((2, 512, 1024)).astype(np.float32)
    many = [jax.tree.map(jnp.asarray, quantize_weight(weight, "fp8")) for weight in whole]
    both = lambda x, many: jnp.concatenate(linears(x, many), axis=1)  # noqa: E731
    assert "f8E4M3FN" in compare(both, x, many, tolerance=4e-2).as_text("emitted")


@pytest.mark.parametrize("rows", [2, 16, 64, 100])
def test_linears_of_few_rows(rows: int) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 1024)), jnp.bfloat16)
    many = [jnp.asarray(rng.standard_normal((n, 1024)), jnp.bfloat16) for n in (512, 1024, 19456)]
    compare(lambda x, many: jnp.concatenate(linears(x, many), axis=1), x, many)


@pytest.mark.parametrize("kind", ["none", "int8"])
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_adapters(rows: int, kind: str) -> None:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16)

    outputs = (256, 512, 256)
    whole: list[Any] = [drawn(n, 512) for n in outputs]
    if kind != "none":
        whole = [quantize_weight(np.asarray(w, np.float32), kind) for w in whole]
        whole = jax.tree.map(jnp.asarray, whole)
    pairs = [(drawn(8, 16, 512), drawn(8, 16, n)) for n in outputs]
    place = jnp.asarray(rng.integers(-1, 8, rows) if rows > 1 else [7], jnp.int32)

    def concatenated(x: Any, weights: Any, pairs: Any, place: Any) -> Any:
        return jnp.concatenate(linears(x, weights, pairs, place), axis=1)

    compiled = compare(concatenated, 8 * drawn(rows, 512), whole, pairs, place)
    assert "adapters" in compiled.as_text("hlo") or COUNT > 1

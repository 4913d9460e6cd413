"""Products with few rows, against plain arithmetic: alone, split in every way, and as kernels."""

import importlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.errors import ArgumentError
from spmd.models.llama.quantize import quantize_weight
from spmd.ops import linear, linears, products_triton
from tests.models.llama.inverse import dequantize

CHECKED = spmd.Options(check=True)
LINEAR = importlib.import_module("spmd.ops.linear")  # its name is the function's in spmd.ops


@pytest.fixture(scope="module")
def mesh(devices8: Any) -> spmd.Mesh:
    return spmd.make_mesh(x=4, y=2, devices=devices8)


def weights(kind: str, outputs: int = 24, inputs: int = 512) -> tuple[Any, Any]:
    """A weight in one form, and the matrix that it stands for."""
    whole = np.random.default_rng(1).standard_normal((outputs, inputs)).astype(np.float32)
    if kind == "none":
        return jnp.asarray(whole), whole
    packed = quantize_weight(whole, kind)
    return jax.tree.map(jnp.asarray, packed), dequantize(packed)


@pytest.mark.parametrize("kind", ["none", "int8", "int4", "fp8"])
def test_linear_is_a_product(kind: str) -> None:
    weight, whole = weights(kind)
    for rows in (1, 3):
        x = np.random.default_rng(0).standard_normal((rows, 512)).astype(np.float32)
        np.testing.assert_allclose(linear(x, weight), x @ whole.T, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_linears_kernel_of_one_row(kind: str) -> None:
    weight, whole = weights(kind)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 512)), jnp.float32)
    operands = (weight["values"], weight["scales"]) if isinstance(weight, dict) else (weight,)
    shaped = x.reshape(1, -1, 2, operands[0].shape[2]) if operands[0].ndim == 3 else x
    for kernel in (LINEAR._kernel, LINEAR._on_tpu):
        (out,) = kernel(shaped, *operands)
        np.testing.assert_allclose(out, x @ whole.T, rtol=0, atol=1e-3)
        assert kernel(jnp.concatenate([shaped, shaped]), *operands) is NotImplemented


def test_tpus_multiply_one_row_as_several() -> None:
    """Of a single one XLA makes a sum of products in the vector units."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 256), (512, 256))]
    jitted = spmd.jit(linear, mesh=spmd.Mesh(None, (1,), ("x",)))
    text = jitted.lower(*structs, topology=spmd.Topology("v5e:1x1")).as_text("emitted")
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "-> tensor<8x512xbf16>" in product


def test_linears_kernel_of_8_bit_floats() -> None:
    """Many rows of any size are rounded to 8 bits, three of them mantissa."""
    made = [weights("fp8", outputs) for outputs in (24, 8)]
    x = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
    x *= np.logspace(-20, 20, 128, dtype=np.float32)[:, None]
    x[5] = 0
    operands = [part for weight, _ in made for part in (weight["values"], weight["scales"])]
    found = LINEAR._kernel(jnp.asarray(x), *operands)
    for out, (_, whole) in zip(found, made, strict=True):
        want = x @ whole.T
        largest = np.abs(want).max(axis=1)
        # Errors of an entry are 2^-4 at most, and independent: far less of their sum.
        assert np.all(np.abs(out - want).max(axis=1) <= 0.1 * largest)
        assert not np.any(out[5])
    assert LINEAR._kernel(jnp.asarray(x[:127]), *operands) is NotImplemented


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("outputs", [(8, 24), (24, 16)])
def test_linears_are_linear_of_each(outputs: tuple[int, ...], kind: str) -> None:
    many = [weights(kind, n)[0] for n in outputs]
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    got, want = linears(x, many), [linear(x, weight) for weight in many]
    assert [x.shape for x in got] == [(3, n) for n in outputs]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(2, 64, (64,)), (5, 256, (64, 128)), (16, 128, (192,)), (100, 64, (64, 64, 64))],
)
def test_linears_kernel_of_few_rows(rows: int, inputs: int, outputs: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.bfloat16)
    many = [jnp.asarray(rng.standard_normal((n, inputs)), jnp.bfloat16) for n in outputs]
    for got, weight in zip(products_triton.products(x, many, interpret=True), many, strict=True):
        want = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-2, atol=0.1)


def test_tiles_of_the_kernel_of_few_rows() -> None:
    def tiles(rows: int, inputs: int, *outputs: int) -> Any:
        x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
        return products_triton.tiles_for(
            x, [jax.ShapeDtypeStruct((n, inputs), jnp.bfloat16) for n in outputs]
        )

    assert tiles(64, 4096, 4096) == (64, 64, 128, 2, 4)  # 64 blocks: two programs each
    assert tiles(64, 4096, 4096, 4096, 4096) == (64, 64, 64, 1, 5)
    assert tiles(64, 4096, 11008, 11008) == (64, 128, 64, 1, 5)  # 344 blocks: fewer, larger ones
    assert tiles(3, 11008, 4096) == (16, 64, 128, 2, 5)
    assert tiles(1, 4096, 4096) is tiles(129, 4096, 4096) is None
    assert tiles(64, 100, 4096) is tiles(64, 4096, 100) is None


SPLITS = {
    "outputs": ((None, None), ("x", None), ("x",)),
    "inputs": ((None, "y"), (None, "y"), (None,)),
    "both": (("y", None), ("x", None), ("x",)),
}


ALIKE = (("none", "inputs"), ("none", "both"), ("int8", "inputs"))
"""Splits of which others have every part."""


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        pytest.param(*case, marks=pytest.mark.heavy if case in ALIKE else ())
        for case in itertools.product(("none", "int8", "int4"), SPLITS)
    ],
)
def test_linear_split(kind: str, split: str, mesh: spmd.Mesh) -> None:
    weight, _ = weights(kind)
    x_spec, values, scales = SPLITS[split]
    spec: Any = values
    if isinstance(weight, dict):
        groups = values[1:] if weight["values"].ndim == 3 else ()
        spec = {"values": (*values, *(None,) * len(groups)), "scales": (*scales, *groups)}
    x = np.random.default_rng(0).standard_normal((2, 512)).astype(np.float32)
    many = [weight, weights(kind, 72)[0], weight]

    def both(x: Any, many: Any) -> Any:
        return linear(x, many[0]), *linears(x, many)

    compiled = spmd.jit(both, mesh=mesh, in_specs=(x_spec, [spec] * 3), options=CHECKED)
    for got, want in zip(compiled(x, many), jax.jit(both)(x, many), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(np.abs(want).max()))


def test_linears_shapes_are_checked() -> None:
    x = jnp.zeros((2, 8))
    for wrong in (
        jnp.zeros((4, 7)),
        {"values": jnp.zeros((4, 8), jnp.int8), "scales": jnp.zeros(8)},
        {"values": jnp.zeros((4, 3, 2), jnp.uint8), "scales": jnp.zeros((4, 3))},
    ):
        with pytest.raises(ArgumentError, match="linear cannot be computed"):
            linear(x, wrong)


def test_linears_kernel_of_8_bit_floats_with_and_without_scales() -> None:
    weight, _ = weights("fp8")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((128, 512)), jnp.float32)
    values, scales = weight["values"], weight["scales"]
    for operands in ((values, scales, values), (values, values, scales)):
        found = LINEAR._kernel(x, *operands)
        wanted = LINEAR._decomposition(x, *operands)
        for one, other in zip(found, wanted, strict=True):
            scale = float(jnp.max(jnp.abs(other)))
            np.testing.assert_allclose(one, other, rtol=0, atol=0.05 * scale)


def test_linears_of_no_weights() -> None:
    assert linears(jnp.ones((2, 8)), []) == ()

"""Constants of every dtype, as the importer reads them."""

import ml_dtypes
import numpy as np
import pytest

from spmd.ir.types import _NUMPY_DTYPES, Dense, TensorType, numpy_dtype
from tests.frontend.imported import imported, ops, parsed


def constant(elements, type_):
    text = f"""func.func @main() -> {type_} {{
      %0 = stablehlo.constant dense<{elements}> : {type_}
      return %0 : {type_}
    }}"""
    (op,) = parsed(text).program.body.ops
    return op.kind.attrs["value"]


def literals(dtype):
    """Two numbers as MLIR writes them, and as an array."""
    if dtype == "i1":
        return ("true", "false"), np.array([True, False])
    if dtype.startswith("complex"):
        return ("(1.5, -2.0)", "(0.1, 0.0)"), np.array([1.5 - 2j, 0.1], numpy_dtype(dtype))
    if dtype.lstrip("u").startswith("i"):
        low = "0" if dtype.startswith("u") else "-2"
        return (low, "1"), np.array([int(low), 1]).astype(numpy_dtype(dtype))
    return ("2.0", "0.5"), np.array([2.0, 0.5]).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", _NUMPY_DTYPES)
def test_constants_of_every_dtype(dtype):
    (a, b), array = literals(dtype)
    cases = {
        (): (a, array[0]),
        (3,): (a, np.broadcast_to(array[0], (3,))),
        (2, 2): (f"[[{a}, {b}], [{b}, {a}]]", np.stack([array, array[::-1]])),
        (150, 2): ("[" + ", ".join([f"[{a}, {b}]"] * 150) + "]", np.stack([array] * 150)),
        (0, 2): ("", np.zeros((0, 2)).astype(array.dtype)),
        (1, 1): (f"[[{b}]]", array[1:].reshape(1, 1)),
    }
    for shape, (elements, expected) in cases.items():
        found = constant(elements, TensorType(shape, dtype))
        assert found == Dense.of(expected, dtype)
        assert found.type.shape == shape
        assert found.array().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "f8E5M2", "complex<f32>"])
@pytest.mark.parametrize("count", [1, 2, 200])
def test_special_numbers_keep_their_bits(dtype, count):
    part = numpy_dtype(dtype.removeprefix("complex<").removesuffix(">"))
    for number in (np.nan, -np.nan, np.inf, -np.inf):
        element = np.array(number).astype(part)
        bits = "0x" + element.tobytes()[::-1].hex().upper()
        one = element.tobytes()
        if dtype.startswith("complex"):
            bits, one = f"(-0.0, {bits})", np.array(-0.0, part).tobytes() + one
        found = constant("[" + ", ".join([bits] * count) + "]", TensorType((count,), dtype))
        assert found == Dense(TensorType((count,), dtype), one, True)


def test_constants_that_jax_writes():
    arrays = (
        np.arange(300, dtype=ml_dtypes.bfloat16).reshape(3, 100),
        np.array([1 + 2j, np.inf], np.complex64),
        np.array([7, -8], ml_dtypes.int4),
        np.arange(300) % 3 == 0,
        np.zeros((0, 4), ml_dtypes.bfloat16),
    )
    found = ops(imported(lambda: arrays), "constant")
    for op, array in zip(found, arrays, strict=True):
        value = op.kind.attrs["value"].array()
        assert (value.dtype, value.shape) == (array.dtype, array.shape)
        assert value.tobytes() == array.tobytes()

"""Products of 8-bit floats on GPUs that multiply them: by such kernels, forward and backward.

SPMD_TEST_PLATFORM=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false pytest tests/accelerators/test_fp8.py
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ops import fp8_dot, fp8_state
from tests.accelerators.devices import COUNT, DEVICES, PLATFORM

pytestmark = pytest.mark.skipif(
    PLATFORM != "gpu" or float(DEVICES[0].compute_capability) < 8.9,
    reason="needs GPUs that multiply 8-bit floats",
)

OUT_IN = (((1,), (1,)), ((), ()))


def products(x: Any, w: Any, state: Any, dy: Any) -> Any:
    """A product, its gradients, and the next state."""
    y, back = jax.vjp(lambda x, w, s: fp8_dot(x, w, s, dimension_numbers=OUT_IN), x, w, state)
    return y, *back(dy)


@pytest.fixture(scope="module")
def operands() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (512, 256), jnp.bfloat16)
    w = jax.random.normal(keys[1], (1024, 256)) / 16
    dy = jax.random.normal(keys[2], (512, 1024), jnp.bfloat16) / 1024
    return x, w, products(x, w, fp8_state(w), dy)[3], dy


def test_no_product_is_widened(operands: Any) -> None:
    """Each of the three reads 8-bit operands: in cuBLASLt, or in a kernel of XLA's own."""
    text = jax.jit(products).lower(*operands).compile().as_text()
    assert text is not None
    calls = text.count("__cublas$lt$matmul$f8")
    fusions = re.findall(r"%gemm_fusion\S* \((?:\w|\.)+: f8\w+\[[\d,]*\], (?:\w|\.)+: f8", text)
    assert calls + len(fusions) == 3, text


@pytest.mark.parametrize("specs", [(("x", None), None), (("x", None), ("x", None))])
def test_split_over_devices_it_is_the_whole_one(operands: Any, specs: Any) -> None:
    mesh = spmd.make_mesh(x=COUNT, devices=DEVICES[:COUNT])
    jitted = spmd.jit(products, mesh=mesh, in_specs=(*specs, (None, None), ("x", None)))
    got, want = jitted(*operands), jax.jit(products)(*operands)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-2 * np.abs(b).max())

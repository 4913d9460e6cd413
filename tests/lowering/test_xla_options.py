"""Options for XLA."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.ir.program import Program
from spmd.lowering.xla_options import DEFAULTS, EIGHT_BIT, xla_options


@pytest.mark.parametrize("platform", DEFAULTS)
def test_this_version_of_jaxlib_knows_them(platform: str) -> None:
    if platform == "tpu":
        pytest.skip("libtpu knows them, not jaxlib")
    options: Any = {**DEFAULTS[platform], **EIGHT_BIT.get(platform, {})}
    jax.jit(jnp.sin).lower(1.0).compile(options)


def product(dtype: Any) -> Program:
    x = jax.ShapeDtypeStruct((8, 8), dtype)
    jitted = spmd.jit(jnp.matmul, mesh=spmd.Mesh(None, (2,), ("data",)))
    return jitted.lower(x, x).stages.optimized.program


def test_what_the_user_says_stays() -> None:
    (flag,) = DEFAULTS["cuda"]
    program = product(jnp.float32)
    assert xla_options("cuda", program, {flag: 1}) == {flag: 1}
    assert xla_options("cuda", program, {"other": True}) == {**DEFAULTS["cuda"], "other": True}
    assert xla_options("cpu", program, {}) == {}


def test_products_of_8_bits_have_options_of_their_own() -> None:
    (flag,) = EIGHT_BIT["cuda"]
    program = product(jnp.float8_e4m3fn)
    assert xla_options("cuda", program, {})[flag] is False
    assert xla_options("cuda", program, {flag: True})[flag] is True
    assert xla_options("cpu", program, {}) == {}

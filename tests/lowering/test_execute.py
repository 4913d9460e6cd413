"""Emitted programs as plain data, compiled without other results; options for XLA."""

import copy
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ir.program import Program
from spmd.ir.types import numpy_dtype
from spmd.lowering.execute import (
    DEFAULTS,
    EIGHT_BIT,
    Outside,
    WithConstants,
    compile_emitted,
    x64_if,
    xla_options,
)

SQUARE = """module {{
  func.func @main(%x: tensor<8x{dtype}>) -> tensor<8x{dtype}> {{
    %0 = stablehlo.multiply %x, %x : tensor<8x{dtype}>
    return %0 : tensor<8x{dtype}>
  }}
}}"""


@pytest.mark.parametrize("dtype", ["i64", "ui64", "f64", "complex<f64>", "f32"])
def test_64_bits_stay_64_bits(dtype: str) -> None:
    mesh = spmd.make_mesh(data=8)
    emitted = spmd.lower_stablehlo(SQUARE.format(dtype=dtype), mesh, [("data",)]).stages.emitted
    assert emitted.needs_x64 == (dtype != "f32")
    x = (np.arange(8) + 1e5).astype(numpy_dtype(dtype))  # squares that 32 bits cannot hold
    run = compile_emitted(emitted, {})
    with x64_if(emitted.needs_x64):
        (found,) = run(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(found), x * x)


def test_a_program_with_constants_can_be_copied() -> None:
    ahead: Any = Outside(None, devices=())  # type: ignore[arg-type]
    program = WithConstants(SimpleNamespace(cost=1), None, ahead)  # type: ignore[arg-type]
    assert copy.copy(program).cost == 1


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


def test_programs_from_a_cache_find_the_runtime_of_their_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing traces Mosaic's kernels there, whose import says where it is."""
    name, mesh = "jax.experimental.mosaic.gpu", spmd.make_mesh(x=1, devices=jax.devices()[:1])
    emitted = spmd.jit(jnp.sin, mesh=mesh).lower(1.0).stages.emitted
    monkeypatch.delitem(sys.modules, name, raising=False)
    compile_emitted(emitted, {})
    assert name not in sys.modules
    compile_emitted(replace(emitted, module=f"{emitted.module} // @mosaic_gpu_v2"), {})
    assert name in sys.modules

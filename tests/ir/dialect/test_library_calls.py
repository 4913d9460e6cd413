"""Linear algebra for GPUs and TPUs: lowered for them, partitioned over the batch alone."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd
from spmd.compiler import Request, compile_module
from spmd.frontend.importer.module import parse_module
from spmd.mesh.topology import Topology
from tests.ir.dialect.cases_linalg import LINALG

BATCHES = ("cholesky", "qr", "qr_pivoting", "householder", "svd", "eigh", "eig", "lu",
           "tridiagonal", "tridiagonal_solve")  # fmt: skip
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    name.removeprefix("linalg_"): (fn, tuple(a[0] if a.ndim == 4 else a for a in args))
    for name, fn, args in LINALG
    if name in ("triangular_left", *(f"linalg_{batch}" for batch in BATCHES))
} | {
    "lu_pivots": (lambda p: lax.linalg.lu_pivots_to_permutation(p, 6), (jnp.zeros((8, 4), int),)),
    "symmetric_product": (
        lax.linalg.symmetric_product, (jnp.zeros((8, 6, 4)), jnp.zeros((8, 6, 6))),
    ),
    "threefry": (lambda k: jax.random.bits(jax.random.wrap_key_data(k), (16,)),
                 (jax.ShapeDtypeStruct((2,), jnp.uint32),)),
}  # fmt: skip
NOT_ON_TPU = {"qr_pivoting", "eig", "tridiagonal"}
"""Functions that jax itself does not lower for TPUs."""

CALLS: list[Any] = [(name, "cuda") for name in sorted(FUNCTIONS)]
CALLS += [pytest.param(name, "rocm", marks=pytest.mark.heavy) for name in sorted(FUNCTIONS)]
CALLS += [(name, "tpu") for name in sorted(FUNCTIONS.keys() - NOT_ON_TPU)]


def emitted(fn: Any, args: tuple[Any, ...], platform: str) -> str:
    """The local program, with the first dim of every batched argument split over `data`."""
    module = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).compiler_ir()
    mesh = spmd.make_mesh(data=4, model=2)
    entries = tuple(
        (("data",), *((),) * (len(a.shape) - 1)) if len(a.shape) > 1 else None for a in args
    )
    request = Request(module, mesh, Topology("cpu:8"), arg_entries=entries)
    # Weighed as a whole, matrices as small as these are cheapest where they are not split at all.
    return compile_module(request, spmd.Options(check=True, planner="greedy")).emitted.module


@pytest.mark.parametrize(("name", "platform"), CALLS)
def test_only_the_batch_is_split(name: str, platform: str) -> None:
    text = emitted(*FUNCTIONS[name], platform)
    assert "sdy.sharding_rule" not in text
    if (name, platform) != ("svd", "tpu"):  # it loops until every matrix has converged
        assert not re.search(r"stablehlo\.(all_|collective|reduce_scatter)", text)
    calls = [line for line in text.split("\n") if '"stablehlo.custom_call"' in line]
    for line in calls:
        types = re.findall(r"tensor<(\d+)x", line.rpartition(" : (")[2])
        assert set(types) == {"2"}, line


def test_a_cholesky_update_stays_whole() -> None:
    text = emitted(lax.linalg.cholesky_update, (jnp.zeros((8, 8)), jnp.zeros(8)), "cuda")
    (call,) = [line for line in text.split("\n") if '"stablehlo.custom_call"' in line]
    assert "(tensor<8x8xf32>, tensor<8xf32>)" in call


@pytest.mark.usefixtures("exact_plans")
def test_threefry_kernels_are_elementwise(mesh: spmd.Mesh) -> None:
    text = """
    func.func @main(%k: tensor<8xui32>, %x: tensor<8xui32>) -> (tensor<8xui32>, tensor<8xui32>) {
      %r:2 = stablehlo.custom_call @cu_threefry2x32_ffi(%k, %k, %x, %x)
        : (tensor<8xui32>, tensor<8xui32>, tensor<8xui32>, tensor<8xui32>)
        -> (tensor<8xui32>, tensor<8xui32>)
      return %r#0, %r#1 : tensor<8xui32>, tensor<8xui32>
    }"""
    request = Request(parse_module(text), mesh, Topology("cpu:8"), arg_entries=((("data",),), None))
    stages = compile_module(request, spmd.Options(check=True))
    assert stages.emitted.module.count("tensor<1xui32>, tensor<1xui32>)") >= 2
    assert "stablehlo.all_" not in stages.emitted.module

"""Compiler options for XLA that are set unless the user sets them; each one was measured."""

from collections.abc import Mapping
from typing import Any

from spmd.ir.program import Program

DEFAULTS: dict[str, dict[str, str | bool | int]] = {
    # With one collective at a time a gather is awaited before the next reduce-scatter may begin,
    # and products wait for both. Eight layers of Llama-2 7B's width over two H200s, jax 0.11.2:
    # 172 ms a step with 4, 173 with 2, 176 with 1, in the same memory; of these 5, 6 and 8 to 13
    # ms are waited for.
    "cuda": {"xla_gpu_experimental_parallel_collective_overlap_limit": 4},
    # Without them no gather is asynchronous on v4 and v5p; v5e does as if both were set. A scanned
    # MLP of 8 layers on 16 chips, compiled ahead, by the cycles of its kernels and our prices of
    # what is not hidden: on v4 43.7 to 38.7 ms, on v5p 23.4 to 20.5. No option was found that makes
    # sums asynchronous.
    "tpu": {
        "xla_enable_async_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    },
}
"""Platform -> default options. jaxlib 0.10 and 0.11 know those of GPUs, libtpu 0.0.42 of TPUs."""

EIGHT_BIT: dict[str, dict[str, str | bool | int]] = {
    # XLA tries Triton's products first, which takes 16 s for each shape of float8, against 0.2 s
    # without; what it takes in the end is cuBLASLt's either way. On an H200, jax 0.11.2.
    "cuda": {"xla_gpu_enable_triton_gemm": False}
}
"""Platform -> more default options, for programs that multiply matrices of 8-bit floats."""


def xla_options(platform: str, program: Program, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns XLA's options for a local program: defaults, and `given` by the user, which win."""
    chosen = DEFAULTS.get(platform, {})
    kinds = {op.kind for op in program.walk()}
    products = [kind for kind in kinds if kind.about.flops is not None]
    if any(kind.operands[0].dtype.startswith("f8") for kind in products):
        chosen = {**chosen, **EIGHT_BIT.get(platform, {})}
    return {**chosen, **given}

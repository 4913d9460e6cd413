"""Compiler options for XLA that are set unless the user sets them; each one was measured."""

from collections.abc import Mapping
from typing import Any

from spmd.ir.program import Program
from spmd.mesh.topology import Topology

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

XLA_SHARE = 0.8
"""The share of a GPU's memory that XLA's scheduler counts on (`GetSchedulerMemoryLimit`)."""

SCHEDULED = 0.5
"""The share of the memory left for temporary values that XLA's scheduler is told to use.

The scheduler uses all that it may, and buffers then take more than it counts. Told all, four layers
of 7B's width took 13% more than the limit, and 5% told half.
"""


def xla_options(platform: str, program: Program, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns XLA's options for a local program: defaults, and `given` by the user, which win."""
    chosen = DEFAULTS.get(platform, {})
    kinds = {op.kind for op in program.walk()}
    products = [kind for kind in kinds if kind.about.flops is not None]
    if any(kind.operands[0].dtype.startswith("f8") for kind in products):
        chosen = {**chosen, **EIGHT_BIT.get(platform, {})}
    return {**chosen, **given}


def options_within(
    limit: int, around: int, topology: Topology, compiler_options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns `compiler_options`, for GPUs plus a memory limit for XLA's scheduler unless set.

    `limit` is in bytes of a device, `around` of which are arguments and results.
    """
    flag = "xla_gpu_memory_limit_slop_factor"  # percent of what arguments and results leave
    if topology.platform != "cuda" or flag in compiler_options:
        return compiler_options
    left = max(1.0, XLA_SHARE * topology.hbm_bytes - around)
    percent = max(1, min(95, int(100 * SCHEDULED * (limit - around) / left)))
    return {**compiler_options, flag: percent}

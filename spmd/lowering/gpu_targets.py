"""Descriptions of NVIDIA GPUs, for XLA to compile for them where there are none.

The figures are those of CUDA's device properties: see the CUDA programming guide's table of compute
capabilities, and NVIDIA's architecture papers for the number of multiprocessors and the caches.
"""

from __future__ import annotations

from typing import NamedTuple


class _Gpu(NamedTuple):
    """The figures of one GPU.

    Attributes:
      name: CUDA's name for it.
      capability: compute capability.
      cores: number of multiprocessors.
      fpus: float32 units of a multiprocessor.
      shared: KiB of shared memory of a multiprocessor.
      l2, memory: bytes of the L2 cache and of device memory.
      bandwidth: of device memory, in 10^9 bytes/s.
      clock: GHz.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    shared: int
    l2: int
    memory: int
    bandwidth: int
    clock: float


_GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164, 40 << 20, 80 << 30, 2_039, 1.41),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228, 50 << 20, 80 << 30, 3_352, 1.98),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 128, 228, 60 << 20, 141 * 10**9, 4_800, 1.98),
}

RESERVED = 1 << 10
"""Bytes of shared memory that CUDA keeps of every block."""


def _target(gpu: _Gpu) -> str:
    """The text of XLA's `GpuTargetConfigProto`."""
    major, minor = gpu.capability
    shared = gpu.shared << 10
    return f"""
gpu_device_info {{
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  clock_rate_ghz: {gpu.clock}
  memory_bandwidth: {gpu.bandwidth}000000000
  device_memory_size: {gpu.memory}
  l2_cache_size: {gpu.l2}
  shared_memory_per_core: {shared}
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {shared - RESERVED}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
device_description_str: "{gpu.name}"
dnn_version_info {{ major: 9 minor: 10 }}
"""


GPU_TARGETS = {chip: _target(gpu) for chip, gpu in _GPUS.items()}
"""Chip, as in `Topology` -> the text that describes it to XLA."""

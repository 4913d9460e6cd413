"""Ahead-of-time compilation: describes devices that this machine lacks, for XLA to compile for.

The package `libtpu` has XLA's compiler for TPUs, jax's CUDA plugin the one for NVIDIA GPUs. Both
run on any Linux machine. Without a GPU, XLA does not time kernels to choose the fastest.
"""

import importlib.util
import math
import os
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from spmd.errors import MeshError
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import has_devices, platform_of
from spmd.mesh.topology import Topology


class _Gpu(NamedTuple):
    """The hardware figures of one GPU model that XLA needs in order to compile for it."""

    name: str  # CUDA's name for it
    capability: tuple[int, int]  # compute capability
    # cores, fpus: multiprocessors, and the float32 units of each
    cores: int
    fpus: int
    shared: int  # KiB of shared memory of a multiprocessor
    # l2, memory: bytes of the L2 cache and of device memory
    l2: int
    memory: int
    bandwidth: int  # of device memory, in 10^9 bytes/s
    clock: float  # GHz


# From the CUDA programming guide's table of compute capabilities, and NVIDIA's architecture papers.
_GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164, 40 << 20, 80 << 30, 2_039, 1.41),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228, 50 << 20, 80 << 30, 3_352, 1.98),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 128, 228, 60 << 20, 141 * 10**9, 4_800, 1.98),
}

RESERVED = 1 << 10  # bytes of shared memory that CUDA keeps of every block


def _target(gpu: _Gpu) -> str:
    """Returns XLA's description of a GPU as a compilation target: a protobuf in text format."""
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


CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")

SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""Environment variable; if it is 1, jax's CUDA plugin starts without cuDNN and other libraries."""

_CHIP_CONFIG = {"v4": "megacore"}  # chips whose two cores are one device only if libtpu is told so


def is_here(mesh: Mesh, topology: Topology) -> bool:
    """Whether jax sees all devices of the mesh, and the topology is for their platform or any."""
    if not has_devices(mesh):
        return False
    return topology.platform in (None, platform_of(mesh))


def devices_ahead(mesh: Mesh, topology: Topology) -> list[Any]:
    """Returns jax descriptions of a topology's devices, in the mesh's order, to compile for.

    A mesh of GPUs has as many devices as the topology, one of TPUs a multiple (several slices).
    Raises MeshError if the number does not fit, or no compiler for the topology is installed.
    """
    is_tpu, chip = topology.platform == "tpu", topology.name.partition(":")[0]
    if not is_tpu and (topology.platform != "cuda" or chip not in _GPUS):
        raise MeshError(
            f"XLA's compiler for {topology} is only where such devices are",
            actual="they are not visible here",
            fix="plan without compiling: use .lower(..., topology=...) instead of .compile(...)",
        )
    slices, rest = divmod(mesh.size, topology.count)
    if rest or not slices or (slices > 1 and not is_tpu):
        several = ", or as many in each of several slices" if is_tpu else ""
        raise MeshError(
            f"the mesh ({mesh}) does not fit {topology}",
            actual=f"{mesh.size} devices",
            required=f"{topology.count} devices{several}",
            fix="change the mesh or the topology",
        )
    devices = _tpus(topology, slices) if is_tpu else _gpus(topology, chip)
    # Mesh axes onto torus dims, as `make_mesh` lays out devices that are here.
    if math.prod(mesh.dcn_sizes) > 1:
        inner = [n // m for n, m in zip(mesh.sizes, mesh.dcn_sizes, strict=True)]
        array = mesh_utils.create_hybrid_device_mesh(inner, mesh.dcn_sizes, devices)
    else:
        array = mesh_utils.create_device_mesh(mesh.sizes, devices, allow_split_physical_axes=True)
    return list(np.asarray(array).flat)


def _tpus(topology: Topology, slices: int) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise _not_installed(topology, "libtpu", "tpu")
    if jax.default_backend() != "tpu":  # no chip is touched: several may compile at once
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    kind, _, shape = topology.name.partition(":")
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if kind in _CHIP_CONFIG:
        options["chip_config_name"] = _CHIP_CONFIG[kind]
    host = (*(math.gcd(2, size) for size in topology.shape[:2]), 1)
    if host != (2, 2, 1):  # a host has 2 x 2 chips where the shape allows it
        options["chips_per_host_bounds"] = host
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{kind}:{shape}", **options
    )
    return list(described.devices)


def _gpus(topology: Topology, chip: str) -> list[Any]:
    if not any(importlib.util.find_spec(name) for name in CUDA_PLUGINS):
        raise _not_installed(topology, "jax's plugin for CUDA", "cuda")
    hosts = -(-topology.count // topology.chip.per_host)
    try:
        described = topologies.get_topology_desc(
            topology.name,
            "cuda",
            target_config=_target(_GPUS[chip]),
            topology=f"1x{hosts}x{topology.count // hosts}",
        )
    except NotImplementedError as error:  # the plugin looked for CUDA's libraries
        raise MeshError(
            f"jax's plugin for CUDA did not start, so nothing can be compiled for {topology}",
            fix=f"set {SKIP_CHECK}=1 before Python starts, or install CUDA's libraries",
        ) from error
    return list(described.devices)


def _not_installed(topology: Topology, what: str, extra: str) -> MeshError:
    instead = "plan without compiling: use .lower(..., topology=...)"
    return MeshError(
        f"compiling for {topology} takes {what}, which is not installed",
        fix=f'pip install "spmd[{extra}]", or {instead}',
    )

"""How XLA compiles served programs for GPUs."""

import dataclasses

import spmd

OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,"  # as XLA has it anyway
    "CONDITIONAL,WHILE",
    "xla_gpu_dot_merger_threshold_mb": 0,
}
"""What XLA puts into CUDA graphs, and which products it makes one, in MB of weights.

With a loop's condition on the host, as XLA has it unless told, every turn waits for the host, and
the call returns only behind the last one: no call can be issued while another one runs. A loop with
a collective in it stays there, since XLA's own kernels for those cannot be in a graph.

Products that XLA makes one have their weights copied together in every run: those of queries and
keys of Llama 2 7B took 33 us of a layer's 240 for 1,024 rows on an H200.
"""


def with_gpu_options(options: spmd.Options, platform: str) -> spmd.Options:
    """Options by which XLA compiles as `OPTIONS` has it, for GPUs.

    Args:
      options: of the compiler; what they say of the same options of XLA stays.
      platform: of the devices, as `spmd.mesh.spec.platform_of` names it.
    """
    if platform != "cuda":
        return options
    given = {**OPTIONS, **options.compiler_options}
    return dataclasses.replace(options, compiler_options=given)

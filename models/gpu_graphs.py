"""Programs whose loops and branches a GPU runs by itself."""

import dataclasses

import spmd

COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
KINDS = (
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,"  # as XLA has it anyway
    "CONDITIONAL,WHILE"
)
"""What XLA puts into CUDA graphs.

With a loop's condition on the host, as XLA has it unless told, every turn waits for the host, and
the call returns only behind the last one: no call can be issued while another one runs. A loop with
a collective in it stays there, since XLA's own kernels for those cannot be in a graph.
"""


def with_gpu_graphs(options: spmd.Options, platform: str) -> spmd.Options:
    """Options by which loops and branches are part of CUDA graphs, where there are such.

    Args:
      options: of the compiler; what they say of command buffers stays.
      platform: of the devices, as `spmd.mesh.spec.platform_of` names it.
    """
    if platform != "cuda":
        return options
    given = {COMMAND_BUFFER: KINDS, **options.compiler_options}
    return dataclasses.replace(options, compiler_options=given)

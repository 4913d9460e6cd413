"""How XLA compiles served programs for GPUs."""

from collections.abc import Mapping
from typing import Any

from spmd.ops.products_triton import MOST_ROWS

OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,"  # as XLA has it anyway
    "CONDITIONAL,WHILE",
    "xla_gpu_dot_merger_threshold_mb": 0,
}
"""What XLA puts into CUDA graphs, and up to how many MB of weights it makes two products one: none.

With a loop's condition on the host, as XLA has it unless told, every turn waits for the host, and
the call returns only behind the last one: no call can be issued while another one runs. A loop with
a collective in it stays there, since XLA's own kernels for those cannot be in a graph.

The weights of products that it makes one are copied together in every run: those of queries and
keys of Llama 2 7B took 33 us of a layer's 240 for 1,024 rows on an H200.
"""

OF_MANY_ROWS = {"xla_gpu_enable_triton_gemm": False}
"""With more rows than `MOST_ROWS` products are cuBLAS's. XLA would try some hundred kernels of its
own for them, which are not faster: two layers with fp8 weights took 11 s to compile, not 3."""


def gpu_options(given: Mapping[str, Any], platform: str, rows: int) -> dict[str, Any]:
    """XLA's options for a program: those given, and on GPUs what they leave open.

    Args:
      given: options that stay.
      platform: of the devices, as `spmd.mesh.spec.platform_of` names it.
      rows: with which weights are multiplied; 0 where that is not known.
    """
    if platform != "cuda":
        return dict(given)
    return {**OPTIONS, **(OF_MANY_ROWS if rows > MOST_ROWS else {}), **given}

"""Functions for models. Most are one op to the compiler, with a kernel on some platforms."""

from spmd.ops.attention import attention
from spmd.ops.attention_order import from_zigzag, zigzag
from spmd.ops.experts import experts
from spmd.ops.fp8 import Fp8State, fp8_dot, fp8_state
from spmd.ops.linear import linear, linears
from spmd.ops.linear_attention import linear_attention
from spmd.ops.paged import paged_attention, paged_update

__all__ = [
    "Fp8State", "attention", "experts", "fp8_dot", "fp8_state", "from_zigzag", "linear",
    "linear_attention", "linears", "paged_attention", "paged_update", "zigzag",
]  # fmt: skip

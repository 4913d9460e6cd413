"""Ops that stay whole in the compiler: each with a rule and a kernel for each platform."""

from spmd.ops.attention import attention
from spmd.ops.linear import linear

__all__ = ["attention", "linear"]

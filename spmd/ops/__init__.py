"""Ops that stay whole in the compiler: each with a rule and a kernel for each platform."""

from spmd.ops.attention import attention

__all__ = ["attention"]

"""Marks of tests that need another machine's compiler."""

import importlib.util

import pytest

from spmd.lowering.ahead import CUDA_PLUGINS

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='libtpu is not installed: pip install "spmd[tpu]"',
)

needs_cuda_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in CUDA_PLUGINS),
    reason='jax\'s plugin for CUDA is not installed: pip install "spmd[cuda]"',
)

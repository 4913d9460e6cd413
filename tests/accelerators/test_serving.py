"""Llama's serving functions on real accelerators: steps over pages, beside the forward pass.

See `test_attention.py` for the command.
"""

import jax

import spmd
from tests.accelerators.devices import COUNT, DEVICES
from tests.models.llama.test_decode import (
    FEW,
    backend_of,
    check_against_forward,
    on_mesh,
    random_model,
)


def test_steps_are_the_forward_pass() -> None:
    """With heads and pages that the platform's kernels take, in float32."""
    mesh = spmd.make_mesh(devices=DEVICES[:COUNT], data=1, model=COUNT)
    with jax.default_matmul_precision("highest"):
        params, config = random_model(2, head_dim=128)
        programs = on_mesh(params, config, mesh, FEW)
        check_against_forward(backend_of(programs, FEW), params, config)
    if DEVICES[0].platform == "gpu":
        step = next(p for name, p in programs.programs.items() if name.startswith("step"))
        assert "triton" in step.emitted.module

"""A mixture of experts on real accelerators, which have a `ragged_dot`: beside a loop over experts.

See `test_attention.py` for the command.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

import spmd
from spmd.ops import experts
from tests.accelerators.devices import COUNT, DEVICES
from tests.ops.test_attention import close
from tests.ops.test_experts import loss, operands, plain

SPLITS: dict[str, dict[str, Any]] = {
    "rows": {"rows": ("x", None, None)},
    "experts": {"in": ("x", None, None), "out": ("x", None, None)},
}


@pytest.mark.parametrize("name", SPLITS)
def test_experts(name: str) -> None:
    mesh, specs = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT), SPLITS[name]

    def mark(name: str, x: Any) -> Any:
        return spmd.mark_sharding(x, mesh, specs[name]) if name in specs else x

    args = operands(b=2 * COUNT, s=16, count=2 * COUNT + 2 * (COUNT == 1), h=64, m=128)
    step = spmd.jit(loss(experts, mark), mesh=mesh)
    with jax.default_matmul_precision("float32"):
        close(step(*args), jax.jit(loss(plain))(*args), 1e-3)

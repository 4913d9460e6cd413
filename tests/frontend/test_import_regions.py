"""Marks inside of programs. Manual regions are tested where they are lowered."""

import jax
import jax.numpy as jnp

from spmd.ir.types import ShardingAttr
from tests.frontend.imported import (
    OPEN,
    assert_source,
    imported,
    sharded,
)


def test_sharding_constraints_become_marks():
    def fn(x):
        return jax.lax.with_sharding_constraint(x, sharded(("model", "data"), OPEN)) + 1

    found = imported(fn, jnp.ones((8, 8)))
    (mark,) = [op for op in found.program.walk() if op.name == "spmd.mark"]
    wanted = ShardingAttr(((("model", 1, 0), ("data", 1, 0)), ()), (False, True))
    assert mark.kind.attrs == {"sharding": wanted}
    assert mark.operands == found.program.body.args
    assert_source(mark, fn, "with_sharding_constraint", f"{fn.__qualname__}")
    assert found.meshes == ((("data", 4), ("model", 2)),)

"""Transfers between accelerators.

See `test_attention.py` for the command.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from tests.accelerators.devices import COUNT, DEVICES


@pytest.mark.skipif(COUNT < 2, reason="needs two accelerators")
@pytest.mark.parametrize(("source", "target"), [(COUNT, COUNT // 2), (COUNT // 2, COUNT)])
def test_grow_and_shrink(source: int, target: int) -> None:
    rows, columns = (
        NamedSharding(spmd.make_mesh(devices=DEVICES[:count], x=count).in_jax, spec)
        for count, spec in ((source, PartitionSpec("x")), (target, PartitionSpec(None, "x")))
    )
    host = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    tree = jax.device_put(host, rows)
    moved = spmd.transfer(tree, columns, convert=lambda x: x.astype(jnp.bfloat16), donate=True)
    np.testing.assert_array_equal(moved, host.astype(jnp.bfloat16))
    assert tree.is_deleted()

"""States in checkpoints: saved, found, restored and compared."""

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from spmd.models.training.checkpoints.found import AUTO
from spmd.models.training.checkpoints.pieces import chunk_shape
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.run.loop import TrainState


def make_mesh(devices, data, model):
    grid = np.array(devices[: data * model]).reshape(data, model)
    return jax.sharding.Mesh(grid, ("data", "model"))


def struct(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def targets(like):
    """What a state like this one is restored into."""
    return TrainState(*jax.tree.map(struct, (like.params, like.opt_state)))


def latest(checkpoints, wanted=AUTO):
    found = checkpoints.find(wanted)
    assert found is not None
    return found


def restored(checkpoints, like, wanted=AUTO):
    return checkpoints.restore(latest(checkpoints, wanted), targets(like))


def save(folder, *states, **options):
    """Saves one after the other; the steps that are kept."""
    with Checkpoints(folder, **options) as checkpoints:
        for state in states:
            checkpoints.save(state)
            checkpoints.finish()
        return checkpoints.steps()


def assert_same(got, expected):
    def one(a, b):
        assert (a.sharding, a.dtype) == (b.sharding, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(one, (got.params, got.opt_state), (expected.params, expected.opt_state))
    assert got.step == expected.step


def stored_chunk(folder, key):
    """The shape of an array's pieces in a checkpoint."""
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/state", "path": f"{key}/"}
    opened = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True)
    return chunk_shape(opened.result())

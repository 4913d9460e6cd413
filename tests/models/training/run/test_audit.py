"""A step computed twice: by the same devices in other places, one of which makes an error."""

import jax
import numpy as np
import optax
import pytest

import spmd
from spmd.models.training.errors import TrainingError
from spmd.models.training.program import TrainingProgram
from spmd.models.training.run.audit import check_step
from tests.models.training import own_model


@pytest.fixture(scope="module")
def program(devices8):
    mesh = spmd.make_mesh(devices=devices8, across=2, up=4)
    marks = {"layers/*/w": ("up", "across"), "out/0": ("across", None)}
    return TrainingProgram(
        own_model.init, own_model.loss, marks, own_model.data(0), {"*": ("across",)}, mesh=mesh,
        optimizer=optax.adam(1e-2),
    )  # fmt: skip


def flipped(array, device):
    """The same array, with a bit flipped in the last number that one device holds."""
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    devices = [shard.device for shard in array.addressable_shards]
    parts[devices.index(device)].view(np.uint8)[-1, -1] ^= 0x40
    arrays = [jax.device_put(*pair) for pair in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, arrays)


def test_a_step_and_its_errors(program, devices8):
    """What one device alone holds; what it holds with one other; and what all have added up."""
    state, batch = program.fresh_state(), program.place(own_model.data(0))
    elsewhere = program.elsewhere()
    again = elsewhere(state.params, state.opt_state, batch)
    wrong = elsewhere(state.params, state.opt_state, (flipped(batch[0], devices8[3]), batch[1]))
    params, opt_state, metrics = program.step(state.params, state.opt_state, batch)
    check_step((params, opt_state, metrics), again, 1)
    layers = ({"w": flipped(params["layers"][0]["w"], devices8[5])}, params["layers"][1])
    with pytest.raises(TrainingError, match=r"of 0/layers/0/w \(1 in all\): \S+4 or \S+5 comp"):
        check_step((params | {"layers": layers}, opt_state, metrics), again, 1)
    # Device 4 computes its own part, and then that of 5.
    twice = ({"w": flipped(layers[0]["w"], devices8[4])}, params["layers"][1])
    with pytest.raises(TrainingError, match=r"\(2 in all\): \S+4 computed other numbers"):
        check_step((params | {"layers": twice}, opt_state, metrics), again, 1)
    with pytest.raises(TrainingError, match=r"added up .* cannot be told which"):
        check_step((params, opt_state, metrics), wrong, 1)

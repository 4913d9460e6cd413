import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.models.training.errors import TrainingError
from spmd.models.training.run.audit import check_copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("spec", "named"), [(P(), [5]), (P(None, "b"), [5]), (P("a"), [4, 5])])
def test_a_flipped_bit_of_a_copy_is_found_and_its_device_named(devices8, spec, named, dtype):
    mesh = jax.sharding.Mesh(np.array(devices8).reshape(4, 2), ("a", "b"))
    array = jax.device_put(np.ones((8, 4), dtype), NamedSharding(mesh, spec))
    state = {"key": jax.device_put(jax.random.key(0), NamedSharding(mesh, P())), "w": array}
    check_copies(state, 7)
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[5].view(np.uint8)[-1, -1] ^= 0x80
    arrays = [jax.device_put(*pair) for pair in zip(parts, devices8, strict=True)]
    state["w"] = jax.make_array_from_single_device_arrays((8, 4), array.sharding, arrays)
    who = ", ".join(str(devices8[number]) for number in named)
    with pytest.raises(TrainingError, match=f"after step 7 .* copies of w, and {who} another one"):
        check_copies(state, 7)

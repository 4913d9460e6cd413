import re

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from spmd.models.training.data.batches import fingerprint, open_batches, structs_of
from spmd.models.training.errors import DataError

WRONG = {
    "['x'][1] is 0.5": [np.ones(2), 0.5],
    "['x'] is a scalar of float32": np.float32(1),
    "['x'] is an array of <U1": np.array(["a"]),
    "['x'] is an array of key": jax.random.key(0),
}


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("read", [structs_of, fingerprint])
def test_what_is_no_batch_is_told_by_its_path(read, said):
    with pytest.raises(DataError, match=re.escape(f"data(0){said}")):
        read(lambda step: {"x": WRONG[said]})


def test_data_that_ends_says_at_which_step():
    where = SingleDeviceSharding(jax.devices()[0])
    with open_batches(lambda step: [np.zeros(2)][step], lambda _: where, 0) as read:
        next(read)
        with pytest.raises(DataError, match=r"data\(1\) raised IndexError.* as by step % count"):
            next(read)

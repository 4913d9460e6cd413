import dataclasses
import re
import threading
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from spmd.models.training.data import corpus
from spmd.models.training.data.loader import fingerprint, open_batches, rows_of_host, structs_of
from spmd.models.training.data.samples import PackedTokens
from spmd.models.training.errors import DataError
from tests.waiting import wait_until

SPEC = P("data", None)


def dataset(**more):
    text = corpus.from_documents(np.array_split(np.arange(5000, dtype=np.uint32), 37), 5000)
    settings = {"seq_len": 8, "batch_size": 8, "seed": 1, "boundaries": True, **more}
    return PackedTokens([corpus.whole(text)], **settings)


def shardings(devices, spec=SPEC):
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    return {name: NamedSharding(mesh, spec) for name in dataset().struct()}


def assert_same(placed, batch):
    assert set(placed) == set(batch)
    for name, leaf in batch.items():
        np.testing.assert_array_equal(placed[name], leaf)


@pytest.mark.parametrize("spec", [SPEC, P(), P("model"), P(("data", "model")), P("data", "model")])
def test_gives_the_datasets_batches(devices8, spec):
    with open_batches(dataset(), lambda _: shardings(devices8, spec), 3) as loader:
        for step in (3, 4, 5):
            placed = next(loader)
            assert_same(placed, dataset()(step))
            assert placed["inputs"].sharding == shardings(devices8, spec)["inputs"]


def test_closing_ends_the_threads(devices8):
    before = threading.active_count()
    with open_batches(dataset(), lambda _: shardings(devices8)) as batches:
        next(batches)
    wait_until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_function_is_called_by_as_many_threads_as_it_may_be(threads):
    together, callers = threading.Barrier(threads, timeout=20), set()

    def data(step):
        callers.add(threading.get_ident())
        together.wait()
        return np.full(8, step)

    where = SingleDeviceSharding(jax.devices()[0])
    with open_batches(data, lambda _: where, 3, threads) as placed:
        assert [int(next(placed)[0]) for _ in range(20)] == list(range(3, 23))
        together.abort()
    assert len(callers) == threads


# Functions

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


# Hosts


@dataclasses.dataclass(frozen=True)
class HostSharding:
    """Rows `B / parts` each, of which this host holds one part, on two devices."""

    parts: int
    part: int

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> Any:
        rows = shape[0] // self.parts
        mine = (slice(rows * self.part, rows * (self.part + 1)), slice(None))
        return {"first": mine, "second": mine}


@given(
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 10**6),
    hosts=st.sampled_from([1, 2, 4, 8]),
    copies=st.sampled_from([1, 2]),
    times=st.integers(1, 3),
)
def test_hosts_share_the_global_batch(seed, step, hosts, copies, times):
    data = dataset(seed=seed, batch_size=hosts * times, before=seed % 7)
    batch = data(step)
    seen = np.zeros(data.batch_size, int)
    for host in range(hosts * copies):
        sharding: Any = HostSharding(hosts, host // copies)
        rows = rows_of_host((data.batch_size, 8), {"a": sharding})
        seen[rows] += 1
        for name, leaf in data.rows(data.first(step) + rows).items():
            np.testing.assert_array_equal(leaf, batch[name][rows])
    assert (seen == copies).all()

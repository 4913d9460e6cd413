"""Arrays put on devices shard by shard: a process reads what its own devices hold, once."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from spmd.models.progress import Advance

Bounds = tuple[tuple[int, int], ...]
"""(start, stop) of every dim."""


def put_shards(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: Sharding,
    read: Callable[[tuple[slice, ...]], npt.NDArray[Any]],
    advance: Advance,
) -> jax.Array:
    """An array whose shards are read one after the other.

    `jax.make_array_from_callback` would read equal shards again for every device, and hold those of
    all local devices on the host at once.

    Args:
        read: index of a shard -> the shard, in the array's dtype.
        advance: is told the bytes of each shard.
    """
    shards: list[jax.Array] = []
    for bounds, devices in distinct_shards(shape, sharding).items():
        block = read(tuple(slice(start, stop) for start, stop in bounds))
        targets = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in devices]
        # Devices that share the host's memory must not share the block: the arrays may be donated.
        copies = [jax.device_put(block, target, may_alias=False) for target in targets]
        shards += jax.block_until_ready(copies)
        advance(block.nbytes)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=np.dtype(dtype))


def distinct_shards(shape: tuple[int, ...], sharding: Sharding) -> dict[Bounds, list[jax.Device]]:
    """Bounds -> this process's devices that hold this shard."""
    shards: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        whole = index or (slice(None),) * len(shape)
        bounds = tuple(s.indices(size)[:2] for s, size in zip(whole, shape, strict=True))
        shards.setdefault(bounds, []).append(device)
    return shards


def local_bytes(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> int:
    """Bytes of an array that this process reads."""
    sizes = (
        math.prod(stop - start for start, stop in bounds)
        for bounds in distinct_shards(shape, sharding)
    )
    return int(np.dtype(dtype).itemsize) * sum(sizes)

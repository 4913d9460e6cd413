"""Audits: devices' copies of the state compared, and steps computed twice, by other devices."""

import collections
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import spmd
from spmd import launch
from spmd.models.training.checkpoints import tables
from spmd.models.training.errors import RunError, TrainingError

CLOSE = 2.0**-6
"""Of a part's largest number: so far GPUs' sums may be apart, which they add in any order."""


def check_copies(params: Any, opt_state: Any, step: int) -> None:
    """Compares sums of the bits of all copies of a state's parts; all processes have to call it.

    Raises:
        TrainingError: some differ; names the devices that are in the minority, of two both.
    """
    sums: dict[str, dict[str, jax.Array]] = collections.defaultdict(dict)
    for part, shard in _parts({"params": params, "opt_state": opt_state}):
        sums[str(shard.device)][part] = _sum(shard.data)
    copies: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for said in launch.exchange(json.dumps(jax.device_get(sums), default=int), label="audit"):
        for device, parts in json.loads(said).items():
            for part, total in parts.items():
                copies[part][device] = total
    for part, totals in copies.items():
        usual, count = collections.Counter(totals.values()).most_common(1)[0]
        odd = [device for device, x in totals.items() if x != usual or 2 * count <= len(totals)]
        if odd:
            raise TrainingError(
                f"after step {step} {len(totals)} devices hold copies of {part.partition(' ')[0]}, "
                f"and {', '.join(odd)} another one: memory, arithmetic or a link of it failed"
            )


def step_elsewhere(step: Callable[..., Any], compiled: spmd.Compiled) -> Callable[..., Any]:
    """A training step for the same devices in each other's places, compiled at its first call.

    With four devices, what device 1 computed is computed by device 0, and that of 0 by device 3.

    Args:
        step: the function.
        compiled: it, compiled.

    Returns:
        A function with the same arguments, which it leaves as they are, and results.

    Raises:
        RunError: a process has one device alone.
    """
    mesh = _rotated(compiled.mesh)
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, s.spec, memory_kind=s.memory_kind),
        tuple(compiled.in_shardings),
    )
    jitted = spmd.jit(step, mesh=mesh, in_specs=shardings, out_specs=(*shardings[:2], None))

    def run(*arguments: Any) -> Any:
        return jitted(*jax.device_put(arguments, shardings))

    return run


def check_step(first: Any, again: Any, step: int) -> None:
    """Compares what two computations made of a step; all processes have to call it.

    Raises:
        TrainingError: they differ; names the devices that all wrong parts have in common.
    """
    others = {part: shard.data for part, shard in _parts(again)}
    flags, devices = [], []
    for part, shard in _parts(first):
        other = others[part]
        is_exact = shard.device.platform != "gpu"
        flags.append(_differ(shard.data, jax.device_put(other, shard.device), is_exact))
        devices.append((part, str(shard.device), str(next(iter(other.devices())))))
    found = [about for about, differ in zip(devices, jax.device_get(flags), strict=True) if differ]
    said = launch.exchange(json.dumps(found), label="audit of a step")
    wrong = [about for text in said for about in json.loads(text)]
    if not wrong:
        return
    pairs = [set(pair) for _, *pair in wrong]
    common = set.intersection(*pairs)
    who = f"{' or '.join(sorted(common))} computed" if common else (
        "devices have added up what one of them computed, and it cannot be told which: one has"
    )  # fmt: skip
    parts = len({part for part, *_ in wrong})
    raise TrainingError(
        f"step {step}, computed twice by devices in other places, has two results, such as of "
        f"{wrong[0][0].partition(' ')[0]} ({parts} in all): {who} other numbers than it should"
    )


def _parts(tree: Any) -> Iterator[tuple[str, Any]]:
    """Each device's pieces of a tree's arrays that are here, by path and place.

    What lies in the host's memory comes to the devices, one array after the other.
    """
    for path, leaf in tables.without_keys(tables.by_path(tree)).items():
        leaf = jax.device_put(leaf, jax.memory.Space.Device)
        for shard in leaf.addressable_shards:
            yield f"{path} {shard.index}", shard


def _rotated(mesh: spmd.Mesh) -> spmd.Mesh:
    """The mesh with each process's devices one place further."""
    ids = np.array(mesh.device_ids)
    processes = np.array([device.process_index for device in mesh.devices.flat])
    for process in set(processes.tolist()):
        mine = processes == process
        if mine.sum() == 1:
            raise RunError(
                "audit_steps moves a step to other devices of a process, and one has one"
            )
        ids[mine] = np.roll(ids[mine], 1)
    return spmd.Mesh(ids.tolist(), mesh.sizes, mesh.axis_names, mesh.dcn_sizes)


@jax.jit
def _sum(x: Any) -> Any:
    """Of its bytes: any flipped bit changes it."""
    return jnp.sum(x.ravel().view(jnp.uint8), dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnames="is_exact")
def _differ(x: Any, y: Any, is_exact: bool) -> Any:
    if is_exact or not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.any(x.ravel().view(jnp.uint8) != y.ravel().view(jnp.uint8))
    wide, other = x.astype(jnp.float32), y.astype(jnp.float32)
    is_far = jnp.abs(wide - other) > CLOSE * jnp.max(jnp.abs(wide), initial=0)
    return jnp.any(is_far | (jnp.isnan(wide) != jnp.isnan(other)))

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
    held: dict[str, dict[str, jax.Array]] = collections.defaultdict(dict)
    for part, shard in _parts({"params": params, "opt_state": opt_state}):
        held[str(shard.device)][part] = shard.data
    sums = {device: _sums(parts) for device, parts in held.items()}
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
    """Compiles a training step once more, for the same devices in each other's places.

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
        is_leaf=_is_sharding,
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
        flags.append(_differ(shard.data, jax.device_put(other, shard.device)))
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
    """Each device's pieces of a tree's arrays that are here, by path and place."""
    tree = jax.device_put(tree, jax.memory.Space.Device)  # what is in the host's memory
    for path, leaf in tables.without_keys(tables.by_path(tree)).items():
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


def _is_sharding(x: Any) -> bool:
    return isinstance(x, NamedSharding)


@jax.jit
def _sums(parts: Any) -> Any:
    """Of the bytes of each part: any flipped bit changes them."""
    return jax.tree.map(lambda x: jnp.sum(x.ravel().view(jnp.uint8), dtype=jnp.uint32), parts)


@functools.partial(jax.jit, static_argnames="is_exact")
def _apart(x: Any, y: Any, is_exact: bool) -> Any:
    if is_exact or not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.any(x.ravel().view(jnp.uint8) != y.ravel().view(jnp.uint8))
    wide, other = x.astype(jnp.float32), y.astype(jnp.float32)
    is_far = jnp.abs(wide - other) > CLOSE * jnp.max(jnp.abs(wide), initial=0)
    return jnp.any(is_far | (jnp.isnan(wide) != jnp.isnan(other)))


def _differ(x: Any, y: Any) -> Any:
    return _apart(x, y, is_exact=next(iter(x.devices())).platform != "gpu")

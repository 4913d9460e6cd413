"""Whether devices that hold copies of the same numbers hold the same bits."""

import collections
import json
from typing import Any

import jax
import jax.numpy as jnp

from spmd import launch
from spmd.models.training.checkpoints import tables
from spmd.models.training.errors import TrainingError


def check_copies(params: Any, opt_state: Any, step: int) -> None:
    """Compares sums of the bits of all copies of a state's parts; all processes have to call it.

    Raises:
        TrainingError: some differ; names the devices that are in the minority, of two both.
    """
    held: dict[str, dict[str, jax.Array]] = collections.defaultdict(dict)
    state = tables.by_path({"params": params, "opt_state": opt_state})
    for path, leaf in tables.without_keys(state).items():
        for shard in leaf.addressable_shards:
            held[str(shard.device)][f"{path} {shard.index}"] = shard.data
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


@jax.jit
def _sums(parts: Any) -> Any:
    """Of the bytes of each part: any flipped bit changes them."""
    return jax.tree.map(lambda x: jnp.sum(x.ravel().view(jnp.uint8), dtype=jnp.uint32), parts)

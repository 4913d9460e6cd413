"""Expert layers as they are written by hand, to be compared with `spmd.ops.experts`.

Each has that function's arguments and result. Shapes are in the names, as there, and

    N devices of the axis `expert`    K places for choices of one expert    R rows that arrive

`one_hot` is for XLA's partitioner: rows are sent to places of experts by products with one-hot
masks (Lepikhin et al. 2020, *GShard*). What an expert has no place for is dropped. `gathered` and
`exchanged` are `jax.shard_map`s: each device computes its own experts, of all rows of its group or
of those that are sent to it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd.models.llama.sharding import BATCH, PARAMETER_SPECS, WEIGHTS
from spmd.models.placement import present
from spmd.ops import experts_local as local

Experts = Callable[..., Any]


def one_hot(mesh: jax.sharding.Mesh, capacity: float) -> Experts:
    """By einsums with masks.

    Args:
      mesh: with the machine's devices.
      capacity: places of an expert, as a multiple of its share of the choices.
    """
    batch, experts = _present(BATCH, mesh), _present("expert", mesh)
    rest = tuple(a for a in batch or () if a != experts)

    def mark(x: Any, *spec: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def run(x_BSH: Any, gates_BSC: Any, chosen_BSC: Any, *weights: Any) -> Any:
        gate_EMH, up_EMH, down_EHM = weights
        count, (batch_size, length, choices) = gate_EMH.shape[0], chosen_BSC.shape
        places = math.ceil(capacity * length * choices / count)
        is_chosen_BXE = jax.nn.one_hot(chosen_BSC.reshape(batch_size, -1), count, dtype=jnp.int32)
        turn_BXE = jnp.cumsum(is_chosen_BXE, axis=1) * is_chosen_BXE - 1
        combine_BSEK = jnp.zeros((batch_size, length, count, places), x_BSH.dtype)
        for choice in range(choices):
            turn_BSE = turn_BXE.reshape(batch_size, length, choices, count)[:, :, choice]
            place_BSEK = jax.nn.one_hot(turn_BSE, places, dtype=x_BSH.dtype)
            combine_BSEK += place_BSEK * gates_BSC[..., choice, None, None].astype(x_BSH.dtype)
        send_BSEK = (combine_BSEK != 0).astype(x_BSH.dtype)
        x_EBKH = mark(jnp.einsum("bsh,bsek->ebkh", x_BSH, send_BSEK), experts, rest)
        hidden_EBKM = jax.nn.silu(jnp.einsum("ebkh,emh->ebkm", x_EBKH, gate_EMH))
        hidden_EBKM *= jnp.einsum("ebkh,emh->ebkm", x_EBKH, up_EMH)
        out_EBKH = mark(jnp.einsum("ebkm,ehm->ebkh", hidden_EBKM, down_EHM), experts, rest)
        return mark(jnp.einsum("ebkh,bsek->bsh", out_EBKH, combine_BSEK), batch)

    return run


def gathered(mesh: jax.sharding.Mesh) -> Experts:
    """Rows are gathered over `expert`, and what experts say is summed and scattered."""

    def run(rows: Any, weights: Any) -> Any:
        if "expert" not in mesh.shape:
            return _mixed(rows, weights, 1, 0)
        whole = tuple(_gather(x, "expert", 0) for x in rows)
        out = _mixed(whole, weights, mesh.shape["expert"], jax.lax.axis_index("expert"))
        return jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)

    return _by_device(mesh, run)


def exchanged(mesh: jax.sharding.Mesh, room: float) -> Experts:
    """Each choice of a row is sent to its expert, and what that says comes back.

    Args:
      mesh: with the machine's devices.
      room: rows that fit on a device, as a multiple of its share; others are dropped.
    """
    return _by_device(mesh, functools.partial(_exchanged, mesh.shape.get("expert", 1), room))


def _exchanged(devices: int, room: float, rows: Any, weights: Any) -> Any:
    x_BSH, gates_BSC, chosen_BSC = rows
    here, choices = weights[0].shape[0], chosen_BSC.shape[-1]
    x_TH, chosen_X = x_BSH.reshape(-1, x_BSH.shape[-1]), chosen_BSC.reshape(-1)
    order_X = jnp.argsort(chosen_X, stable=True)
    counts_E = jnp.sum(chosen_X[:, None] == jnp.arange(devices * here), 0, dtype=jnp.int32)
    counts_NNE = _gather(counts_E[None], "expert", 0).reshape(devices, devices, here)
    me, size = jax.lax.axis_index("expert"), math.ceil(room * chosen_X.shape[0])
    # What each device has for each, and where it starts there; what is beyond the room is cut.
    sizes_NN = jnp.sum(counts_NNE, 2)
    starts_NN = jnp.minimum(jnp.cumsum(sizes_NN, 0) - sizes_NN, size)
    fits_NN = jnp.clip(sizes_NN, 0, size - starts_NN)
    sent_N = jnp.cumsum(sizes_NN[me]) - sizes_NN[me]
    came_NN = jnp.cumsum(sizes_NN, 1) - sizes_NN
    there = (sent_N, fits_NN[me], starts_NN[me], fits_NN[:, me])
    back = (starts_NN[:, me], fits_NN[:, me], came_NN[:, me], fits_NN[me])
    x_RH = _send(x_TH[order_X // choices], size, there)
    # Rows came sorted by where they are from, and then by expert: now by expert alone.
    ends = jnp.cumsum(counts_NNE[:, me].reshape(-1))
    expert_R = jnp.searchsorted(ends, jnp.arange(size), side="right")
    expert_R = jnp.where(expert_R < ends.shape[0], expert_R % here, here)
    by_expert_R = jnp.argsort(expert_R, stable=True)
    sizes_E = jnp.sum(expert_R[:, None] == jnp.arange(here), 0, dtype=jnp.int32)
    is_here_R1 = (jnp.arange(size) < jnp.sum(sizes_E))[:, None]
    part = local.Turn(by_expert_R, by_expert_R, is_here_R1, sizes_E)
    out_RH = local.said(x_RH[by_expert_R], part, weights, local.tpu_product)
    out_RH = jnp.zeros_like(out_RH).at[by_expert_R].set(out_RH)
    out_XH = _send(out_RH, chosen_X.shape[0], back)
    out_XH *= gates_BSC.reshape(-1)[order_X][:, None].astype(out_XH.dtype)
    return jnp.zeros_like(x_TH).at[order_X // choices].add(out_XH).reshape(x_BSH.shape)


def _send(x: Any, size: int, places: Any) -> Any:
    """Rows of every device to every other."""
    out = jnp.zeros((size, *x.shape[1:]), x.dtype)
    return jax.lax.ragged_all_to_all(x, out, *places, axis_name="expert")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mixed(rows: Any, weights: Any, devices: int, me: Any) -> Any:
    return local.forward(
        *_operands(rows, weights, me),
        count=devices * weights[0].shape[0],
        product=local.tpu_product,
    )


def _mixed_forward(rows: Any, weights: Any, devices: int, me: Any) -> Any:
    return _mixed(rows, weights, devices, me), (rows, weights, me)


def _mixed_backward(devices: int, kept: Any, dout: Any) -> Any:
    rows, weights, me = kept
    count = devices * weights[0].shape[0]
    dx, dgates, *dweights = local.gradient(
        *_operands(rows, weights, me), dout, count=count, product=local.tpu_product
    )
    return (dx, dgates, None), tuple(dweights), None


_mixed.defvjp(_mixed_forward, _mixed_backward)


def _operands(rows: Any, weights: Any, me: Any) -> tuple[Any, ...]:
    x, gates, chosen = rows
    here = weights[0].shape[0]
    numbers = jnp.arange(1, here + 1, dtype=jnp.int32) + me * here
    return x, gates, chosen.astype(jnp.int32) + 1, numbers, *weights


def _by_device(mesh: jax.sharding.Mesh, function: Callable[[Any, Any], Any]) -> Experts:
    """A `shard_map`: weights are gathered over `data`, rows and sums over `model`."""
    batch, model = _present(BATCH, mesh), _present("model", mesh)
    rows, other = PartitionSpec(batch, None, model), PartitionSpec(batch)
    names = ("gate_proj", "up_proj", "down_proj")
    specs = [PARAMETER_SPECS[f"layers/mlp/experts/{name}/weight"] for name in names]
    own = [PartitionSpec(*(_present(entry, mesh) for entry in spec)) for spec in specs]
    data = _present(WEIGHTS, mesh)

    def run(x: Any, gates: Any, chosen: Any, *weights: Any) -> Any:
        if data:
            dims = [spec.index(WEIGHTS) for spec in specs]
            weights = tuple(_gather(w, data, dim) for w, dim in zip(weights, dims, strict=True))
        if not model:
            return function((x, gates, chosen), weights)
        out = function((_gather(x, model, 2), gates, chosen), weights)
        return jax.lax.psum_scatter(out, model, scatter_dimension=2, tiled=True)

    in_specs = (rows, other, other, *own)
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)


def _gather(x: Any, axes: Any, dim: int) -> Any:
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True)


def _present(entry: Any, mesh: jax.sharding.Mesh) -> Any:
    return present(entry, mesh.shape)

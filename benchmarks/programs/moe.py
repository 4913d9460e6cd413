"""A mixture-of-experts layer with one-hot dispatch (Lepikhin et al. 2020, GShard).

Shapes are in the names: G groups, S tokens of a group, M model, E experts, C places of an expert
in a group, H hidden of an expert.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import spmd
from benchmarks.programs.program import Built, Program, marked, on_meshes, structs_of, training_step

GROUPS, TOKENS, MODEL, EXPERTS, PLACES, HIDDEN = 16, 64, 128, 8, 16, 512


def moe_programs() -> list[Program]:
    """Experts on the axis of the batch, or on one of their own; forward and training step."""
    programs = []
    for train in (False, True):
        what = "train" if train else "forward"
        programs += on_meshes(f"moe/{what}", partial(build, train=train), "8x1", "4x2")
        own = partial(build, train=train, expert_axis="model")
        programs += on_meshes(f"moe/{what}-own-axis", own, "4x2", "2x4")
    return programs


def build(mesh: spmd.Mesh, train: bool, expert_axis: str = "data") -> Built:
    """The layer, or its training step with SGD and momentum.

    Args:
      mesh: with axes `data` and `model`.
      train: whether there is a loss and an update.
      expert_axis: what the experts are split over; an expert's hidden dim takes the other axis
        when the experts take the batch's.
    """
    hidden_axis = "model" if expert_axis == "data" else None

    def layer(params: Any, x_GSM: Any) -> Any:
        gates_GSEC = dispatch(jnp.einsum("gsm,me->gse", x_GSM, params["router"]))
        routed_EGCM = jnp.einsum("gsec,gsm->egcm", (gates_GSEC > 0).astype(x_GSM.dtype), x_GSM)
        group_axis = None if expert_axis == "data" else "data"
        spec = (expert_axis, group_axis, None, None)
        routed_EGCM = spmd.mark_sharding(routed_EGCM, mesh, spec)
        h_EGCH = jax.nn.relu(jnp.einsum("egcm,emh->egch", routed_EGCM, params["w_in"]))
        out_EGCM = jnp.einsum("egch,ehm->egcm", h_EGCH, params["w_out"])
        out_EGCM = spmd.mark_sharding(out_EGCM, mesh, spec)
        y_GSM = jnp.einsum("gsec,egcm->gsm", gates_GSEC, out_EGCM)
        return spmd.mark_sharding(y_GSM, mesh, ("data", None, None))

    params = {
        "router": marked(mesh, (None, None), (MODEL, EXPERTS)),
        "w_in": marked(mesh, (expert_axis, None, hidden_axis), (EXPERTS, MODEL, HIDDEN)),
        "w_out": marked(mesh, (expert_axis, hidden_axis, None), (EXPERTS, HIDDEN, MODEL)),
    }
    x = marked(mesh, ("data", None, None), (GROUPS, TOKENS, MODEL))
    if not train:
        return Built(layer, (params, x))
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((layer(params, x) - y) ** 2)

    step = training_step(jax.value_and_grad(loss_fn), optimizer)
    return Built(step, (params, structs_of(optimizer.init, params), x, x), donate=(0, 1))


def dispatch(logits_GSE: Any) -> Any:
    """Gate of each token at its place with its first expert; tokens without a place get none."""
    gates_GSE = jax.nn.softmax(logits_GSE, -1)
    chosen_GSE = jax.nn.one_hot(jnp.argmax(logits_GSE, -1), EXPERTS)
    place_GSE = ((jnp.cumsum(chosen_GSE, 1) - 1) * chosen_GSE).astype(jnp.int32)
    placed_GSEC = jax.nn.one_hot(place_GSE, PLACES) * chosen_GSE[..., None]
    return gates_GSE[..., None] * placed_GSEC

"""Gradients of layers under `jax.checkpoint`: by policy, scanned, unrolled and nested.

Letters in names: L layers, B batch, S and T positions, D model, F hidden, H heads, K of a head,
E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.ad_checkpoint import checkpoint_policies as policies

import spmd
from benchmarks.programs.program import Built, Program, marked, on_meshes

LAYERS, BATCH, POSITIONS, MODEL, HIDDEN, HEADS, EXPERTS = 4, 16, 64, 256, 1024, 8, 8

Layer = Callable[[Any, Any], Any]
"""(x, parameters) -> x."""

NAMED = ("hidden", "attended")
"""What layers name for the policies that save by name."""

CHECKPOINTS: dict[str, Callable[[Layer], Layer]] = {
    "none": lambda layer: layer,
    "default": jax.checkpoint,
    "no-prevent-cse": partial(jax.checkpoint, prevent_cse=False),
    "everything": partial(jax.checkpoint, policy=policies.everything_saveable),
    "dots": partial(jax.checkpoint, policy=policies.dots_saveable),
    "no-batch-dots": partial(jax.checkpoint, policy=policies.dots_with_no_batch_dims_saveable),
    "names": partial(jax.checkpoint, policy=policies.save_only_these_names(*NAMED)),
    "offload": partial(
        jax.checkpoint,
        policy=policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(NAMED),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}
"""How a layer is recomputed."""


def remat_programs() -> list[Program]:
    """Each kind of layer under the default; an MLP and attention under every policy."""
    programs = []
    for policy in CHECKPOINTS:
        for kind in ("mlp", "attention"):
            build = partial(gradient, kind=kind, policy=policy)
            programs += on_meshes(f"remat/{kind}-{policy}", build, "8x1", "4x2", "2x4")
    for kind, stack in (("mlp", "unrolled"), ("mlp", "nested"), ("moe", "scan"), ("moe", "nested")):
        for policy in ("none", "default", "no-prevent-cse", "dots"):
            build = partial(gradient, kind=kind, policy=policy, stack=stack)
            name = f"remat/{kind}-{stack}-{policy}"
            programs += on_meshes(name, build, "8x1", "4x2", "2x4")
    return programs


def gradient(mesh: spmd.Mesh, kind: str, policy: str, stack: str = "scan") -> Built:
    """The gradient of a mean square of layers, whose parameters are split in two dims.

    Args:
      mesh: with axes `data` and `model`.
      kind: `mlp`, `attention` or `moe`.
      policy: one of `CHECKPOINTS`.
      stack: `scan` over layers, `unrolled`, or `nested`: two scans, each of them checkpointed.
    """
    layer, shapes = LAYER_KINDS[kind]
    parameters = {
        name: marked(mesh, (None, *spec), (LAYERS, *shape))
        for name, (shape, spec) in shapes.items()
    }
    x = marked(mesh, ("data",), (BATCH, POSITIONS, MODEL))

    def loss(parameters: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(STACKS[stack](CHECKPOINTS[policy], layer, x, parameters)))

    def fn(parameters: Any, x: Any) -> Any:
        grads = jax.grad(loss)(parameters, x)
        return {
            name: spmd.mark_sharding(grads[name], mesh, (None, *spec))
            for name, (_, spec) in shapes.items()
        }

    return Built(fn, (parameters, x))


# Stacks of layers.


def _scan(checkpoint: Callable[[Layer], Layer], layer: Layer, x: Any, parameters: Any) -> Any:
    inner = checkpoint(layer)
    return lax.scan(lambda x, p: (inner(x, p), None), x, parameters)[0]


def _unrolled(checkpoint: Callable[[Layer], Layer], layer: Layer, x: Any, parameters: Any) -> Any:
    inner = checkpoint(layer)
    for i in range(LAYERS):
        x = inner(x, jax.tree.map(lambda p, i=i: p[i], parameters))
    return x


def _nested(checkpoint: Callable[[Layer], Layer], layer: Layer, x: Any, parameters: Any) -> Any:
    """Blocks of two layers; a block is recomputed, and in it each layer once more."""
    blocks = jax.tree.map(lambda p: p.reshape(LAYERS // 2, 2, *p.shape[1:]), parameters)
    block = checkpoint(partial(_scan, checkpoint, layer))
    return lax.scan(lambda x, p: (block(x, p), None), x, blocks)[0]


STACKS = {"scan": _scan, "unrolled": _unrolled, "nested": _nested}

# Layers, with their parameters' shapes and specs.


def _mlp(x_BSD: Any, p: Any) -> Any:
    h_BSF = checkpoint_name(jax.nn.gelu(x_BSD @ p["in_DF"]), "hidden")
    return x_BSD + h_BSF @ p["out_FD"]


def _attention(x_BSD: Any, p: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x_BSD, p[name]) for name in ("q_DHK", "k_DHK", "v_DHK"))
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) / 8)
    attended_BSHK = checkpoint_name(jnp.einsum("bhst,bthk->bshk", scores, v), "attended")
    return _mlp(x_BSD + jnp.einsum("bshk,hkd->bsd", attended_BSHK, p["o_HKD"]), p)


def _moe(x_BSD: Any, p: Any) -> Any:
    """Every token goes to every expert by its gate: the planner's problem is the same."""
    gates_BSE = jax.nn.softmax(x_BSD @ p["router_DE"])
    h_EBSF = jax.nn.relu(jnp.einsum("bsd,edf->ebsf", x_BSD, p["in_EDF"]))
    h_EBSF = checkpoint_name(h_EBSF, "hidden")
    return x_BSD + jnp.einsum("ebsf,efd,bse->bsd", h_EBSF, p["out_EFD"], gates_BSE)


_MLP = {
    "in_DF": ((MODEL, HIDDEN), ("data", "model")),
    "out_FD": ((HIDDEN, MODEL), ("model", "data")),
}
_HEADS = {
    name: ((MODEL, HEADS, MODEL // HEADS), ("data", "model"))
    for name in ("q_DHK", "k_DHK", "v_DHK")
} | {"o_HKD": ((HEADS, MODEL // HEADS, MODEL), ("model", None, "data"))}
_EXPERTS = {
    "router_DE": ((MODEL, EXPERTS), ("data",)),
    "in_EDF": ((EXPERTS, MODEL, HIDDEN // 4), ("model", "data")),
    "out_EFD": ((EXPERTS, HIDDEN // 4, MODEL), ("model", None, "data")),
}
LAYER_KINDS: dict[str, tuple[Layer, dict[str, Any]]] = {
    "mlp": (_mlp, _MLP),
    "attention": (_attention, _MLP | _HEADS),
    "moe": (_moe, _EXPERTS),
}
"""Kind -> the layer, and for each parameter its shape and spec."""

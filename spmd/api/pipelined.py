"""`pipeline`: layers over stages, microbatch after microbatch, as a loop of plain JAX.

All stages compute at once, each on another microbatch, and then hand on what they made: a `vmap`
over stages inside a `scan` over steps (GSPMD, Xu et al. 2021, section 3.3). With the stages' dim
split over a mesh axis, the compiler makes a collective-permute between neighbours of the shift.

What stage s does in step t, with S stages, V chunks of layers a stage, u = t - s:

    chunk v = u // S % V  of microbatch  u // (S V) * S + u % S,   where 0 <= u < M V

With V = 1 that is GPipe's schedule; with more, stage 0 goes on with what the last stage made a
step before, which is the next chunk's input (interleaved: Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd.api.marks import caller, known_mesh, mark_sharding, path_name, some_of
from spmd.api.schedules import Asked, chosen_pipeline
from spmd.errors import ArgumentError
from spmd.frontend.trace import mesh_at_hand
from spmd.ir.pipelines import SHIFT, Pipeline
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import OPEN, as_mesh

T = TypeVar("T")


def pipeline(
    layer_fn: Callable[..., T],
    stacked: Any,
    x: T,
    rows: Any = None,
    *,
    stages: int,
    microbatches: int,
    axis: str = "stage",
    schedule: str | None = None,
    chunks: int | None = None,
    mesh: Any = None,
) -> T:
    """Runs layers over the stages of a pipeline, the batch in microbatches.

    It returns what `jax.lax.scan` over the layers returns on the whole batch, and is plain JAX: it
    may be differentiated, mapped and checkpointed, and runs under `jax.jit`, too. While a pipeline
    fills and drains, layers compute on copies of a microbatch, of which nothing is seen.

    Args:
      layer_fn: `layer_fn(layer, x)`, or `layer_fn(layer, x, rows)` if there are rows: one layer. It
        returns a pytree like `x`, and computes each row of the batch on its own. What is the same
        for all rows and layers it closes over.
      stacked: a pytree of what each layer has, its parameters and all else: leaves (L, ...), or
        (chunks, L / chunks, ...) where `chunks` is given.
      x: a pytree of what enters the first layer: leaves (B, ...).
      rows: a pytree of what all layers read of each row (segment ids, angles): leaves (B, ...).
      stages: how many stages there are. The size of `axis` divides it.
      microbatches: into how many microbatches the batch is cut; it divides B.
      axis: the mesh axis over which stages are split.
      schedule: `gpipe`; `1f1b`, which computes steps again for the gradient and holds what
        `stages` microbatches leave, as 1F1B does; `interleaved`, in which each stage has several
        chunks of layers, with a smaller bubble; `interleaved 1f1b`. None: inside `spmd.jit` the one
        whose program is predicted to be the fastest of those that fit in memory, else `gpipe`. All
        but `gpipe` need microbatches that are a multiple of the stages.
      chunks: how many chunks each stage has where it is interleaved. If it is given, so are stacks:
        split over `axis` in dim 1, each device has its own chunks. If it is left out, there are 2,
        and weights that are split over `axis` in their layers move to where they are needed.
      mesh: where `axis` is; the mesh that the program is compiled for, or of `jax.set_mesh`, when
        left out. Without one nothing is marked.

    Raises:
      ArgumentError: counts that do not divide, leaves of other sizes, an unknown schedule.
      MeshError: the mesh has no such axis.

    Example:
      >>> y = pipeline(layer, params["layers"], x, stages=4, microbatches=16)

    Sources: Huang et al., *GPipe* (2019); Narayanan et al., *Efficient large-scale language model
    training on GPU clusters using Megatron-LM* (2021).
    """
    source = caller()
    own = mesh_at_hand() if mesh is None else as_mesh(mesh)
    of = chosen_pipeline(
        Asked(schedule, chunks, axis, stages, microbatches),
        layers=_layers(stacked, chunks, source),
        batch=_leading((x, rows), "x and rows", "(batch, ...)", source),
        mesh=own,
        source=source,
    )
    mark = partial(_marked, mesh=own, axis=axis)
    with jax.named_scope(of.scope):

        def of_stages(leaf: Any) -> Any:
            """(L, ...) or (V, L / V, ...) -> (S, V, layers of a chunk, ...)."""
            shape = of.chunks, of.stages, -1, *leaf.shape[1 + (chunks is not None) :]
            return jnp.reshape(leaf, shape).swapaxes(0, 1)

        def in_microbatches(leaf: Any) -> Any:
            """(B, ...) -> (M, B / M, ...); each has rows of all pieces of a split batch."""
            return leaf.reshape(-1, of.microbatches, *leaf.shape[1:]).swapaxes(0, 1)

        stacked = jax.tree.map(of_stages, stacked)
        cut = jax.tree.map(in_microbatches, (x, rows))
        out = _run(layer_fn, mark(stacked), cut, of, own)
        y: T = jax.tree.map(lambda leaf, like: leaf.swapaxes(0, 1).reshape(like.shape), out, x)
        return y


def _run(
    layer_fn: Callable[..., Any], stacked: Any, cut: Any, of: Pipeline, mesh: Mesh | None
) -> Any:
    """The loop over steps: what the last stage makes of each microbatch, leaves (M, B / M, ...).

    Layers are stacked as (S, V, layers of a chunk, ...), x and rows cut into (M, B / M, ...).
    """
    stage, mark = jnp.arange(of.stages), partial(_marked, mesh=mesh, axis=of.axis)

    def run_chunk(layers: Any, number: Any, state: Any) -> Any:
        layers = jax.tree.map(lambda leaf: _at(leaf, number), layers)
        x, rows = state
        more = () if rows is None else (rows,)
        return jax.lax.scan(lambda x, layer: (layer_fn(layer, x, *more), None), x, layers)[0], rows

    def step(state: Any, now: Any) -> tuple[Any, Any]:
        time, entering = now
        state = mark(state)
        begins = (stage == 0) & (time // of.stages % of.chunks == 0)
        state = jax.tree.map(lambda old, new: _moved(old, new, begins, of, mesh), state, entering)
        numbers = (time - stage) // of.stages % of.chunks
        state = mark(jax.vmap(run_chunk)(stacked, numbers, mark(state)))
        return state, jax.tree.map(lambda leaf: leaf[-1], state[0])

    # Layers need not be defined at zeros, and the gradient would multiply a NaN by zero. So what
    # is computed while the pipeline fills and drains is computed of copies of a microbatch.
    idle = jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf[0]), cut)
    state = mark(jax.tree.map(lambda leaf: jnp.stack([leaf] * of.stages), idle))
    entering = jax.tree.map(lambda leaf, fill: _entering(leaf, fill, of), cut, idle)
    out = _steps(step, state, (jnp.arange(of.steps), entering), of)
    return jax.tree.map(lambda leaf: _leaving(leaf, of), out)


def _steps(step: Callable[..., Any], state: Any, inputs: Any, of: Pipeline) -> Any:
    """Runs all steps; returns what they made from when the first microbatch leaves."""
    fill = of.stages - 1
    if not of.is_lean:
        return jax.tree.map(lambda leaf: leaf[fill:], jax.lax.scan(step, state, inputs)[1])
    state, _ = jax.lax.scan(step, state, jax.tree.map(lambda leaf: leaf[:fill], inputs))
    # Each window leaves the gradient its first state alone.
    window = jax.checkpoint(partial(jax.lax.scan, step), prevent_cse=False)
    windows = jax.tree.map(lambda leaf: leaf[fill:].reshape(-1, of.window, *leaf.shape[1:]), inputs)
    out = jax.lax.scan(window, state, windows)[1]
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)


# ---------------------------------------------------------------------------------------------
# Leaves.


def _at(leaf: Any, number: Any) -> Any:
    if leaf.shape[0] == 1:
        return leaf[0]
    return jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)


def _entering(leaf: Any, fill: Any, of: Pipeline) -> Any:
    """(M, ...) -> (steps, ...): what enters stage 0 in each step."""
    if of.chunks > 1:  # later chunks enter from the last stage
        groups = leaf.reshape(-1, 1, of.stages, *leaf.shape[1:])
        widths = [(0, of.chunks - 1 if dim == 1 else 0) for dim in range(groups.ndim)]
        leaf = jnp.pad(groups, widths).reshape(-1, *leaf.shape[1:])
    return jnp.concatenate([leaf, *[fill[None]] * (of.stages - 1)])


def _leaving(leaf: Any, of: Pipeline) -> Any:
    """(M V, ...) -> (M, ...): of what leaves the last stage, what the last chunk made."""
    groups = (
        leaf.reshape(-1, of.chunks, of.stages, *leaf.shape[1:])[:, -1] if of.chunks > 1 else leaf
    )
    return groups.reshape(of.microbatches, *leaf.shape[1:])


def _moved(leaf: Any, entering: Any, begins: Any, of: Pipeline, mesh: Mesh | None) -> Any:
    """(S, ...): each stage gets what the one before made, and stage 0 what enters."""
    is_apart = mesh is not None and mesh.shape[of.axis] == of.stages
    if is_apart:
        moved = _sent(leaf, of, mesh)
    else:  # no axis has one of them on each device
        moved = _shift(leaf, 1)
        moved = moved + _shift(leaf, 1 - of.stages) if of.chunks > 1 else moved
    return jnp.where(begins.reshape(-1, *[1] * (leaf.ndim - 1)), entering, moved)


def _sent(leaf: Any, of: Pipeline, mesh: Any) -> Any:
    """Stages moved on, each on a device of its own: one collective-permute between neighbours.

    It is written out, because a shift may be planned otherwise, and that of a ring would be two.
    """
    senders = range(of.stages if of.chunks > 1 else of.stages - 1)
    pairs = [(i, (i + 1) % of.stages) for i in senders]

    def send(leaf: Any) -> Any:
        with jax.named_scope(SHIFT):
            return jax.lax.ppermute(leaf, of.axis, pairs)

    spec, axes = PartitionSpec(of.axis), {of.axis}
    where = known_mesh(mesh)
    ring = jax.shard_map(send, mesh=where, in_specs=spec, out_specs=spec, axis_names=axes)
    return ring(leaf)


def _shift(leaf: Any, by: int) -> Any:
    """Moves stages on; where nothing comes from there are zeros."""
    widths = [(by, -by, 0)] + [(0, 0, 0)] * (leaf.ndim - 1)
    return jax.lax.pad(leaf, jnp.zeros((), leaf.dtype), widths)


def _marked(tree: Any, mesh: Mesh | None, axis: str) -> Any:
    """A tree whose leaves have dim 0 split over the axis; their other dims stay open."""
    if mesh is None:
        return tree

    def mark(leaf: Any) -> Any:
        return mark_sharding(leaf, mesh, (axis, *[OPEN] * (leaf.ndim - 1)))

    return jax.tree.map(mark, tree)


# ---------------------------------------------------------------------------------------------
# What is wrong.


def _layers(stacked: Any, chunks: int | None, source: str | None) -> int:
    if chunks is None:
        return _leading(stacked, "stacked", "(layers, ...)", source)
    count = _leading(stacked, "stacked", "(chunks, layers / chunks, ...)", source)
    if count != chunks:
        raise ArgumentError(
            f"pipeline: chunks={chunks}, but the stack has {count} in dim 0",
            source=source,
            required="with chunks=, leaves (chunks, layers / chunks, ...)",
            fix=f"reshape leaves to ({chunks}, layers / {chunks}, ...), or leave chunks out",
        )
    inner = jax.tree.map(lambda leaf: jax.typeof(leaf).update(shape=leaf.shape[1:]), stacked)
    return chunks * _leading(inner, "stacked", "(chunks, layers / chunks, ...)", source)


def _leading(tree: Any, what: str, shape: str, source: str | None) -> int:
    """The size of the first dim, which all leaves share."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    sizes = {path_name(path): jnp.shape(leaf) for path, leaf in leaves}
    first = {shape[0] if shape else None for shape in sizes.values()}
    if len(first) == 1 and (found := first.pop()):
        return found
    raise ArgumentError(
        f"pipeline: the leaves of {what} have no size of dim 0 in common",
        source=source,
        actual=some_of([f"{name} {shape}" for name, shape in sizes.items()]) or "no leaves",
        required=f"leaves {shape}",
        fix="what is the same for all rows and layers is closed over by layer_fn",
    )

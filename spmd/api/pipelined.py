"""`pipeline`: layers over stages, microbatch after microbatch, as a loop of plain JAX.

All stages compute at once, each on another microbatch, and then hand their results to the next: a
`vmap` over stages in a `scan` over steps (GSPMD, Xu et al. 2021, section 3.3). If the stages' dim
is split over a mesh axis, the shift becomes a collective-permute between neighbours.

What stage s does in step t, with S stages, V chunks of layers a stage, M microbatches, u = t - s:

    chunk v = u // S % V  of microbatch  u // (S V) * S + u % S,   where 0 <= u < M V

With V = 1 that is GPipe's schedule; with more, stage 0 goes on with what the last stage made a
step before, which is the next chunk's input (interleaved: Narayanan et al. 2021).
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd.api.compiled import Lowered
from spmd.api.marks import argument_error, mark_sharding, mesh_error, path_name, some_of
from spmd.compiler import Request
from spmd.errors import PlanError
from spmd.frontend.importer.module import module_text
from spmd.frontend.trace import mesh_at_hand
from spmd.ir.pipelines import SCHEDULES, SHIFT, Pipeline, pipelines_in
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import OPEN, as_mesh
from spmd.planning.search import Candidate, Search
from spmd.predict.backends import memory_for

T = TypeVar("T")

DEFAULT = "gpipe"
SHORT = 0.5  # memory is short where a program takes more than this share of it

_TAKEN: ContextVar[str] = ContextVar("schedule of pipelines", default=DEFAULT)
"""The schedule, in the current trace, of `pipeline` calls that name none, if they can take it."""


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
    """Applies layers to a batch, one after another, with layers split over stages of a pipeline.

    It returns what `jax.lax.scan` over the layers returns on the whole batch, and is plain JAX: it
    may be differentiated, mapped and checkpointed, and runs under `jax.jit`, too. While a pipeline
    fills and drains, idle stages compute on copies of a microbatch; their results are dropped.

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
      schedule: `gpipe`; `1f1b`, which computes steps again for the gradient and holds residuals of
        `stages` microbatches at a time, as 1F1B does; `interleaved`, in which stages have several
        chunks of layers, with a smaller bubble; `interleaved 1f1b`. None: inside `spmd.jit` the one
        whose program is predicted to be the fastest of those that fit in memory, else `gpipe`. All
        but `gpipe` need microbatches that are a multiple of the stages.
      chunks: how many chunks a stage has if interleaved. If given, `stacked` has them in dim 0, and
        split over `axis` in dim 1 it has on each device the device's own chunks. If left out, there
        are 2, and weights that are split over `axis` in their layers move to where they are needed.
      mesh: the mesh that has `axis`; when left out that which the program is compiled for, or of
        `jax.set_mesh`. Without one nothing is marked.

    Raises:
      ArgumentError: counts that do not divide, leaves of other sizes, an unknown schedule.
      MeshError: the mesh has no such axis.

    Example:
      >>> y = pipeline(layer, params["layers"], x, stages=4, microbatches=16)

    Sources: Huang et al., *GPipe* (2019); Narayanan et al., *Efficient large-scale language model
    training on GPU clusters using Megatron-LM* (2021).
    """
    own = mesh_at_hand() if mesh is None else as_mesh(mesh)
    layers, batch = _layers(stacked, chunks), _leading((x, rows), "x and rows", "(batch, ...)")
    asked = Pipeline(axis, stages, microbatches)
    of = _chosen_pipeline(schedule, chunks, asked, layers, batch, own)

    def mark(tree: Any) -> Any:
        """Marks each leaf: dim 0 split over `axis`, other dims open; not if there is no mesh."""
        if own is None:
            return tree
        return jax.tree.map(
            lambda leaf: mark_sharding(leaf, own, (axis, *[OPEN] * (leaf.ndim - 1))), tree
        )

    def of_stages(leaf: Any) -> Any:
        """Reshapes a stack of layers to (stages, chunks of a stage, layers of a chunk, ...)."""
        shape = of.chunks, of.stages, -1, *leaf.shape[1 + (chunks is not None) :]
        return jnp.reshape(leaf, shape).swapaxes(0, 1)

    def in_microbatches(leaf: Any) -> Any:
        """Reshapes (B, ...) to (microbatches, rows, ...): row i to microbatch i % their number."""
        return leaf.reshape(-1, of.microbatches, *leaf.shape[1:]).swapaxes(0, 1)

    def entering(leaf: Any, fill: Any) -> Any:
        """Turns (microbatches, ...) to (steps, ...): what enters stage 0 in a step, or a filler."""
        if of.chunks > 1:  # later chunks enter from the last stage
            groups = leaf.reshape(-1, 1, of.stages, *leaf.shape[1:])
            widths = [(0, of.chunks - 1 if dim == 1 else 0) for dim in range(groups.ndim)]
            leaf = jnp.pad(groups, widths).reshape(-1, *leaf.shape[1:])
        return jnp.concatenate([leaf, *[fill[None]] * (of.stages - 1)])

    def run_chunk(layers: Any, number: Any, state: Any) -> Any:
        at = partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
        layers = jax.tree.map(lambda leaf: leaf[0] if leaf.shape[0] == 1 else at(leaf), layers)
        x, rows = state
        more = () if rows is None else (rows,)
        return jax.lax.scan(lambda x, layer: (layer_fn(layer, x, *more), None), x, layers)[0], rows

    def step(state: Any, now: Any) -> tuple[Any, Any]:
        time, first = now
        state = mark(state)
        begins = (stage == 0) & (time // of.stages % of.chunks == 0)
        state = jax.tree.map(lambda old, new: _moved(old, new, begins, of, own), state, first)
        numbers = (time - stage) // of.stages % of.chunks
        state = mark(jax.vmap(run_chunk)(by_stage, numbers, mark(state)))
        return state, jax.tree.map(lambda leaf: leaf[-1], state[0])

    def leaving(leaf: Any) -> Any:
        """Keeps the last chunk's outputs: (microbatches * chunks, ...) -> (microbatches, ...)."""
        if of.chunks > 1:
            leaf = leaf.reshape(-1, of.chunks, of.stages, *leaf.shape[1:])[:, -1]
            leaf = leaf.reshape(of.microbatches, *leaf.shape[2:])
        return leaf

    with jax.named_scope(of.scope):
        by_stage = jax.tree.map(of_stages, stacked)
        cut = jax.tree.map(in_microbatches, (x, rows))
        by_stage, stage = mark(by_stage), jnp.arange(of.stages)
        # Layers need not be defined at zeros, and the gradient would multiply a NaN by zero. So
        # what is computed while the pipeline fills and drains is computed of copies of a
        # microbatch.
        idle = jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf[0]), cut)
        state = mark(jax.tree.map(lambda leaf: jnp.stack([leaf] * of.stages), idle))
        first = jax.tree.map(entering, cut, idle)
        out = _steps(step, state, (jnp.arange(of.steps), first), of)
        out = jax.tree.map(leaving, out)
        y: T = jax.tree.map(lambda leaf, like: leaf.swapaxes(0, 1).reshape(like.shape), out, x)
        return y


def _steps(step: Callable[..., Any], state: Any, inputs: Any, of: Pipeline) -> Any:
    """Scans `step` over `inputs`; returns its stacked outputs without the first `stages - 1`."""
    fill = of.stages - 1
    if not of.is_lean:
        return jax.tree.map(lambda leaf: leaf[fill:], jax.lax.scan(step, state, inputs)[1])
    state, _ = jax.lax.scan(step, state, jax.tree.map(lambda leaf: leaf[:fill], inputs))
    # Each window leaves the gradient its first state alone.
    window = jax.checkpoint(partial(jax.lax.scan, step), prevent_cse=False)
    windows = jax.tree.map(lambda leaf: leaf[fill:].reshape(-1, of.window, *leaf.shape[1:]), inputs)
    out = jax.lax.scan(window, state, windows)[1]
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)


def _moved(leaf: Any, entering: Any, begins: Any, of: Pipeline, mesh: Mesh | None) -> Any:
    """Returns the next inputs of all stages: row s - 1 of `leaf` for stage s, (S, ...) -> (S, ...).

    Where `begins[s]` it is `entering` instead. With chunks stage 0 gets the last row, else zeros.
    """

    def shift(by: int) -> Any:
        """Shifts dim 0 by so many rows, with zeros in the rows that become free."""
        widths = [(by, -by, 0)] + [(0, 0, 0)] * (leaf.ndim - 1)
        return jax.lax.pad(leaf, jnp.zeros((), leaf.dtype), widths)

    if mesh is not None and mesh.shape[of.axis] == of.stages:
        # Each is on a device of its own: one collective-permute between neighbours. It is written
        # out, because a shift may be planned otherwise, and that of a ring would be two.
        senders = range(of.stages if of.chunks > 1 else of.stages - 1)
        pairs = [(i, (i + 1) % of.stages) for i in senders]

        def send(leaf: Any) -> Any:
            with jax.named_scope(SHIFT):
                return jax.lax.ppermute(leaf, of.axis, pairs)

        spec, where = PartitionSpec(of.axis), mesh.in_jax
        over: Any = {"in_specs": spec, "out_specs": spec, "axis_names": {of.axis}}
        moved = jax.shard_map(send, mesh=where, **over)(leaf)
    else:  # no axis has one of them on each device
        moved = shift(1) + shift(1 - of.stages) if of.chunks > 1 else shift(1)
    return jnp.where(begins.reshape(-1, *[1] * (leaf.ndim - 1)), entering, moved)


def _layers(stacked: Any, chunks: int | None) -> int:
    if chunks is None:
        return _leading(stacked, "stacked", "(layers, ...)")
    shape = "(chunks, layers / chunks, ...)"
    count = _leading(stacked, "stacked", shape)
    if count != chunks:
        raise argument_error(
            f"pipeline: chunks={chunks}, but the stack has {count} in dim 0",
            required="with chunks=, leaves (chunks, layers / chunks, ...)",
            fix=f"reshape leaves to ({chunks}, layers / {chunks}, ...), or leave chunks out",
        )
    return chunks * _leading(stacked, "stacked", shape, dim=1)


def _leading(tree: Any, what: str, shape: str, dim: int = 0) -> int:
    """Returns the one size of `dim` in all leaves; ArgumentError (on `what`) if none, or if 0."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    sizes = {path_name(path): jnp.shape(leaf) for path, leaf in leaves}
    first = {shape[dim] if len(shape) > dim else None for shape in sizes.values()}
    if len(first) == 1 and (found := first.pop()):
        return found
    raise argument_error(
        f"pipeline: the leaves of {what} have no size of dim {dim} in common",
        actual=some_of([f"{name} {shape}" for name, shape in sizes.items()]) or "no leaves",
        required=f"leaves {shape}",
        fix="what is the same for all rows and layers is closed over by layer_fn",
    )


# Schedules: what they need, and which is taken where nobody says. How long a schedule takes depends
# on all that is around it, so a program is traced and planned with each, and the one with the
# shortest predicted run is taken, as with other forms of a program.


def _chosen_pipeline(
    schedule: str | None,
    chunks: int | None,
    of: Pipeline,
    layers: int,
    batch: int,
    mesh: Mesh | None,
) -> Pipeline:
    """Returns a call's pipeline: of the sizes in `of`, in the schedule named or else being tried.

    If that being tried is impossible, it is the first possible one. `layers` and `batch` are the
    numbers of all layers and of the batch's rows. Errors are as for `pipeline`.
    """
    size = 1 if mesh is None else mesh.shape.get(of.axis)
    if size is None:
        raise mesh_error(
            f"pipeline: the mesh has no axis {of.axis!r}",
            actual=f"({mesh})",
            fix=f"make the mesh with {of.axis}={of.stages}, or name another axis=",
        )
    if schedule not in (None, *SCHEDULES):
        raise argument_error(
            f"pipeline: schedule={schedule!r} is none",
            required=f"one of {', '.join(map(repr, SCHEDULES))}, or None",
        )
    found = {
        name: of._replace(chunks=(chunks or 2) if is_chunked else 1, is_lean=is_lean)
        for name, (is_chunked, is_lean) in SCHEDULES.items()
    }
    refusals = {name: _refusal(each, chunks, layers, batch, size) for name, each in found.items()}
    possible = [name for name in found if refusals[name] is None]
    if schedule is None and possible:
        taken = _TAKEN.get()
        is_open = sum(1 << i for i, name in enumerate(SCHEDULES) if name in possible)
        return found[taken if taken in possible else possible[0]]._replace(open=is_open)
    schedule = schedule or ("interleaved" if chunks else DEFAULT)
    if refusal := refusals[schedule]:
        what, required = refusal
        raise argument_error(f"pipeline: {what}", required=required)
    return found[schedule]


def _refusal(
    of: Pipeline, chunks: int | None, layers: int, batch: int, size: int
) -> tuple[str, str] | None:
    """Returns (what is wrong, what is required instead), both for an error; None if nothing is.

    `chunks` is what the user gave; `size` is that of the mesh axis, `batch` that in rows.
    """
    if min(of.stages, of.microbatches) < 1:
        return f"stages={of.stages}, microbatches={of.microbatches}", "numbers of at least 1"
    if batch % of.microbatches:
        what = f"a batch of {batch} rows is not {of.microbatches} microbatches"
        return what, "microbatches= that divides the batch"
    if of.stages % size:
        what = f"{of.stages} stages are not split evenly over {of.axis}={size}"
        return what, f"stages= a multiple of {size}; as many, for one stage on each device"
    if of.chunks < (chunks or 0):
        what = f"chunks={chunks} with schedule={of.schedule!r}, in which a stage has one"
        return what, "schedule='interleaved', or no chunks"
    if layers % of.window:
        parts = f"{of.stages} stages" + (f" of {of.chunks} chunks" if of.chunks > 1 else "")
        what = f"{layers} layers are not split evenly over {parts}"
        return what, f"a number of layers that {of.window} divides"
    if of.schedule != "gpipe" and of.microbatches % of.stages:
        groups = f"{of.microbatches} microbatches are not groups of {of.stages} stages"
        what = f"{groups}, as schedule={of.schedule!r} takes them"
        return what, f"microbatches= a multiple of {of.stages}; 'gpipe' takes any number"
    return None


class _Tried(NamedTuple):
    """A program planned with its pipelines in one schedule, for `Search` to compare."""

    lowered: Lowered

    @property
    def seconds(self) -> float:
        return self.lowered.cost

    @property
    def bytes(self) -> int:
        return self.lowered.predicted_memory.peak


def in_fastest_schedule(
    trace: Callable[[bool], Request], plan: Callable[[Request], Lowered], memory_limit: int | None
) -> Lowered:
    """Returns a program with its pipelines in the schedule that is predicted to be the fastest.

    `trace(may_reuse)` traces it, from jax's cache if it may, and `plan` plans it, in each schedule
    that its pipelines leave open; in 1F1B ones only if all others take over half of the memory
    (`memory_limit` bytes, or what the topology has room for). If none fits, the one that takes the
    least is returned; PlanError if there is a limit and none keeps to it.
    """
    request, tried = trace(True), []
    try:
        tried = [_Tried(plan(request))]
        scopes = {op.loc.scope for op in tried[0].lowered.stages.plan.program.walk()}
    except PlanError as error:
        refused, scopes = error, {module_text(request.module, has_locations=True)}
    pipelines = [of for of in pipelines_in(" ".join(scopes)) if of.open]
    if not tried and (memory_limit is None or not pipelines):
        raise refused
    if not pipelines:
        return tried[0].lowered
    search = Search(memory_for(request.topology, memory_limit), tried)
    names = {name for of in pipelines for name in of.open_schedules}
    names -= {min(of.schedule for of in pipelines)}  # that is what was traced

    def in_schedule(name: str) -> _Tried:
        token = _TAKEN.set(name)
        try:
            return _Tried(plan(trace(False)))
        finally:
            _TAKEN.reset(token)

    # To compute steps again takes longer, but where memory is short so does what else saves it.
    for is_lean in (False, True):
        if is_lean and any(each.bytes <= SHORT * search.limit for each in search.tried):
            break
        for name in SCHEDULES:
            if SCHEDULES[name][1] == is_lean and name in names:
                search.weigh(Candidate(f"pipelines {name}", partial(in_schedule, name)))
    if not search.tried:
        raise refused
    best = search.best.lowered
    forms = (*best.stages.plan.forms, *search.weighed)
    best.stages = replace(best.stages, plan=best.stages.plan._replace(forms=forms))
    return best

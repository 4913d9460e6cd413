"""`jit`: a function that is compiled for a mesh when it is called, once for each kind of call."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
from jax import jit as plain_jit  # users may put spmd.jit in its place
from jax.sharding import NamedSharding

from spmd.api.compiled import Compiled, Lowered
from spmd.api.dispatch import ARRAY, dispatched, known
from spmd.api.marks import mark_sharding
from spmd.api.mistakes import check_jit, one_of
from spmd.api.parameters import by_number_and_name, function_name
from spmd.api.schedules import Tried, in_fastest_schedule
from spmd.api.specs import arg_specs, check_memory, mesh_of, result_specs, specified
from spmd.api.tracing import Call, Recipe, take_apart, trace_call
from spmd.compiler import Request, compile_module
from spmd.explain.marks import costly_text
from spmd.explain.words import idle_text, plural
from spmd.frontend.trace import ClosedOverTracer, note_mesh
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import as_mesh, mesh_around
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.progress import doing, progress

P = ParamSpec("P")
R = TypeVar("R")

_IS_DELETED = ARRAY.is_deleted


@overload
def jit(fn: Callable[P, R], **options: Any) -> Jitted[P, R]: ...
@overload
def jit(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
def jit(  # type: ignore[misc]  # the overloads leave its options open
    fn: Any = None,
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: Any = None,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> Any:
    """Compiles a single-device function for a mesh; takes what `jax.jit` takes, and a mesh.

    Called with values, it runs the partitioned program. Called inside of another program (under
    `jax.grad`, `jax.vmap`, `jax.jit`, another `spmd.jit`, ...) it is a part of that: its marks go
    with it, and what partitions it is what compiles the whole.

    Args:
      fn: a function of pytrees of arrays, as for `jax.jit`. Without it, a decorator is returned.
      mesh: the mesh, ours or jax's. Left out, it is that of the arguments that are placed on one,
        of the marks inside `fn`, or that of `jax.set_mesh`.
      in_specs: for each parameter a spec, a pytree of specs, a `NamedSharding`, or None (open). As
        for `jax.jit`, static arguments may be left out. A single `PartitionSpec` or `NamedSharding`
        is for all arguments.
      out_specs: a spec, or a pytree of specs that matches the result (or a prefix of it).
      in_shardings: the same as `in_specs`, under the name that `jax.jit` has for it.
      out_shardings: the same as `out_specs`.
      static_argnums: numbers of the arguments that are constants of the program.
      static_argnames: names of those. As for `jax.jit`, one is read off the other where only one is
        given, so that an argument may be passed by position and by name.
      donate_argnums: numbers of the arguments whose memory the results may take over.
      donate_argnames: names of those.
      keep_unused: as for `jax.jit`, where the function is a part of another program; a program of
        its own keeps all arguments.
      device: refused, since the mesh says it.
      backend: refused as well.
      inline: as for `jax.jit`, where the function is a part of another program.
      compiler_options: passed to XLA as they are, beside those in `options`.
      options: compile options.

    Returns:
      An object to call like `fn`; see `Jitted`.

    Raises:
      ArgumentError: `fn` is not a function, `options` are not `Options`, a device is given, or
        specs are given under both names.
      MeshError: the mesh is not one.

    Example:
      >>> step = jit(train_step, mesh=mesh, donate_argnums=(0, 1))
      >>> params, opt_state, loss = step(params, opt_state, batch)
    """
    if fn is None:
        given = {name: value for name, value in locals().items() if name != "fn"}
        return functools.partial(jit, **given)
    check_jit(fn, options, device, backend)
    if mesh is not None:
        as_mesh(mesh)
    options = options or Options()
    if compiler_options:
        both = {**options.compiler_options, **compiler_options}
        options = replace(options, compiler_options=both)
    return Jitted(
        Recipe(
            fn,
            mesh,
            one_of(in_specs, specified(in_shardings), "in"),
            one_of(out_specs, specified(out_shardings), "out"),
            *by_number_and_name(fn, static_argnums, static_argnames),
            *by_number_and_name(fn, donate_argnums, donate_argnames),
            keep_unused,
            inline,
            options,
        )
    )


class Jitted(Generic[P, R]):
    """What `jit` returns: call it, or `trace` / `lower` / `compile` it for given arguments."""

    def __init__(self, recipe: Recipe) -> None:
        functools.update_wrapper(self, recipe.fn, updated=())
        self.__name__ = function_name(recipe.fn)
        self.recipe = recipe
        self._cache: dict[Any, list[Compiled]] = {}
        self._is_on_cpu = False
        self._dispatched = self._new_dispatch()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the program, compiled on first use for these shapes and shardings."""
        if self._is_on_cpu:
            self._check(args, kwargs)
        result: R = self._dispatched(*args, **kwargs)
        return result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the instance is the first argument."""
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        mesh = self.recipe.mesh
        where = f"on {as_mesh(mesh)}" if mesh is not None else "on the mesh of its arguments"
        kinds = plural(self._cache_size(), "kind")
        return f"<spmd.jit of {self.__name__} {where}: compiled for {kinds} of call>"

    @functools.cached_property
    def inlined(self) -> Any:
        """The marked function under `jax.jit`: what is called inside of other programs."""
        recipe = self.recipe
        return plain_jit(
            functools.wraps(recipe.fn)(_marked(recipe)),
            static_argnums=recipe.static_argnums,
            static_argnames=recipe.static_argnames,
            donate_argnums=recipe.donate_argnums,
            donate_argnames=recipe.donate_argnames,
            keep_unused=recipe.keep_unused,
            inline=recipe.inline,
        )

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The function traced by jax, as `jax.jit(fn).trace` does; `lower` of it is our own."""
        return Traced(self, self.inlined.trace(*args, **kwargs), args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's pytree of `ShapeDtypeStruct`s; nothing is compiled."""
        return self.inlined.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        self._cache.clear()
        self.__dict__.pop("inlined", None)
        self._dispatched = self._new_dispatch()

    def compile(self, *args: Any, topology: Topology | None = None, **kwargs: Any) -> Compiled:
        """Compiles for arguments (arrays or `ShapeDtypeStruct`s) without running.

        Args:
          *args: the positional arguments of `fn`, arrays or `ShapeDtypeStruct`s.
          topology: the machine to plan and compile for, which need not be here: libtpu compiles for
            TPUs anywhere (`pip install "spmd[tpu]"`), and jax's plugin for CUDA for NVIDIA GPUs
            (`spmd[cuda]`). Such a program cannot be called; its memory and its optimized HLO are
            those of the machine. The mesh's devices if left out.
          **kwargs: the keyword arguments of `fn`.

        Returns:
          The compiled program. Calling this object with such arguments runs it, too.

        Raises:
          MeshError: no compiler for the machine is here; `lower` plans for it without one.

        Example:
          >>> step.compile(params, state, batch, topology=spmd.Topology("v4:4x4x8")).memory
        """
        if topology is not None:
            return self.lower(*args, topology=topology, **kwargs).compile()
        return self._compiled(take_apart(self.recipe, args, kwargs))

    def lower(self, *args: Any, topology: Topology | None = None, **kwargs: Any) -> Lowered:
        """Runs our own compiler only: no device is needed, XLA is not called.

        Args:
          *args: the positional arguments of `fn`, arrays or `ShapeDtypeStruct`s.
          topology: the machine to plan for, which need not be here; guessed from the mesh when left
            out.
          **kwargs: the keyword arguments of `fn`.
        """
        return self._lower(take_apart(self.recipe, args, kwargs), topology)

    def request(self, *args: Any, topology: Topology | None = None, **kwargs: Any) -> Request:
        """What is to be compiled for these arguments; nothing is compiled yet."""
        return trace_call(self.recipe, take_apart(self.recipe, args, kwargs), topology).request

    def _new_dispatch(self) -> Callable[..., Any]:
        """A way of calls on which no kind of call is known yet."""
        recipe = self.recipe
        donated = recipe.donate_argnums + recipe.donate_argnames
        static = recipe.static_argnums, recipe.static_argnames
        return dispatched(recipe.fn, self._miss, *static, donated)

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Serves a call of a new kind; see `dispatch`."""
        call = take_apart(self.recipe, args, kwargs)
        if call.is_traced:
            return self.inlined(*args, **kwargs), None
        try:
            compiled = self._compiled(call)
        except ClosedOverTracer:  # it uses a value of another function, and is a part of that
            return self.inlined(*args, **kwargs), None
        boundary = compiled.boundary
        runs_without_us = not (boundary.has_keys or boundary.in_other_layouts(call.leaves))
        results = compiled.run(call.leaves)
        self._is_on_cpu = compiled.request.platform == "cpu"
        way = None
        if runs_without_us:
            constants = getattr(compiled.executable, "constants", ())
            way = known(compiled.executable, results, compiled.out_tree, constants)
        return compiled.unflattened(results), way

    def _check(self, args: Any, kwargs: Any) -> None:
        """Holds that arrays are alive and donated once, where the runtime would crash."""
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if type(leaf) is ARRAY]
        is_gone = any(map(_IS_DELETED, arrays))
        donates = self.recipe.donate_argnums or self.recipe.donate_argnames
        if is_gone or (donates and len(set(map(id, arrays))) < len(arrays)):
            call = take_apart(self.recipe, args, kwargs)
            self._compiled(call).check(call.leaves)

    def _cache_size(self) -> int:
        return sum(map(len, self._cache.values()))

    def _compiled(self, call: Call) -> Compiled:
        key = call.key
        for compiled in self._cache.get(key, ()):
            if compiled.boundary.accepts(call.leaves):
                return compiled
        with self._progress():
            compiled = self._lower(call, None).compile()
        self._cache.setdefault(key, []).append(compiled)
        return compiled

    def _lower(self, call: Call, topology: Topology | None) -> Lowered:
        options = self.recipe.options
        with self._progress():
            attempt = functools.partial(_tried, self.recipe, call, topology)
            best = in_fastest_schedule(attempt, options.memory_limit)
        stages = best.stages
        if stages.plan.choices and (idle := stages.plan.idle_axes):
            warnings.warn(f"{self.__name__}: {idle_text(idle)}", stacklevel=_calls_above())
        lowered = Lowered(best.interface, stages, options, topology)
        if (costly := lowered.prices.obvious_mark) is not None:
            text = costly_text(costly, stages.plan.mesh)
            warnings.warn(f"{self.__name__}: {text}", stacklevel=_calls_above())
        return lowered

    def _progress(self) -> AbstractContextManager[None]:
        return progress(self.__name__, self.recipe.options.shows_progress)


def _tried(recipe: Recipe, call: Call, topology: Topology | None, may_reuse: bool) -> Tried:
    """Traces and plans a call; `may_reuse` allows for a trace of jax's that is there."""
    doing("trace")
    if not may_reuse:
        fn = recipe.fn
        again = functools.wraps(fn, updated=())(lambda *args, **kwargs: fn(*args, **kwargs))
        recipe = replace(recipe, fn=again)
    interface = trace_call(recipe, call, topology)
    return Tried(interface, compile_module(interface.request, recipe.options))


class Traced:
    """What jax traced (`jax.stages.Traced`), to be lowered by our compiler."""

    def __init__(self, jitted: Jitted[..., Any], traced: Any, args: Any, kwargs: Any) -> None:
        self._jitted, self._traced, self._args, self._kwargs = jitted, traced, args, kwargs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced, name)

    def lower(self, *, topology: Topology | None = None, **by_jax: Any) -> Any:
        """The planned program; with `lowering_platforms`, jax's own module with the marks in it.

        Args:
          topology: as for `Jitted.lower`.
          **by_jax: what `jax.stages.Traced.lower` takes, as `jax.export` uses it.
        """
        if by_jax:
            return self._traced.lower(**by_jax)
        return self._jitted.lower(*self._args, topology=topology, **self._kwargs)


def _calls_above() -> int:
    """How many calls of ours are between a warning and the user's own line."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "spmd":
        frame, count = frame.f_back, count + 1
    return count


# ---------------------------------------------------------------------------------------------
# The function inside of other programs: with the marks that `jit` was told of.


def _marked(recipe: Recipe) -> Callable[..., Any]:
    """The function, and sharding constraints on what its specs say of arguments and results.

    Under `jax.jit` it is the marked program; inside another `spmd.jit` it is planned with what is
    around it. Static arguments come as they are.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = recipe.given_mesh
        if given is not None:
            note_mesh(as_mesh(given))
        else:
            given = mesh_around()
        if given is None or (recipe.in_specs is None and recipe.out_specs is None):
            return recipe.fn(*args, **kwargs)
        mesh = as_mesh(given)
        args, kwargs = _marked_arguments(recipe, args, kwargs, mesh)
        results = recipe.fn(*args, **kwargs)
        if recipe.out_specs is None:
            return results
        leaves, tree = jax.tree.flatten(results)
        specs = result_specs(recipe.out_specs, results)
        marks = [_mark(*each, mesh) for each in zip(leaves, specs, strict=True)]
        return jax.tree.unflatten(tree, marks)

    return call


def _marked_arguments(
    recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if recipe.in_specs is None:
        return args, kwargs
    argnums, dynamic = recipe.dynamic(args, kwargs)
    parts = recipe.parts(dynamic, argnums, len(args))
    specs = arg_specs(recipe.in_specs, parts, recipe.fn, len(args))
    leaves, tree = jax.tree.flatten(dynamic)
    marked_leaves = [_mark(*each, mesh) for each in zip(leaves, specs, strict=True)]
    positional, named = jax.tree.unflatten(tree, marked_leaves)
    found = dict(zip(argnums, positional, strict=True))
    return tuple(found.get(i, arg) for i, arg in enumerate(args)), {**kwargs, **named}


def _mark(leaf: Any, spec: Any, mesh: Mesh) -> Any:
    """Marks a leaf with a spec on a mesh, or with a sharding on its own."""
    if spec is None:
        return leaf
    if isinstance(spec, NamedSharding):
        check_memory(spec, "an argument or result")
        return mark_sharding(leaf, mesh_of(spec, mesh), spec.spec)
    return mark_sharding(leaf, mesh, spec)

"""`jit`: a function that is compiled for a mesh when it is called, once for each kind of call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar

from spmd.api.arguments import function_name
from spmd.api.compiled import Compiled, Lowered
from spmd.api.mistakes import check_jit
from spmd.api.tracing import Call, Recipe, take_apart, trace_call
from spmd.explain.costly import costly_text
from spmd.explain.words import idle_text, plural
from spmd.mesh.spec import as_mesh
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.pipeline import Request, compile_module
from spmd.progress import doing, progress

P = ParamSpec("P")
R = TypeVar("R")


def jit(
    fn: Callable[P, R] | None = None,
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    options: Options | None = None,
) -> Jitted[P, R]:
    """Compiles a single-device function for a mesh.

    Args:
      fn: a function of pytrees of arrays, as for `jax.jit`.
      mesh: the mesh; taken from marked arguments or from the marks inside `fn` when left out.
      in_specs: for each positional argument a spec, a pytree of specs, or None (open).
      out_specs: a spec, or a pytree of specs that matches the result (or a prefix of it).
      static_argnums: numbers of the positional arguments that are constants of the program, as for
        `jax.jit`.
      static_argnames: names of the keyword arguments that are.
      donate_argnums: numbers of the positional arguments whose memory the results may take over.
      options: compile options.

    Returns:
      An object to call like `fn`; see `Jitted`.

    Raises:
      ArgumentError: `fn` is not a function, or `options` are not `Options`.
      MeshError: the mesh is not one.

    Example:
      >>> step = jit(train_step, mesh=mesh, donate_argnums=(0, 1))
      >>> params, opt_state, loss = step(params, opt_state, batch)
    """
    check_jit(fn, options)
    if mesh is not None:
        as_mesh(mesh)
    return Jitted(
        Recipe(
            fn,
            mesh,
            in_specs,
            out_specs,
            (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums),
            (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames),
            (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums),
            options or Options(),
        )
    )


class Jitted(Generic[P, R]):
    """What `jit` returns: call it, or `lower` / `compile` it for given arguments."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._cache: dict[Any, list[Compiled]] = {}
        self.__name__ = function_name(recipe.fn)
        self.__doc__ = recipe.fn.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the program, compiled on first use for these shapes and shardings."""
        call = take_apart(self.recipe, args, kwargs)
        result: R = self._compiled(call).run(call.leaves)
        return result

    def __repr__(self) -> str:
        mesh = self.recipe.mesh
        where = f"on {as_mesh(mesh)}" if mesh is not None else "on the mesh of its arguments"
        kinds = plural(sum(map(len, self._cache.values())), "kind")
        return f"<spmd.jit of {self.__name__} {where}: compiled for {kinds} of call>"

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

    def _compiled(self, call: Call) -> Compiled:
        key = call.key
        for compiled in self._cache.get(key, ()):
            if compiled.accepts(call.leaves):
                return compiled
        with self._progress():
            compiled = self._lower(call, None).compile()
        self._cache.setdefault(key, []).append(compiled)
        return compiled

    def _lower(self, call: Call, topology: Topology | None) -> Lowered:
        options = self.recipe.options
        with self._progress():
            doing("trace")
            traced = trace_call(self.recipe, call, topology)
            stages = compile_module(traced.request, options)
        if stages.plan.choices and (idle := stages.plan.idle_axes):
            warnings.warn(f"{self.__name__}: {idle_text(idle)}", stacklevel=_calls_above())
        lowered = Lowered(traced, stages, options, topology)
        if (costly := lowered.prices.obvious_mark) is not None:
            text = costly_text(costly, stages.plan.mesh)
            warnings.warn(f"{self.__name__}: {text}", stacklevel=_calls_above())
        return lowered

    def _progress(self) -> AbstractContextManager[None]:
        return progress(self.__name__, self.recipe.options.shows_progress)


def _calls_above() -> int:
    """How many calls of ours are between a warning and the user's own line."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "spmd":
        frame, count = frame.f_back, count + 1
    return count

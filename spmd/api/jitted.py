"""`jit` returns a function that is compiled for a mesh on the first call of each kind."""

import functools
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
from jax import jit as plain_jit  # users may put spmd.jit in its place
from jax.sharding import AbstractMesh, NamedSharding

from spmd.api import arguments
from spmd.api.compiled import Compiled, Lowered
from spmd.api.dispatch import dispatched, is_misused, without_nan
from spmd.api.marks import argument_error, mark_sharding, spec_error
from spmd.api.pipelined import in_fastest_schedule
from spmd.api.tracing import Call, Recipe, kind_of_call, take_apart, trace_call
from spmd.compiler import Request, compile_module
from spmd.errors import ArgumentError, described
from spmd.explain.prices import costly_text
from spmd.explain.words import idle_text, plural
from spmd.frontend.trace import ClosedOverTracer, note_mesh
from spmd.launch.doing import RUNS
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import as_mesh, mesh_around, processes_of
from spmd.mesh.topology import Topology, as_topology
from spmd.options import Options
from spmd.progress import doing, progress

P = ParamSpec("P")
R = TypeVar("R")


class JitOptions(TypedDict, total=False):
    """The keyword arguments that `jit` takes beside a function; specs are pytrees of any class."""

    mesh: jax.sharding.Mesh | AbstractMesh | None
    in_specs: Any
    out_specs: Any
    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: None
    backend: None
    inline: bool
    compiler_options: Mapping[str, Any] | None
    options: Options | None


@overload
def jit(fn: Callable[P, R], **options: Unpack[JitOptions]) -> "Jitted[P, R]": ...
@overload
def jit(
    fn: None = None, **options: Unpack[JitOptions]
) -> "Callable[[Callable[P, R]], Jitted[P, R]]": ...
def jit(
    fn: Any = None,
    *,
    mesh: jax.sharding.Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: None = None,
    backend: None = None,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> Any:
    """Compiles a single-device function for a mesh; takes what `jax.jit` takes, and a mesh.

    Called with values, it runs the partitioned program. Called inside of another program (under
    `jax.grad`, `jax.vmap`, `jax.jit`, another `spmd.jit`, ...) it is traced into that, with its
    marks, and whatever compiles the whole, jax or `spmd`, partitions it.

    Args:
      fn: a function of pytrees of arrays, as for `jax.jit`. Without it, a decorator is returned.
      mesh: a `spmd.Mesh` or one of jax. Left out, it is that of a `NamedSharding` among the specs,
        else of an argument placed on one, else of marks inside `fn`, else that of `jax.set_mesh`.
      in_specs: for each parameter a spec, a pytree of specs, a `NamedSharding`, or None (open). As
        for `jax.jit`, static arguments may be left out. A single `PartitionSpec` or `NamedSharding`
        is for all arguments.
      out_specs: a spec, or a pytree of specs that matches the result (or a prefix of it).
      in_shardings: the same as `in_specs`, under the name that `jax.jit` has for it.
      out_shardings: the same as `out_specs`.
      static_argnums: numbers of the arguments that are constants of the program.
      static_argnames: their names. As for `jax.jit`, if only numbers or only names are given, the
        signature tells the others, so that an argument may be passed by position or by name.
      donate_argnums: numbers of the arguments whose memory the results may take over.
      donate_argnames: their names, likewise.
      keep_unused: as for `jax.jit`, where the function is a part of another program; a program of
        its own keeps all arguments.
      device: not accepted: a program runs on the devices of its mesh.
      backend: not accepted, likewise.
      inline: as for `jax.jit`, where the function is a part of another program.
      compiler_options: passed to XLA as they are; they override those in `options`.
      options: compile options.

    Returns:
      A `Jitted`, which is called like `fn`.

    Raises:
      ArgumentError: `fn` is not a function, `options` are not `Options`, a device is given, or
        specs are given under both names.
      MeshError: `mesh` is not a mesh.

    Example:
      >>> step = jit(train_step, mesh=mesh, donate_argnums=(0, 1))
      >>> params, opt_state, loss = step(params, opt_state, batch)
    """
    if fn is None:
        return functools.partial(jit, **{k: v for k, v in locals().items() if k != "fn"})
    if not callable(fn) or isinstance(fn, jax.sharding.Mesh):  # which is a decorator, too
        raise argument_error(
            "spmd.jit needs the function first",
            actual=described(fn),
            fix="write spmd.jit(fn, mesh=mesh), or @spmd.jit(mesh=mesh)",
        )
    if options is not None and not isinstance(options, Options):
        raise argument_error(
            f"the options of spmd.jit are a {type(options).__name__}",
            actual=described(options),
            required="a spmd.Options",
            fix="write options=spmd.Options(memory_limit=16 << 30), or leave them out",
        )
    for name, value, own in (
        ("device", device, "[device]"),
        ("backend", backend, f"jax.devices({backend!r})"),
    ):
        if value is not None:
            raise argument_error(
                f"spmd.jit has no {name}: a program runs on the devices of its mesh",
                actual=f"{name}={described(value)}",
                fix=f"pass mesh=spmd.make_mesh(data=len({own}), devices={own})",
            )
    if mesh is not None:
        as_mesh(mesh)
    options = options or Options()
    if compiler_options:
        more = {**options.compiler_options, **compiler_options}
        options = replace(options, compiler_options=more)
    return Jitted(
        Recipe(
            fn,
            mesh,
            _one_of(in_specs, in_shardings, "in"),
            _one_of(out_specs, out_shardings, "out"),
            arguments.Selected.of(fn, static_argnums, static_argnames),
            arguments.Selected.of(fn, donate_argnums, donate_argnames),
            keep_unused,
            inline,
            options,
        )
    )


def _one_of(specs: Any, shardings: Any, name: str) -> Any:
    """Returns `specs`, else `shardings`; ArgumentError if both are given; `name`: `in` or `out`."""
    if specs is not None and shardings is not None:
        raise argument_error(
            f"spmd.jit was given {name}_specs and {name}_shardings, which are the same",
            fix="leave one of them out",
        )
    return shardings if specs is None else specs


class Jitted(Generic[P, R]):
    """A function that `jit` compiles: call it, or `trace`, `lower` or `compile` it."""

    def __init__(self, recipe: Recipe) -> None:
        functools.update_wrapper(self, recipe.fn, updated=())
        self.__name__ = arguments.function_name(recipe.fn)
        self.recipe = recipe
        self._cache: dict[Any, list[Compiled]] = {}
        self._is_on_cpu = self._runs_alone = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns the function's result; compiles first for new shapes, dtypes or shardings."""
        if self._is_on_cpu and is_misused(args, kwargs, any(self.recipe.donated)):
            return self._miss(*args, **kwargs)[0]  # type: ignore[no-any-return]
        result: R = without_nan(self._dispatched, self.__name__, args, kwargs)
        return jax.block_until_ready(result) if self._runs_alone else result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Returns a method whose first argument is `instance`; if that is None, this object."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        # Programs are compiled anew where it is read. Pickle finds the function of a decorated one
        # by its name, under which this object is: then that is written in its place.
        module = sys.modules.get(self.__module__)
        is_named = self.__module__ != "__main__" and getattr(module, self.__name__, None) is self
        return self.__name__ if is_named else (Jitted, (self.recipe,))

    def __repr__(self) -> str:
        mesh = self.recipe.mesh
        where = f"on {as_mesh(mesh)}" if mesh is not None else "on the mesh of its arguments"
        kinds = plural(self._cache_size(), "kind")
        return f"<spmd.jit of {self.__name__} {where}: compiled for {kinds} of call>"

    @functools.cached_property
    def inlined(self) -> Any:
        """`jax.jit` of the function, its specs as constraints, to call inside other programs."""
        recipe = self.recipe
        return plain_jit(
            functools.wraps(recipe.fn)(_marked(recipe)),
            static_argnums=recipe.static.numbers,
            static_argnames=recipe.static.names,
            donate_argnums=recipe.donated.numbers,
            donate_argnames=recipe.donated.names,
            keep_unused=recipe.keep_unused,
            inline=recipe.inline,
        )

    def trace(self, *args: Any, **kwargs: Any) -> "Traced":
        """Traces the function as `jax.jit(fn).trace` does, but its `lower` plans with `spmd`."""
        lower = functools.partial(self.lower, *args, **kwargs)
        return Traced(self.inlined.trace(*args, **kwargs), lower)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result's pytree of `ShapeDtypeStruct`s; nothing is compiled."""
        return self.inlined.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drops all compiled programs: the next calls compile again."""
        self._cache.clear()
        for name in ("inlined", "_dispatched"):
            self.__dict__.pop(name, None)

    @functools.cached_property
    def _dispatched(self) -> Callable[..., Any]:
        return dispatched(self.recipe.fn, self._miss, self.recipe.static)

    def compile(
        self, *args: Any, topology: Topology | str | None = None, **kwargs: Any
    ) -> Compiled:
        """Compiles for arguments (arrays or `ShapeDtypeStruct`s) without running.

        Args:
          *args: the positional arguments of `fn`, arrays or `ShapeDtypeStruct`s.
          topology: the machine to plan and compile for, or its name. It need not be here: libtpu
            compiles for TPUs anywhere (`pip install "spmd[tpu]"`), and jax's plugin for CUDA for
            NVIDIA GPUs (`spmd[cuda]`). Such a program cannot be called; its memory and its
            optimized HLO are those of the machine. The mesh's machine if left out.
          **kwargs: the keyword arguments of `fn`.

        Returns:
          The compiled program. Calling this object with such arguments runs the same program.

        Raises:
          MeshError: no compiler for the machine is here; `lower` plans for it without one.

        Example:
          >>> step.compile(params, state, batch, topology=spmd.Topology("v4:4x4x8")).memory
        """
        if topology is not None:
            return self.lower(*args, topology=topology, **kwargs).compile()
        return self._compiled(take_apart(self.recipe, args, kwargs))

    def lower(self, *args: Any, topology: Topology | str | None = None, **kwargs: Any) -> Lowered:
        """Plans and partitions for arguments without compiling by XLA; no device is needed.

        Args:
          *args: the positional arguments of `fn`, arrays or `ShapeDtypeStruct`s.
          topology: the machine to plan for, or its name; it need not be here. The mesh's machine
            if left out.
          **kwargs: the keyword arguments of `fn`.
        """
        return self._lower(take_apart(self.recipe, args, kwargs), topology)

    def request(self, *args: Any, topology: Topology | None = None, **kwargs: Any) -> Request:
        """Traces the function for these arguments and returns the compiler's input."""
        return trace_call(self.recipe, take_apart(self.recipe, args, kwargs), topology)

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = take_apart(self.recipe, args, kwargs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in call.leaves):
            return self.inlined(*args, **kwargs), None
        if self.recipe.given_mesh is not None:
            _ = as_mesh(self.recipe.given_mesh).devices  # an error, before planning, without them
        try:
            compiled = self._compiled(call)
        except ClosedOverTracer:  # it uses a value of another function, and is a part of that
            return self.inlined(*args, **kwargs), None
        self._is_on_cpu = compiled.request.platform == "cpu"
        self._runs_alone = compiled.runs_alone
        return compiled.dispatch(call.leaves)

    def _cache_size(self) -> int:
        return sum(map(len, self._cache.values()))

    def _compiled(self, call: Call) -> Compiled:
        for compiled in self._cache.get(call.key, ()):
            if compiled.boundary.accepts(call.leaves):
                return compiled
        kind = kind_of_call(self.recipe, *call.put_together(call.leaves))
        compiled = self._lower(call, None, kind).compile()
        compiled.boundary.compiled_for = list(map(arguments.mesh_sharding, call.leaves))
        self._cache.setdefault(call.key, []).append(compiled)
        return compiled

    def _lower(self, call: Call, topology: Topology | str | None, together: str = "") -> Lowered:
        recipe, options = self.recipe, self.recipe.options
        machine = None if topology is None else as_topology(topology)

        def traced(may_reuse: bool) -> Request:
            """Traces the call in the schedule being tried; `may_reuse`: jax may use its cache."""
            doing("trace")
            again = functools.wraps(recipe.fn, updated=())(lambda *a, **k: recipe.fn(*a, **k))
            return trace_call(recipe if may_reuse else replace(recipe, fn=again), call, machine)

        def planned(request: Request) -> Lowered:
            return Lowered(request, compile_module(request, options, together), options, machine)

        kind = together and f"compiling {together}"
        with progress(self.__name__, options.shows_progress, kind=kind):
            lowered = in_fastest_schedule(traced, planned, options.memory_limit)
        plan = lowered.stages.plan
        if plan.choices and (idle := plan.idle_axes):
            warnings.warn(f"{self.__name__}: {idle_text(idle)}", stacklevel=_calls_above())
        if (costly := lowered.prices.costly_mark) is not None:
            text = costly_text(costly, plan.mesh)
            warnings.warn(f"{self.__name__}: {text}", stacklevel=_calls_above())
        return lowered


def _running(local: Mapping[str, Any]) -> str | None:
    """Says what a call of `Jitted` runs, by its locals; None if on one process, or not compiled."""
    jitted, compiled = local["self"], next(iter(local["self"]._cache.values()), None)
    if not compiled or len(processes_of(compiled[0].mesh)) < 2:
        return None
    return kind_of_call(jitted.recipe, local["args"], local["kwargs"])


RUNS[Jitted.__call__.__code__] = _running


class Traced:
    """A trace by jax (a `jax.stages.Traced`) whose `lower` plans with `spmd`."""

    def __init__(self, traced: Any, lower: Callable[..., Lowered]) -> None:
        self._traced, self._lower = traced, lower

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced, name)

    def lower(self, *, topology: Topology | str | None = None, **by_jax: Any) -> Any:
        """Returns a `Lowered`; given options of jax's `lower`, as by `jax.export`, jax's own."""
        return self._traced.lower(**by_jax) if by_jax else self._lower(topology=topology)


def _calls_above() -> int:
    """Returns the `stacklevel` by which a warning of the caller shows the user's own line."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "spmd":
        frame, count = frame.f_back, count + 1
    return count


def _marked(recipe: Recipe) -> Callable[..., Any]:
    """Returns the function with sharding constraints where its arguments and results have specs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        own = recipe.given_mesh
        if own is not None:
            note_mesh(as_mesh(own))
        around = mesh_around() if own is None else own
        if around is None or (recipe.in_specs is None and recipe.out_specs is None):
            return recipe.fn(*args, **kwargs)
        mesh = as_mesh(around)
        if recipe.in_specs is not None:
            given = recipe.arguments(args, kwargs)
            specs = arguments.arg_specs(recipe.in_specs, given, recipe.parameters, len(args))
            values = _with_marks([argument.value for argument in given], specs, mesh)
            marked = dict(zip([argument.key for argument in given], values, strict=True))
            args = tuple(marked.get(i, arg) for i, arg in enumerate(args))
            kwargs = {name: marked.get(name, arg) for name, arg in kwargs.items()}
        results = recipe.fn(*args, **kwargs)
        if recipe.out_specs is None:
            return results
        return _with_marks(results, arguments.result_specs(recipe.out_specs, results), mesh)

    return call


def _with_marks(tree: Any, specs: Sequence[Any], mesh: Mesh) -> Any:
    """Returns `tree`, each leaf marked by its spec (on `mesh`) or `NamedSharding`; not by None."""

    def mark(leaf: Any, spec: Any) -> Any:
        if spec is None or isinstance(leaf, jax.Ref):  # a ref lies as what was put into it
            return leaf
        if isinstance(spec, NamedSharding):
            if arguments.is_in_host(spec):
                raise spec_error(
                    "an argument or result of a function inside of another one is to lie in the "
                    "host's memory",
                    actual=str(spec),
                    fix="say so of the arguments and results of the outer function",
                )
            arguments.check_memory(spec, "an argument or result")
            return mark_sharding(leaf, arguments.mesh_of(spec, mesh), spec.spec)
        return mark_sharding(leaf, mesh, spec)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(mark, leaves, specs))


# What it is made of for frameworks that take a user's objects apart into arrays.


class Front:
    """Base of `nnx.ModuleJit` and `eqx.FilterJit`: a compiled function of objects with arrays.

    ArgumentError, with the advice `fix`, if `options` has one of the names in `lacks`.
    """

    def __init__(
        self, fn: Callable[..., Any], options: Mapping[str, Any], lacks: Sequence[str], fix: str
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        given = [name for name in lacks if options.get(name) is not None]
        if given:
            raise ArgumentError(f"the jit of {type(self).__module__} has no {given[0]}", fix=fix)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function and returns its result."""
        raise NotImplementedError

    def compile(self, *args: Any, topology: Topology | str | None = None, **kwargs: Any) -> Any:
        """Returns the `Compiled` program for these arguments, for its reports; nothing runs."""
        return self._run(functools.partial(Jitted.compile, topology=topology), args, kwargs)

    def lower(self, *args: Any, topology: Topology | str | None = None, **kwargs: Any) -> Any:
        """Returns the `Lowered` program for these arguments, without XLA; no device is needed."""
        return self._run(functools.partial(Jitted.lower, topology=topology), args, kwargs)

    def _run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns what `method` of the inner `Jitted` returns for the arrays of these arguments."""
        raise NotImplementedError


def with_keywords(
    call: Callable[..., Any], fn: Any, names: Sequence[str]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Returns (function, names): a function like `fn` that has more keywords and calls `call`.

    The call is `call(*values, *args, **kwargs)`, with the values of these keywords. Their names are
    `names`, with `_` in front where `fn` has such a parameter. They are last in the signature, so
    that the user's argument numbers and names stay valid.
    """
    signature = inspect.signature(fn)
    own = signature.parameters
    free = tuple(
        next(each for n in itertools.count() if (each := "_" * n + name) not in own)
        for name in names
    )

    @functools.wraps(fn, updated=())
    def with_values(*args: Any, **kwargs: Any) -> Any:
        return call(*map(kwargs.pop, free), *args, **kwargs)

    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in free]
    every = [*own.values(), *more]
    every.sort(key=lambda parameter: parameter.kind)
    with_values.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    return with_values, free

"""The public functions: marks, and `jit` with its lowered and compiled programs."""

from __future__ import annotations

import difflib
import fnmatch
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.source_info_util import register_exclusion
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from spmd.errors import ArgumentError, MeshError, SpecError
from spmd.explain.collectives import Collective, list_collectives
from spmd.explain.memory import Memory
from spmd.explain.prices import Prices
from spmd.explain.verify import Verification, verify
from spmd.frontend.import_stablehlo import boundary_names, parse_module, signature
from spmd.frontend.marks import Entries
from spmd.frontend.trace import mark_uneven, seen_meshes, trace
from spmd.ir.text import format_program
from spmd.launch.agree import check_same_program, digest
from spmd.lowering.ahead import devices_ahead, is_here
from spmd.lowering.execute import executable
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, format_sharding, is_legal
from spmd.mesh.spec import as_mesh, dims_of, has_devices, jax_mesh, partition_spec, spec_entries
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.pipeline import Request, Stages, compile_module, lower_plan
from spmd.planning.memory import MemoryUse, peak_memory
from spmd.planning.plan import Plan
from spmd.planning.timeline import Timeline, predict_timeline

register_exclusion(os.path.dirname(__file__))  # our own frames are not the user's

STAGES = (
    "stablehlo", "program", "propagated", "planned", "local", "optimized", "emitted", "hlo",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Marks.


def mark_sharding(t: Any, mesh: Any, spec: Any) -> Any:
    """Promises how a tensor lies on a mesh.

    Inside traced code it is jax's own sharding constraint, so the same program runs under plain
    `jax.jit`, and the tensor's gradient gets the same mark. A concrete array is placed. A
    `jax.ShapeDtypeStruct` is annotated.

    Args:
      t: a tracer, an array or a `ShapeDtypeStruct`.
      mesh: a `spmd.Mesh`, or jax's `Mesh` or `AbstractMesh`.
      spec: one entry for each dim: an axis name, a mesh-axis index, a tuple of these (major to
        minor), `None` (not split), or `...` (up to the compiler). Dims beyond it are not split.

    Returns:
      The marked tensor.

    Raises:
      SpecError: an unknown axis, an axis used twice, a spec longer than the rank, an axis that is
        manual in the `jax.shard_map` around, or, outside of traced code, a dim that its axes don't
        divide (inside, its pieces are padded).
      MeshError: an array to be placed on devices that are not there.

    Example:
      >>> w = mark_sharding(w, mesh, ("data", "model"))
    """
    own = as_mesh(mesh)
    shape = np.shape(t) if not hasattr(t, "shape") else tuple(t.shape)
    what, source = f"a tensor of shape {shape}", _caller()
    entries = spec_entries(spec, len(shape), own, what=what, source=source)
    if isinstance(t, jax.core.Tracer):
        if own not in seen_meshes:  # under plain jax.jit nobody empties it
            seen_meshes.append(own)
        dims, _ = dims_of(entries, shape, own, what=what, source=source, even=False)
        manual = _manual_axes(own)
        _check_not_manual(entries, manual, what, source)
        if len(manual) == len(own.axis_names):
            return t
        if not is_legal(Sharding(dims), shape, own):
            return mark_uneven(t, own, entries)
        where = jax_mesh(own) if has_devices(own) else _abstract_mesh(own)
        if manual:
            where = jax.sharding.get_abstract_mesh()
        sharding = NamedSharding(where, _jax_spec(entries, PartitionSpec.UNCONSTRAINED))
        return jax.lax.with_sharding_constraint(t, sharding)
    dims_of(entries, shape, own, what=what, source=source)
    if isinstance(t, jax.ShapeDtypeStruct):
        where = jax_mesh(own) if has_devices(own) else _abstract_mesh(own)
        sharding = NamedSharding(where, _jax_spec(entries, PartitionSpec.UNCONSTRAINED))
        return jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding)
    return jax.device_put(t, NamedSharding(jax_mesh(own), _jax_spec(entries, None)))


def _manual_axes(mesh: Mesh) -> frozenset[str]:
    """The axes of a mesh along which the code being traced is written for one device."""
    around = jax.sharding.get_abstract_mesh()
    if tuple(around.axis_names) != mesh.axis_names:
        return frozenset()
    types = zip(around.axis_names, around.axis_types, strict=True)
    return frozenset(name for name, type_ in types if type_ == AxisType.Manual)


def _check_not_manual(
    entries: Entries, manual: frozenset[str], what: str, source: str | None
) -> None:
    for entry in entries:
        for name in entry or ():
            if name in manual:
                raise SpecError(
                    f"axis {name!r} splits {what} inside a jax.shard_map over it",
                    source=source,
                    actual=f"here every device has its own tensor along {name!r} already",
                    fix="mark the other axes alone, or mark outside of shard_map",
                )


def mark_tree(tree: Any, mesh: Any, rules: Mapping[str, Any]) -> Any:
    """Marks the leaves of a pytree by path.

    Args:
      tree: a pytree of tensors.
      mesh: the mesh.
      rules: glob pattern over the leaf's path (keys joined by `/`; `*` also crosses `/`) -> spec.
        The first pattern that matches a leaf counts; leaves that none matches are left alone.

    Raises:
      SpecError: a pattern that matches no leaf, or a spec that does not fit its leaf.

    Example:
      >>> params = mark_tree(params, mesh, {"*/w_in": ("data", "model"), "*/bias": ()})
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path_name(path) for path, _ in leaves]
    unused = dict.fromkeys(rules)
    marked = []
    for path, (_, leaf) in zip(paths, leaves, strict=True):
        pattern = next((p for p in rules if fnmatch.fnmatchcase(path, p)), None)
        if pattern is not None:
            unused.pop(pattern, None)
        marked.append(leaf if pattern is None else mark_sharding(leaf, mesh, rules[pattern]))
    dead = [p for p in unused if not any(fnmatch.fnmatchcase(path, p) for path in paths)]
    if dead:
        raise SpecError(
            f"pattern {dead[0]!r} matches no leaf of the tree",
            source=_caller(),
            actual=f"paths: {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}",
            fix="correct the pattern or remove it",
        )
    return jax.tree_util.tree_unflatten(treedef, marked)


def path_name(path: Sequence[Any]) -> str:
    """A pytree path as text: `layers/0/weight`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _jax_spec(entries: Entries, open_entry: Any) -> PartitionSpec:
    return PartitionSpec(
        *(
            open_entry if e is None else None if not e else e[0] if len(e) == 1 else e
            for e in entries
        )
    )


def _check_device_order(manual_meshes: Sequence[Any], mesh: Mesh) -> None:
    """Collectives of `jax.shard_map` name devices by position: there is one order of devices."""
    for other in manual_meshes:
        if not isinstance(other, jax.sharding.Mesh):
            continue
        own = as_mesh(other)
        if own.sizes == mesh.sizes and own.device_ids != mesh.device_ids:
            raise MeshError(
                "a jax.shard_map has the devices in another order than the program's mesh",
                actual=f"device ids {list(own.device_ids)}",
                required=f"device ids {list(mesh.device_ids)}",
                fix="pass the mesh of shard_map to spmd.jit(mesh=...)",
            )


def _abstract_mesh(mesh: Mesh) -> AbstractMesh:
    return AbstractMesh(mesh.sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.sizes))


def _caller() -> str | None:
    """The innermost frame outside this package and jax."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("spmd", "jax.", "jax_")) and name != "jax":
            return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


# ---------------------------------------------------------------------------------------------
# jit.


def jit(
    fn: Callable[..., Any],
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    options: Options | None = None,
) -> Jitted:
    """Compiles a single-device function for a mesh.

    Args:
      fn: a function of pytrees of arrays, as for `jax.jit`.
      mesh: the mesh; taken from marked arguments or from the marks inside `fn` when left out.
      in_specs: for each positional argument a spec, a pytree of specs, or None (open).
      out_specs: a spec, or a pytree of specs that matches the result (or a prefix of it).
      static_argnums, static_argnames, donate_argnums: as for `jax.jit`.
      options: compile options.

    Returns:
      An object to call like `fn`; see `Jitted`.

    Example:
      >>> step = jit(train_step, mesh=mesh, donate_argnums=(0, 1))
      >>> params, opt_state, loss = step(params, opt_state, batch)
    """
    return Jitted(
        fn,
        None if mesh is None else as_mesh(mesh),
        mesh,
        in_specs,
        out_specs,
        (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums),
        (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames),
        (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums),
        options or Options(),
    )


class _Call(NamedTuple):
    """A call's arguments, taken apart."""

    static: tuple[tuple[int | str, Any], ...]
    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    avals: tuple[Any, ...]
    tree: Any
    argnums: tuple[int, ...]


class Jitted:
    """What `jit` returns: call it, or `lower` / `compile` it for given arguments."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh | None,
        given_mesh: Any,
        in_specs: Any,
        out_specs: Any,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        donate_argnums: tuple[int, ...],
        options: Options,
    ) -> None:
        self.fn = fn
        self.mesh = mesh
        self.given_mesh = given_mesh
        self.in_specs = in_specs
        self.out_specs = out_specs
        self.static_argnums = static_argnums
        self.static_argnames = static_argnames
        self.donate_argnums = donate_argnums
        self.options = options
        self._cache: dict[Any, list[Compiled]] = {}
        self.__name__ = getattr(fn, "__name__", "fn")
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program, compiled on first use for these shapes and shardings."""
        call = self._take_apart(args, kwargs)
        return self._compiled(call, args, kwargs).run(call.leaves)

    def compile(self, *args: Any, topology: Topology | None = None, **kwargs: Any) -> Compiled:
        """Compiles for arguments (arrays or `ShapeDtypeStruct`s) without running.

        Args:
          *args, **kwargs: as for `fn`.
          topology: the machine to plan and compile for, which need not be here: for TPUs, libtpu
            compiles anywhere (`pip install "spmd[tpu]"`). Such a program cannot be called; its
            memory and its optimized HLO are those of the machine. The mesh's devices if left out.

        Raises:
          MeshError: no compiler for the machine is here; `lower` plans for it without one.

        Example:
          >>> step.compile(params, state, batch, topology=spmd.Topology("v4:4x4x8")).memory
        """
        if topology is not None:
            return self.lower(*args, topology=topology, **kwargs).compile()
        return self._compiled(self._take_apart(args, kwargs), args, kwargs)

    def lower(self, *args: Any, topology: Topology | None = None, **kwargs: Any) -> Lowered:
        """Runs our own compiler only: no device is needed, XLA is not called.

        Args:
          *args, **kwargs: as for `fn`.
          topology: the machine to plan for, which need not be here; guessed from the mesh when left
            out.
        """
        return self._lower(self._take_apart(args, kwargs), args, kwargs, topology)

    def _compiled(self, call: _Call, args: Any, kwargs: Any) -> Compiled:
        key = (call.static, call.tree, call.avals)
        for compiled in self._cache.get(key, ()):
            if compiled.accepts(call.leaves):
                return compiled
        compiled = Compiled(self._lower(call, args, kwargs, None))
        self._cache.setdefault(key, []).append(compiled)
        return compiled

    def _take_apart(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        static: list[tuple[int | str, Any]] = []
        numbers = {n % len(args) if args else n for n in self.static_argnums}
        dynamic: list[Any] = []
        argnums: list[int] = []
        for i, arg in enumerate(args):
            if i in numbers:
                static.append((i, arg))
                continue
            dynamic.append(arg)
            argnums += [i] * len(jax.tree.leaves(arg))
        named = {k: v for k, v in kwargs.items() if k not in self.static_argnames}
        static += [(k, kwargs[k]) for k in sorted(kwargs) if k in self.static_argnames]
        leaves, tree = jax.tree.flatten((tuple(dynamic), named))
        argnums += [-1] * (len(leaves) - len(argnums))
        avals = tuple(_aval(leaf) for leaf in leaves)
        return _Call(tuple(static), (), tuple(leaves), avals, tree, tuple(argnums))

    def request(self, *args: Any, topology: Topology | None = None, **kwargs: Any) -> Request:
        """What is to be compiled for these arguments; nothing is compiled yet."""
        return self._trace(self._take_apart(args, kwargs), args, kwargs, topology).request

    def _lower(
        self, call: _Call, args: Sequence[Any], kwargs: Mapping[str, Any], topology: Topology | None
    ) -> Lowered:
        traced = self._trace(call, args, kwargs, topology)
        stages = compile_module(traced.request, self.options)
        return Lowered(
            stages,
            traced.request,
            self.options,
            call.tree,
            traced.out_tree,
            traced.out_leaves,
            traced.donated,
            traced.given_mesh,
            tuple(_key_impl(leaf) for leaf in call.leaves),
            topology,
        )

    def _trace(
        self, call: _Call, args: Sequence[Any], kwargs: Mapping[str, Any], topology: Topology | None
    ) -> _Traced:
        structs = jax.tree.unflatten(
            call.tree, [jax.ShapeDtypeStruct(a[0], a[1], weak_type=a[2]) for a in call.avals]
        )
        dynamic, named = iter(structs[0]), structs[1]
        static = dict(call.static)
        positional = [static[i] if i in static else next(dynamic) for i in range(len(args))]
        keywords = {**named, **{k: v for k, v in call.static if isinstance(k, str)}}
        seen_meshes.clear()
        given = self.given_mesh or _mesh_of_leaves(call.leaves)
        mesh = None if given is None else as_mesh(given)
        platform = (topology.platform if topology else None) or _platform(mesh)
        module, out_tree, manual_meshes = trace(
            self.fn,
            positional,
            keywords,
            platform=platform,
            static_argnums=self.static_argnums,
            static_argnames=self.static_argnames,
        )
        if mesh is None:
            found = seen_meshes or [as_mesh(other) for other in manual_meshes]
            if not found:
                raise MeshError(
                    f"spmd.jit of {self.__name__} has no mesh",
                    actual="no mesh= was given, no argument is placed on a mesh, nothing is marked",
                    fix="pass mesh=spmd.make_mesh(data=4, model=2)",
                )
            mesh = found[0]
        _check_device_order(manual_meshes, mesh)
        names = _argument_names(self.fn, structs, [i for i in range(len(args)) if i not in static])
        out_leaves, out_def = jax.tree.flatten(out_tree)
        out_names = tuple(
            path_name(path) or "result"
            for path, _ in jax.tree_util.tree_flatten_with_path(out_tree)[0]
        )
        specs = _spread_in_specs(self.in_specs, structs[0], call, args, static)
        arg_entries = tuple(
            _arg_entries(leaf, spec, name, mesh)
            for leaf, spec, name in zip(call.leaves, specs, names, strict=True)
        )
        arg_entries, arg_reasons = like_parameters(names, call.avals, arg_entries)
        result_entries = _out_entries(self.out_specs, out_tree, out_names, mesh)
        donated = [i for i, n in enumerate(call.argnums) if n in self.donate_argnums]
        links = _links(structs, out_tree, args, static, self.donate_argnums)
        request = Request(
            module,
            mesh,
            topology or self.options.topology or _topology(mesh),
            names,
            out_names,
            arg_entries,
            result_entries,
            arg_reasons,
            links,
            platform,
        )
        return _Traced(request, out_def, tuple(out_leaves), tuple(donated), given)


class _Traced(NamedTuple):
    """A function as a request, and what its results and donated arguments are."""

    request: Request
    out_tree: Any
    out_leaves: tuple[Any, ...]
    donated: tuple[int, ...]
    given_mesh: Any


class Lowered:
    """A planned and partitioned program that XLA has not seen yet: everything but running it."""

    def __init__(
        self,
        stages: Stages,
        request: Request,
        options: Options,
        in_tree: Any,
        out_tree: Any,
        out_structs: Sequence[Any],
        donated: Sequence[int],
        given_mesh: Any,
        key_impls: tuple[Any, ...],
        target: Topology | None = None,
    ) -> None:
        self.stages = stages
        self.request = request
        self.options = options
        self.in_tree = in_tree
        self.out_tree = out_tree
        self.out_structs = tuple(out_structs)
        self.donated = tuple(donated)
        self.given_mesh = given_mesh
        self.key_impls = key_impls
        self.target = target

    def compile(self) -> Compiled:
        """Hands the program to XLA: for the machine it was lowered for, else the mesh's devices.

        Raises:
          MeshError: as for `Jitted.compile`.
        """
        return Compiled(self)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.request.mesh

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of one run: kind, axes, bytes, count, source, reason, seconds."""
        return list_collectives(self.stages.optimized, self.stages.plan.topology)

    @cached_property
    def timeline(self) -> Timeline:
        """Predicted schedule of one run: what runs when on which lane."""
        optimized = self.stages.optimized
        return predict_timeline(optimized.program, self.mesh, self.stages.plan.topology)

    @property
    def cost(self) -> float:
        """Predicted seconds of one run, communication hidden behind independent arithmetic."""
        return self.timeline.seconds

    @cached_property
    def predicted_memory(self) -> MemoryUse:
        """Predicted memory of one device: what is held, and when."""
        platform = self.stages.plan.topology.platform
        return peak_memory(self.stages.optimized.program, self.donated, platform)

    @cached_property
    def prices(self) -> Prices:
        """What other decisions would have cost; computed when asked."""
        return Prices(self.stages.plan)

    def explain(self, value: str | None = None, *, prices: bool = True) -> str:
        """What is sharded how, why, and what it costs, as text; or all about one value.

        Args:
          value: an argument's or a result's name or a pattern of names (`params/*/w`), a value's
            number as in `%12`, or a source line (`model.py:12`) for all that is made there.
          prices: whether to say what other decisions would have cost. That asks the planner again,
            which takes some seconds for large programs.

        Raises:
          ArgumentError: no value has this name.
        """
        from spmd.explain.text import explain_program, explain_value

        asked = self.prices if prices else None
        if value is not None:
            return explain_value(self.stages, value, asked)
        return explain_program(self.stages, self.collectives, self.memory, asked)

    def summary(self) -> str:
        """The short form of `explain`, for a terminal."""
        from spmd.explain.text import summarize

        return summarize(self.stages, self.collectives, self.memory)

    def report(self, path: str | os.PathLike[str], *, prices: bool = True) -> None:
        """Writes `explain` as one self-contained HTML page with pictures.

        Args:
          path: the file to write.
          prices: as for `explain`.
        """
        from spmd.explain.html import write_report

        asked = self.prices if prices else None
        write_report(path, self.stages, self.collectives, self.memory, self.predicted_memory, asked)

    @property
    def memory(self) -> Memory:
        """Bytes per device: predicted, until XLA has compiled the program."""
        return Memory.predicted(self.predicted_memory)

    def as_text(self, stage: str = "planned") -> str:
        """The program after a stage, as deterministic text; stages are `spmd.api.STAGES`."""
        stages = self.stages
        program = stages.imported.program
        mesh = self.mesh
        if stage == "stablehlo":
            return str(self.request.module)
        if stage == "program":
            return format_program(program)
        if stage == "propagated":
            proposals = stages.propagated.proposals
            return format_program(
                program, lambda v: format_sharding(Sharding(proposals[v]), mesh), mesh
            )
        if stage == "planned":
            states = stages.plan.states

            def describe(value: int) -> str:
                state = states[value]
                return "made for each use" if state is None else format_sharding(state, mesh)

            return format_program(program, describe, mesh)
        if stage == "local":
            return format_program(stages.partitioned.program, None, mesh)
        if stage == "optimized":
            return format_program(stages.optimized.program, None, mesh)
        if stage == "emitted":
            return stages.emitted
        raise ArgumentError(
            f"unknown stage {stage!r}",
            required=f"one of {', '.join(STAGES)}",
            fix="`hlo` needs the program compiled: use .compile(...) instead of .lower(...)"
            if stage == "hlo"
            else None,
        )


class Compiled(Lowered):
    """A compiled program: call it with arguments like those that it was compiled for."""

    def __init__(self, lowered: Lowered) -> None:
        super().__init__(
            lowered.stages, lowered.request, lowered.options, lowered.in_tree, lowered.out_tree,
            lowered.out_structs, lowered.donated, lowered.given_mesh, lowered.key_impls,
            lowered.target,
        )  # fmt: skip
        partitioned = self.stages.optimized
        target = self.target
        self._is_ahead = target is not None and not is_here(self.mesh, target)
        devices = devices_ahead(self.mesh, target) if target and self._is_ahead else None
        self._jax_mesh = jax_mesh(self.mesh, devices)
        given = self.given_mesh
        is_other = isinstance(given, jax.sharding.Mesh) and given != self._jax_mesh
        self._given = given if is_other else None
        if not self._is_ahead:
            self._check_processes()
        jitted = executable(partitioned, self.stages.emitted, self.donated, devices)
        types = self.stages.imported.program.types
        structs = [
            jax.ShapeDtypeStruct(types[v].shape, _dtype(types[v].dtype))
            for v in self.stages.imported.program.body.args
        ]
        self._x64 = jax.config.read("jax_enable_x64") or any(_is_wide(t.dtype) for t in types)
        with jax.enable_x64(self._x64):
            lowered_jax = jitted.lower(*structs)
            self.executable = lowered_jax.compile(dict(self.options.compiler_options) or None)
        self._arg_shardings = tuple(
            NamedSharding(self._jax_mesh, partition_spec(s, self.mesh))
            for s in partitioned.arguments
        )
        self._result_shardings = tuple(
            NamedSharding(self._jax_mesh, partition_spec(s, self.mesh)) for s in partitioned.results
        )
        self._key_results = [
            (i, struct)
            for i, struct in enumerate(self.out_structs)
            if _key_impl(struct) is not None
        ]
        # As it came the last time: an argument with the very same object needs no look at it.
        self._known_shardings: list[Any] = [object()] * len(self._arg_shardings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program (without its static arguments)."""
        return self.run(self._check_structure(args, kwargs))

    def _check_structure(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat arguments of a call."""
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        if tree != self.in_tree:
            raise ArgumentError(
                "the arguments have another structure than those compiled for",
                actual=str(tree),
                required=str(self.in_tree),
                fix="call with the same pytrees",
            )
        return leaves

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs the program on flat arguments, placing those that lie elsewhere."""
        self._check_here()
        placed = list(leaves)
        elsewhere = [
            index
            for index, (leaf, known) in enumerate(zip(leaves, self._known_shardings, strict=True))
            if getattr(leaf, "sharding", None) is not known and not self._lies_right(index, leaf)
        ]
        if elsewhere:
            self._place(placed, elsewhere)
        results = list(self.executable(*placed))
        if self._given is not None:  # results go back onto the mesh that came in
            results = [
                jax.device_put(r, NamedSharding(self._given, s.spec))
                for r, s in zip(results, self._result_shardings, strict=True)
            ]
        for index, struct in self._key_results:
            results[index] = _wrap_key(results[index], struct)
        return jax.tree.unflatten(self.out_tree, results)

    def _check_processes(self) -> None:
        """Every process of the mesh has this program: a collective of two programs hangs."""
        optimized = self.stages.optimized
        more = {
            "shardings": digest(f"{optimized.arguments} {optimized.results}"),
            "donated arguments": str(self.donated),
            **{f"compiler option {k}": str(v) for k, v in self.options.compiler_options.items()},
        }
        name = self.stages.imported.program.name
        check_same_program(name, self.stages.emitted, self.mesh, self._jax_mesh, more)

    def _check_here(self) -> None:
        if self._is_ahead:
            raise ArgumentError(
                f"a program compiled for {self.target} cannot run here",
                actual=f"it is for {self.mesh.size} devices that are not here",
                fix="compile without topology= to run it on the mesh's devices",
            )

    def _lies_right(self, index: int, leaf: Any) -> bool:
        """Whether an argument lies as the program wants it; the next time it is known to."""
        have, wanted = getattr(leaf, "sharding", None), self._arg_shardings[index]
        if self.key_impls[index] is not None or not isinstance(have, NamedSharding):
            return False
        if not have.is_equivalent_to(wanted, leaf.ndim):
            return False
        self._known_shardings[index] = have
        return True

    def _place(self, leaves: list[Any], indices: Sequence[int]) -> None:
        """Puts some of the arguments, in the list, to where the program wants them."""
        data = [
            leaves[i] if self.key_impls[i] is None else jax.random.key_data(leaves[i])
            for i in indices
        ]
        with jax.enable_x64(self._x64):  # else jax narrows 64-bit elements on the way in
            data = jax.device_put(data, [self._arg_shardings[i] for i in indices])
        for i, leaf in zip(indices, data, strict=True):
            leaves[i] = leaf

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether arguments placed on a mesh lie as this program wants them."""
        for leaf, sharding, impl in zip(leaves, self._arg_shardings, self.key_impls, strict=True):
            have = _mesh_sharding(leaf)
            if have is None or impl is not None:
                continue
            if not sharding.is_equivalent_to(have, len(leaf.shape)):
                return False
        return True

    @property
    def in_shardings(self) -> Any:
        """Pytree of the arguments' `NamedSharding`s: positional ones, then keywords if any."""
        args, kwargs = jax.tree.unflatten(self.in_tree, self._arg_shardings)
        return (args, kwargs) if kwargs else args

    @property
    def out_shardings(self) -> Any:
        """Pytree of the results' `NamedSharding`s."""
        return jax.tree.unflatten(self.out_tree, self._result_shardings)

    def init(self, argnum: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Creates an argument directly in the sharding that this program wants it in.

        Args:
          argnum: which (non-static) positional argument.
          fn: makes it, e.g. `optimizer.init`.
          *args: passed to `fn`.

        Returns:
          `fn(*args)`, computed shard by shard, never whole on one device.
        """
        self._check_here()
        wanted = jax.tree.unflatten(self.in_tree, self._arg_shardings)[0][argnum]
        return jax.jit(fn, out_shardings=wanted)(*args)

    def verify(
        self, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
    ) -> Verification:
        """Runs the unpartitioned program too, on one device, and compares every result.

        Args:
          *args, **kwargs: as for calling it; they are copied, never donated.
          rtol, atol: tolerances of floats; by dtype when left out.

        Returns:
          A report to print, true if all results agree; else it names the first op that differs.

        Example:
          >>> assert compiled.verify(params, opt_state, batch)
        """

        def lower(plan: Plan) -> tuple[Partitioned, str]:
            _, optimized, emitted = lower_plan(plan, self.options)
            return optimized, emitted

        def run(arrays: Sequence[Any]) -> Sequence[Any]:
            placed = jax.device_put(list(arrays), list(self._arg_shardings))
            return list(self.executable(*placed))

        self._check_here()
        leaves = self._check_structure(args, kwargs)
        given = [
            leaf if impl is None else jax.random.key_data(leaf)
            for leaf, impl in zip(leaves, self.key_impls, strict=True)
        ]
        with jax.enable_x64(self._x64):
            return verify(self.stages, self.request.module, run, given, lower, rtol, atol)

    @cached_property
    def _memory(self) -> Memory:
        return Memory.of(self.executable.memory_analysis())

    @property
    def memory(self) -> Memory:
        """Bytes per device, as XLA reports them; `predicted_memory` is what we expected."""
        return self._memory

    def as_text(self, stage: str = "planned") -> str:
        """The program after a stage; `hlo` is XLA's optimized module."""
        return str(self.executable.as_text()) if stage == "hlo" else super().as_text(stage)


Specs = Sequence[Any] | Mapping[str, Any] | None
"""For each argument or result a spec, or None (open); or names (or patterns of them) -> specs."""


def compile_stablehlo(
    module_or_path: Any,
    mesh: Any,
    arg_specs: Specs = None,
    result_specs: Specs = None,
    options: Options | None = None,
    updates: Sequence[tuple[int, int]] = (),
) -> Compiled:
    """Compiles a StableHLO module that any framework wrote.

    Args:
      module_or_path: a module in memory, its text or bytecode, or the path of a file with either.
      mesh: the mesh.
      arg_specs: for each argument of the module's function a spec, or None (open).
      result_specs: the same for its results.
      options: compile options.
      updates: as for `lower_stablehlo`.

    Returns:
      A program to call with one array for each argument; it returns a tuple.

    Raises:
      FrontendError: a module that cannot be read.
    """
    lowered = lower_stablehlo(module_or_path, mesh, arg_specs, result_specs, options, updates)
    return Compiled(lowered)


def lower_stablehlo(
    module_or_path: Any,
    mesh: Any,
    arg_specs: Specs = None,
    result_specs: Specs = None,
    options: Options | None = None,
    updates: Sequence[tuple[int, int]] = (),
) -> Lowered:
    """Plans and partitions a StableHLO module: no device is needed, XLA is not called.

    Args:
      module_or_path: a module in memory, its text or bytecode, or the path of a file with either.
      mesh: the mesh; `Mesh(None, (4, 2), ("data", "model"))` has no devices.
      arg_specs: for each argument of the module's function a spec, or None (open); or a mapping
        from names to specs. Names are the paths that the module has, else `arg0`, `arg1`, ...
      result_specs: the same for its results.
      options: compile options.
      updates: (result, argument) by number: the argument is donated, and the result, which lies on
        the mesh like it, takes its place.

    Raises:
      FrontendError: a module that cannot be read.
      ArgumentError: an update of another shape or dtype than its argument.
      SpecError: a spec for no argument or result, or one that does not fit.
    """
    options = options or Options()
    own = as_mesh(mesh)
    module = parse_module(module_or_path)
    args, results = signature(module)
    arg_names, result_names = boundary_names(module)
    _check_updates(updates, args, results)
    request = Request(
        module,
        own,
        options.topology or _topology(own),
        arg_names,
        result_names,
        _flat_entries(arg_specs, args, arg_names, own, "argument"),
        _flat_entries(result_specs, results, result_names, own, "result"),
        links=tuple(updates),
        platform=_platform(own),
    )
    stages = compile_module(request, options)
    structs = tuple(jax.ShapeDtypeStruct(t.shape, _dtype(t.dtype)) for t in results)
    in_tree = jax.tree.structure((tuple(range(len(args))), {}))
    out_tree = jax.tree.structure(structs)
    keys = (None,) * len(args)
    donated = sorted(argument for _, argument in updates)
    return Lowered(stages, request, options, in_tree, out_tree, structs, donated, mesh, keys)


def _check_updates(
    updates: Sequence[tuple[int, int]], args: Sequence[Any], results: Sequence[Any]
) -> None:
    for result, argument in updates:
        known = 0 <= result < len(results) and 0 <= argument < len(args)
        if not known or results[result] != args[argument]:
            raise ArgumentError(
                f"result {result} cannot take the place of argument {argument}",
                actual=f"{results[result]} for {args[argument]}" if known else "there is none",
                required="a result and an argument of one shape and dtype",
                fix="correct `updates`",
            )
    if len(set(dict(updates).values())) != len(updates):
        raise ArgumentError(
            "a result or an argument is in two updates",
            actual=str(list(updates)),
            fix="name each at most once",
        )


def _flat_entries(
    specs: Specs, types: Sequence[Any], names: Sequence[str], mesh: Mesh, what: str
) -> tuple[Entries | None, ...]:
    if specs is None:
        return (None,) * len(types)
    if isinstance(specs, Mapping):
        specs = _by_name(specs, names, what)
    if len(specs) != len(types):
        raise SpecError(
            f"{len(specs)} {what} specs for a module with {len(types)} {what}s",
            fix="give one spec for each, None for open ones",
        )
    return tuple(
        None if spec is None else spec_entries(spec, t.rank, mesh, what=f"{what} {name}")
        for spec, t, name in zip(specs, types, names, strict=True)
    )


def _by_name(specs: Mapping[str, Any], names: Sequence[str], what: str) -> Sequence[Any]:
    """Specs by name, or by pattern, as one for each name; the first pattern that matches counts."""
    for pattern in specs:
        if not any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names[:8])
            raise SpecError(
                f"there is no {what} {pattern!r}",
                actual=f"{what}s: {', '.join(close)}{', ...' if len(names) > len(close) else ''}",
                fix="correct the name or remove the spec",
            )
    return [
        specs.get(name, next((s for p, s in specs.items() if fnmatch.fnmatchcase(name, p)), None))
        for name in names
    ]


# ---------------------------------------------------------------------------------------------
# Arguments.


def _dtype(name: str) -> Any:
    from spmd.ir.types import numpy_dtype

    return numpy_dtype(name)


def _is_wide(dtype: str) -> bool:
    """Whether jax narrows this element type unless it is told not to."""
    return dtype in ("i64", "ui64", "f64", "complex<f64>")


def _aval(leaf: Any) -> tuple[Any, ...]:
    """(shape, dtype, weak type) of an argument leaf."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (tuple(leaf.shape), leaf.dtype, bool(getattr(leaf, "weak_type", False)))
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        raise ArgumentError(
            f"an argument of type {type(leaf).__name__} is not an array",
            actual=repr(leaf)[:80],
            fix="name it in static_argnums or static_argnames, or pass an array",
        ) from error
    return (tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))


def _mesh_sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return sharding


def _mesh_of_leaves(leaves: Sequence[Any]) -> Any:
    """The mesh of the first argument that lies on one."""
    placed = (_mesh_sharding(leaf) for leaf in leaves)
    return next((sharding.mesh for sharding in placed if sharding is not None), None)


def _arg_entries(leaf: Any, spec: Any, name: str, mesh: Mesh) -> Entries | None:
    """An argument's spelled-out spec: given, or read off the array's own placement."""
    what = f"argument {name}"
    rank = len(leaf.shape) if hasattr(leaf, "shape") else np.ndim(leaf)
    placed = _mesh_sharding(leaf)
    if spec is not None:
        return _with_key_dims(spec_entries(spec, rank, mesh, what=what), leaf)
    if placed is None:
        return None
    other = as_mesh(placed.mesh)
    if (other.axis_names, other.sizes) != (mesh.axis_names, mesh.sizes):
        if placed.is_fully_replicated:
            return None
        raise MeshError(
            "two different meshes in one program",
            op=what,
            actual=f"{what} is placed on the mesh ({other}) with spec {placed.spec}",
            required=f"the mesh that the program is compiled for ({mesh})",
            fix="place the argument with mark_sharding on that mesh",
        )
    return _with_key_dims(spec_entries(placed.spec, rank, mesh, what=what), leaf)


def like_parameters(
    names: Sequence[str], avals: Sequence[Any], entries: Sequence[Entries | None]
) -> tuple[tuple[Entries | None, ...], tuple[str | None, ...]]:
    """Open arguments that belong to a marked one get its spec; why goes beside it.

    Optimizer state repeats the parameters' tree further down: `opt_state/0/mu/w_in` has the shape
    of `params/w_in` and ends with its path. Propagation would find the same split for most of it,
    but would split the state of a parameter that is marked as not split.
    """
    marked: dict[tuple[tuple[str, ...], Any], int] = {}
    for i, (name, aval) in enumerate(zip(names, avals, strict=True)):
        path = tuple(name.split("/"))[1:]
        if entries[i] is not None and path:
            marked.setdefault((path, aval[0]), i)
    filled = list(entries)
    reasons: list[str | None] = [None] * len(filled)
    for i, (name, aval) in enumerate(zip(names, avals, strict=True)):
        path = tuple(name.split("/"))[1:]
        if entries[i] is None:
            tails = (path[k:] for k in range(1, len(path)))
            like = next((marked[t, aval[0]] for t in tails if (t, aval[0]) in marked), None)
            if like is not None:
                filled[i] = entries[like]
                reasons[i] = f"like argument {names[like]}"
    return tuple(filled), tuple(reasons)


def _with_key_dims(entries: Entries, leaf: Any) -> Entries:
    """A key array's data has one more dim than the array itself."""
    return (*entries, ()) if _key_impl(leaf) is not None else entries


def _key_impl(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype
    return None


def _wrap_key(result: Any, struct: Any) -> Any:
    """Key data as a key array again where the function returned one."""
    if _key_impl(struct) is None:
        return result
    return jax.random.wrap_key_data(result, impl=struct.dtype)


def _platform(mesh: Mesh | None) -> str:
    if mesh is not None and has_devices(mesh):
        return str(jax_mesh(mesh).devices.flat[0].platform).replace("gpu", "cuda")
    return str(jax.default_backend()).replace("gpu", "cuda")


def _topology(mesh: Mesh) -> Topology:
    if has_devices(mesh):
        return Topology.for_devices(list(jax_mesh(mesh).devices.flat))
    return Topology(f"cpu:{mesh.size}")


def _argument_names(fn: Any, structs: Any, argnums: Sequence[int]) -> tuple[str, ...]:
    """`params/w_in`: the parameter's name, then the path within the argument."""
    import inspect

    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    found = []
    for path, _ in jax.tree_util.tree_flatten_with_path(structs)[0]:
        kind, first, *rest = path
        if kind.idx == 0:
            number = argnums[first.idx]
            head = names[number] if number < len(names) else f"arg{number}"
        else:
            head = str(first.key)
        found.append("/".join(filter(None, (head, path_name(rest)))))
    return tuple(found)


def _is_spec(x: Any) -> bool:
    if x is None or isinstance(x, PartitionSpec | str):
        return True
    return type(x) in (tuple, list) and all(
        e is None or e is ... or isinstance(e, str | int) or e is PartitionSpec.UNCONSTRAINED
        or (type(e) in (tuple, list) and all(isinstance(n, str | int) for n in e))
        for e in x
    )  # fmt: skip


def _spread(specs: Any, tree: Any, what: str) -> list[Any]:
    """A prefix pytree of specs as one spec a leaf.

    Beside a tuple or list of results, a tuple or list of as many entries is one spec for each.
    """
    is_each = (
        type(tree) in (tuple, list) and type(specs) in (tuple, list) and len(specs) == len(tree)
    )
    if is_each and all(_is_spec(spec) for spec in specs):
        return [
            s for spec, part in zip(specs, tree, strict=True) for s in _spread(spec, part, what)
        ]
    if _is_spec(specs):
        return [specs] * len(jax.tree.leaves(tree))
    try:
        spread = jax.tree.map(
            lambda spec, sub: [spec] * len(jax.tree.leaves(sub)), specs, tree, is_leaf=_is_spec
        )
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"the specs of {what} don't match its structure",
            actual=str(jax.tree.structure(specs, is_leaf=_is_spec)),
            required=f"a prefix of {jax.tree.structure(tree)}",
            fix="give a spec for each leaf, or one for a whole branch",
        ) from error
    parts = jax.tree.leaves(spread, is_leaf=lambda x: isinstance(x, list))
    return [spec for part in parts for spec in part]


def _spread_in_specs(
    in_specs: Any, dynamic: Sequence[Any], call: _Call, args: Sequence[Any], static: Any
) -> list[Any]:
    if in_specs is None:
        return [None] * len(call.leaves)
    if not isinstance(in_specs, tuple | list) or len(in_specs) != len(args):
        raise SpecError(
            f"in_specs needs one entry for each of the {len(args)} positional arguments",
            actual=repr(in_specs)[:120],
            fix="use None for arguments that are open",
        )
    given = [spec for i, spec in enumerate(in_specs) if i not in static]
    spread: list[Any] = []
    for number, (spec, struct) in enumerate(zip(given, dynamic, strict=True)):
        spread += _spread(spec, struct, f"argument {number}")
    return spread + [None] * (len(call.leaves) - len(spread))


def _out_entries(
    out_specs: Any, out_tree: Any, names: Sequence[str], mesh: Mesh
) -> tuple[Entries | None, ...]:
    leaves = jax.tree.leaves(out_tree)
    entries: list[Entries | None] = []
    for leaf, spec, name in zip(
        leaves, _spread(out_specs, out_tree, "the result"), names, strict=True
    ):
        what = f"result {name}"
        if spec is None:
            entries.append(None)
            continue
        found = spec_entries(spec, len(leaf.shape), mesh, what=what)
        dims_of(found, leaf.shape, mesh, what=what)
        entries.append(_with_key_dims(found, leaf))
    return tuple(entries)


def _links(
    structs: Any, out_tree: Any, args: Sequence[Any], static: Any, donate_argnums: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """(result leaf, argument leaf) of each donated argument and the result that updates it."""

    def signature(tree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)

    children = list(out_tree) if isinstance(out_tree, tuple | list) else [out_tree]
    starts = np.cumsum([0] + [len(jax.tree.leaves(c)) for c in children])
    taken: set[int] = set()
    links: list[tuple[int, int]] = []
    position = 0
    argnums = [i for i in range(len(args)) if i not in static]
    for number, struct in zip(argnums, structs[0], strict=True):
        count = len(jax.tree.leaves(struct))
        if number in donate_argnums:
            for c, child in enumerate(children):
                if c not in taken and signature(child) == signature(struct):
                    taken.add(c)
                    links += [(int(starts[c]) + k, position + k) for k in range(count)]
                    break
        position += count
    return tuple(links)

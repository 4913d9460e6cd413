"""Programs to hold on to: `Lowered`, which needs no device, and `Compiled`, which runs."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import jit as plain_jit  # users may put spmd.jit in its place
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from spmd.api.arguments import Selected, key_dtype, mesh_sharding
from spmd.api.dispatch import dispatched, held, hold, is_misused, known, without_nan
from spmd.api.marks import argument_error, some_of
from spmd.api.planned import Planned
from spmd.api.tracing import order_of, type_of
from spmd.compiler import Request, emit_plan
from spmd.errors import ArgumentError, described
from spmd.explain.memory import Memory
from spmd.ir.control_flow import Index
from spmd.ir.dialect.callbacks import INSPECT
from spmd.ir.types import needs_x64, numpy_dtype
from spmd.launch.doing import RUNS
from spmd.launch.restart import begun
from spmd.lowering import execute
from spmd.lowering.ahead import devices_ahead, is_here
from spmd.lowering.emit import Emitted, Placement, formats
from spmd.mesh.sharding import replicated
from spmd.mesh.spec import jax_mesh, named_sharding, processes_of
from spmd.options import Options
from spmd.predict.memory import lifted
from spmd.progress import doing, progress
from spmd.verify import Verification, verify

if TYPE_CHECKING:
    from spmd.explain.measured import Measured
    from spmd.measure.profile import Run


_SHARDING = attrgetter("sharding")


class Lowered(Planned):
    """A planned and partitioned program, not yet compiled by XLA: it can be read, but not run.

    Attributes:
      stages: the result of every stage of the compiler.
      options: compile options.
      target: the machine to compile for: `topology=`, else the mesh's; None: the mesh's devices.
      request: the compiler's input: the module as traced, mesh, specs, pytrees of arguments.
      mesh: the mesh that the program is planned for.
      name: the function's name.
      donated, donate_argnums: flat indices of the donated arguments.
      in_avals: types of the arguments, as ((positional, ...), {name: ...}).
      out_avals: types of the results.
      in_tree: the pytree structure of ((positional, ...), {name: ...}), static arguments left out.
      out_tree: the pytree structure of the result.
      out_info: the result's pytree of `jax.ShapeDtypeStruct`s.
      measured: None. That of a `Compiled` is what its `measure` returned last; reports show it.
    """

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> "Compiled":
        """Compiles by XLA for the machine that it was lowered for, else for the mesh's devices.

        `compiler_options` go to XLA, over those in `options`. MeshError: it has no compiler here.
        """
        given = {**self.options.compiler_options, **(compiler_options or {})}
        with progress(self.name, self.options.shows_progress, kind=f"compiling {self.kind}"):
            return Compiled(self, replace(self.options, compiler_options=given))

    def export(self) -> jax.export.Exported:
        """Returns the partitioned program as a `jax.export.Exported`, to save and call elsewhere.

        It is called like the function, without its static arguments, on as many devices as it was
        planned for. `jax.export.export(jitted)` gives the unpartitioned program with its marks.

        Raises:
          ArgumentError: an argument or a result is a key array or float0, or there are refs.

        Example:
          >>> saved = spmd.jit(step, mesh=mesh).lower(params, batch).export().serialize()
          >>> step = jax.export.deserialize(saved).call
        """
        emitted = self.stages.emitted.major_to_minor()
        boundary = Boundary(self.request, emitted)
        if boundary.is_dressed or boundary.refs:
            raise ArgumentError(
                "a program of key arrays, float0 or refs cannot be exported: it has plain arrays",
                fix="pass jax.random.key_data(key) and ref[...], and call "
                "jax.random.wrap_key_data(data) and jax.new_ref(x) inside",
            )
        flat = execute.executable(emitted, boundary.outside)
        # Of what an exported function closes over, jax makes constants in its text: whole ones.
        constants = [constant.value.array() for constant in emitted.constants]

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = jax.tree.leaves((args, kwargs))
            return jax.tree.unflatten(self.out_tree, flat(*constants, *leaves))

        structs = [
            jax.ShapeDtypeStruct(type_.shape, numpy_dtype(type_.dtype), sharding=sharding)
            for type_, sharding in zip(emitted.argument_types, boundary.arguments, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self.in_tree, structs)
        call.__name__ = self.name
        platform = [self.request.platform]
        with execute.x64_if(emitted.needs_x64), execute.on_own_mesh(emitted.boundary_mesh):
            return jax.export.export(plain_jit(call), platforms=platform)(*args, **kwargs)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Returns the unpartitioned StableHLO module; ArgumentError for any other dialect."""
        if dialect not in (None, "stablehlo"):
            raise ArgumentError(
                f"there is no module in the dialect {dialect!r} before XLA has seen the program",
                required="stablehlo",
                fix='compile it, and ask for compiled.as_text("hlo")',
            )
        return self.request.module

    def cost_analysis(self) -> Any:
        """Returns XLA's count of operations and bytes in one device's program, not yet optimized.

        `cost` is our prediction in seconds.
        """
        return execute.cost_analysis(self.stages.emitted)


class Compiled(Planned):
    """A compiled program: call it with arguments like those that it was compiled for.

    Attributes:
      executable: jax's compiled program; takes flat arguments, sharded as `in_shardings` says.
      boundary: the shardings and memory orders of flat arguments and results.
      in_formats: the arguments' `Format`s (sharding and memory order): (positional, ...), or
        ((positional, ...), {name: ...}) if there are keywords. Donated ones have the memory order
        that the program's collectives want, see `Options.layouts`. An array that comes in another
        order is copied at each call; `jax.device_put(x, format)` does that beforehand.
      in_shardings, in_info: their `NamedSharding`s, and their `jax.ShapeDtypeStruct`s, likewise.
      out_formats, out_shardings: those of the results, pytrees like the result.
      input_formats, input_shardings: as ((positional, ...), {name: ...}), as jax has them.
      output_formats, output_shardings: the results', under jax's names.
    """

    def __init__(self, lowered: Lowered, options: Options) -> None:
        super().__init__(lowered.request, lowered.stages, options, lowered.target)
        self.prices = lowered.prices  # what is known already
        target, emitted = self.target, self.stages.emitted
        self._ahead = None if target is None or is_here(self.mesh, target) else target
        devices = None
        if self._ahead:
            execute.check_no_callbacks(emitted)
            devices = devices_ahead(self.mesh, self._ahead)
        self.boundary = Boundary(self.request, emitted, devices)
        self.input_formats: Any = jax.tree.unflatten(self.in_tree, self.boundary.seen_arguments)
        args, kwargs = self.input_formats
        self.in_formats = self.input_formats if kwargs else args
        self.out_formats: Any = jax.tree.unflatten(self.out_tree, self.boundary.seen_results)
        self.output_formats = self.out_formats
        self.in_shardings = jax.tree.map(_SHARDING, self.in_formats)
        args, kwargs = jax.tree.map(_placed, self.request.args, self.input_formats)
        self.in_info: Any = (args, kwargs) if kwargs else args
        self.input_shardings = jax.tree.map(_SHARDING, self.input_formats)
        self.out_shardings = self.output_shardings = jax.tree.map(_SHARDING, self.out_formats)
        self.out_info = jax.tree.map(_placed, self.out_info, self.out_formats)
        # XLA's runtime for CPUs starts programs in any order, on as many threads as devices: those
        # of two programs that wait for their other devices leave none to these, and neither ends.
        self.runs_alone = self.request.platform == "cpu" and self.mesh.size > 1
        self._moved = 0
        doing("XLA")
        program = self.stages.optimized.program
        to_xla = execute.xla_options(self.request.platform, program, options.compiler_options)
        self.executable = execute.compile_emitted(emitted, to_xla, self.boundary.outside)
        plan = self.stages.plan
        seen = {op.kind.attrs["number"]: op for op in plan.program.walk() if op.name == INSPECT}
        for number, op in sorted(seen.items()):
            value = op.operands[0]
            state = plan.states[value] or replicated(len(plan.program.types[value].shape))
            told = named_sharding(state, self.mesh, self.boundary.outside.mesh)
            plan.program.callbacks[number].function(told)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program on the function's arguments, without static ones; returns its result."""
        if self.request.platform == "cpu" and is_misused(args, kwargs, bool(self.donated)):
            return self.dispatch(self._flat(args, kwargs))[0]
        result = without_nan(self._dispatched, self.name, args, kwargs)
        return jax.block_until_ready(result) if self.runs_alone else result

    @cached_property
    def _dispatched(self) -> Callable[..., Any]:
        def miss(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return self.dispatch(self._flat(args, kwargs))

        return dispatched(lambda *a, **k: miss(*a, **k)[0], miss, Selected((), ()))

    def dispatch(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Runs the program on flat arguments; returns its result, and what `known` returns."""
        self._check_there(self.arrays(leaves))
        can_dispatch = self.boundary.can_dispatch(leaves)
        results = self.run(leaves)
        way = known(self.executable, results, self.out_tree) if can_dispatch else None
        return jax.tree.unflatten(self.out_tree, results), way

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Runs the program on flat arguments, resharded if need be; returns flat results."""
        self._check_here()
        every = [*leaves, *self.request.closed_refs]
        refs = [every[i] for i in self.boundary.refs]
        leaves = self._with_values(self.arrays(leaves))
        if refs:
            self._check_once(leaves)
        try:
            taken = self.boundary.take(leaves)
            if self.request.platform == "cpu":  # whose runtime crashes; others raise
                self._check_once(taken)
            try:
                results = list(self.executable(*taken))
            except ValueError:  # jax looks at layouts in any case: we do only where it finds others
                if not (which := self.boundary.in_other_layouts(taken)):
                    raise
                results = list(self.executable(*self._laid_out(taken, which)))
        except (TypeError, ValueError, IndexError, RuntimeError):
            self._check_types(leaves)
            self._check_once(leaves)
            raise  # it is none of these
        begun()
        if self.runs_alone:
            jax.block_until_ready(results)
        self.boundary.dress(results)
        count = len(results) - len(refs)
        for ref, array in zip(refs, results[count:], strict=True):
            hold(ref, array)
        return results[:count]

    def arrays(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves, then the refs closed over; of each ref the array that it holds."""
        return list(map(held, (*leaves, *self.request.closed_refs)))

    def _laid_out(self, taken: Sequence[Any], which: Sequence[int]) -> Sequence[Any]:
        """Returns `taken`, items `which` in the program's memory order; its second call warns."""
        self._moved += 1
        if self._moved == 2:  # the first time they come from where nobody knew of it
            names = [self.request.arg_names[i] for i in which]
            warnings.warn(
                f"{self.name}: {some_of(names)} lie in memory in another order than the program's, "
                "and are moved at each call: hand on the results of the call before, or place them "
                "with in_formats, or compile with spmd.Options(layouts=False)",
                stacklevel=2,
            )
        return self.boundary.laid_out(taken, which, self.donated)

    def _with_values(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Returns `leaves`, with zeros for structs; ArgumentError if the program reads a struct."""
        structs = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
        program, valued = self.stages.optimized.program, list(leaves)
        read = Index(program).users if structs else {}
        for i in structs:
            if read.get(program.body.args[i]):
                raise argument_error(
                    f"argument {self.request.arg_names[i]} of {self.name} has no values",
                    actual=described(leaves[i]),
                    required="an array: the program reads it",
                    fix="pass one, or compile without running: .compile(...) takes structs",
                )
            valued[i] = jnp.zeros(leaves[i].shape, leaves[i].dtype)
        return valued

    def _check_there(self, arrays: Sequence[Any]) -> None:
        """Raises ArgumentError for tracers, and for arrays that are deleted."""
        tracer = next((leaf for leaf in arrays if isinstance(leaf, jax.core.Tracer)), None)
        if tracer is not None:
            raise argument_error(
                f"a transformation of jax is around the compiled program {self.name}",
                actual=f"an argument is a {type(tracer).__name__}, which has no values yet",
                required="values: what is compiled cannot be transformed",
                fix="call the spmd.jit function itself, which can, or transform first, as in "
                "spmd.jit(jax.grad(fn), mesh=mesh)",
            )
        pairs = zip(self.request.arg_names, arrays, strict=True)
        gone = [name for name, a in pairs if isinstance(a, jax.Array) and a.is_deleted()]
        if gone:
            raise argument_error(
                f"argument {some_of(gone)} was deleted: an earlier call took its memory "
                "(donate_argnums)",
                fix="go on with what it returned, as in params = step(params), or donate nothing",
            )

    def _check_once(self, arrays: Sequence[Any]) -> None:
        """Raises ArgumentError for arrays that are donated, and given twice."""
        names, seen = self.request.arg_names, dict[int, int]()
        for index, array in enumerate(arrays if self.donated else ()):
            first = seen.setdefault(id(array), index)
            if first != index and {first, index} & set(self.donated):
                kind = "jax.Ref" if index in self.boundary.refs else "array"
                raise argument_error(
                    f"one {kind} is given as argument {names[first]} and as argument "
                    f"{names[index]}, and it is donated",
                    required="a donated array is given once: its memory is taken over",
                    fix="pass a copy, array.copy() or jax.new_ref(ref[...]), or donate nothing",
                )

    def _check_types(self, leaves: Sequence[Any]) -> None:
        """Raises ArgumentError for arrays of another shape or dtype."""
        program, data = self.stages.program, self.boundary.data(leaves)
        for name, value, leaf in zip(self.request.arg_names, program.body.args, data, strict=False):
            type_, have = program.types[value], jax.typeof(leaf)
            wanted = numpy_dtype(type_.dtype)
            if tuple(have.shape) != type_.shape or have.dtype != wanted:
                raise argument_error(
                    f"argument {name} has another type than the program was compiled for",
                    actual=described(have),
                    required=f"a {wanted.name} array of shape {type_.shape}",
                    fix="compile again for it, or call the spmd.jit function, which does so",
                )

    def init(self, argnum: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Computes an argument in the sharding and memory order in which this program takes it.

        Args:
          argnum: the argument's number, among the positional ones that are not static.
          fn: computes the argument, e.g. `optimizer.init`.
          *args: passed to `fn`.

        Returns:
          `fn(*args)`, each shard on its devices.
        """
        self._check_here()
        # XLA's partitioner does here: there is nothing to exchange. Ours made the same parameters
        # and AdamW state of small Llamas, to the bit, but took up to twice as long to compile.
        return plain_jit(fn, out_shardings=self.input_formats[0][argnum])(*args)

    def verify(
        self, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
    ) -> Verification:
        """Runs the unpartitioned program too, on one device, and compares every result.

        Args:
          *args: the positional arguments of a call; they are copied, never donated.
          rtol: relative tolerance of floats; by dtype when left out.
          atol: absolute tolerance of floats; by dtype when left out.
          **kwargs: the keyword arguments of a call.

        Returns:
          A report to print, true if all results agree; else it names the first op that differs.

        Example:
          >>> assert compiled.verify(params, opt_state, batch)
        """

        def run(arrays: list[Any]) -> list[Any]:
            placed = jax.device_put(arrays, list(self.boundary.argument_formats))
            return list(self.executable(*placed))

        self._check_here()
        given = self.boundary.data(self.arrays(self._flat(args, kwargs)))
        plan = self.stages.plan
        with execute.x64_if(needs_x64(plan.program.types)):
            lower = partial(emit_plan, options=self.options)
            return verify(plan, self.request.module, run, given, lower, rtol, atol)

    def measure(self, *args: Any, steps: int = 10, **kwargs: Any) -> "Measured":
        """Runs steps of the program, and compares their times with the predicted ones.

        After warming up, `steps` steps are timed one by one, from the call until all results are
        there. Three more run under jax's profiler, which records what the devices do. The program
        keeps the result: `explain`, `summary`, `report` and `save_trace` show it.

        Args:
          *args: the positional arguments of a call. They are never donated: of those that the
            program donates it gets copies, which need their memory once more. A step is given
            the results of the step before it in place of the donated arguments that they update,
            as in a loop of training; other donated arguments are copied again for each step.
          steps: how many steps to time.
          **kwargs: the keyword arguments of a call.

        Returns:
          The seconds of a step: in total, by kind of work, by layer, by collective. In a job of
          several processes all have to call this; each sees its own devices.

        Raises:
          ArgumentError: the program is for a machine that is not here, or `steps` is not positive.

        Example:
          >>> print(compiled.measure(params, opt_state, batch))
        """
        from spmd.measure.profile import Feed, run_steps

        self._check_here()
        if steps < 1:
            raise ArgumentError(f"{steps} steps cannot be timed", required="at least one")
        given = self.boundary.take(self.arrays(self._flat(args, kwargs)))
        given = self.boundary.laid_out(given, self.boundary.in_other_layouts(given))
        feed = Feed(self.executable, given, self.donated, self.request.links)
        self.measured = self.compared(run_steps(feed.run, feed.prepare, steps))
        return self.measured

    def compared(self, run: "Run") -> "Measured":
        """Returns the measured times of `run`, steps of this program, beside the predicted ones."""
        from spmd.explain.measured import compare
        from spmd.measure.labels import Labels

        labels = Labels(self.as_text("hlo"), self.stages.optimized.program, self.mesh)
        topology, platform = self.stages.plan.topology, self.request.platform
        return compare(run, labels, self.timeline, self.mesh, topology, platform)

    # As `jax.stages.Compiled` has them.

    def memory_analysis(self) -> Any:
        """Returns XLA's report of one device's memory, as jax gives it; `memory` sums it up."""
        return self.executable.memory_analysis()

    def cost_analysis(self) -> Any:
        """Returns XLA's count of operations and bytes of one device; `cost` predicts seconds."""
        return self.executable.cost_analysis()

    def runtime_executable(self) -> Any:
        """Returns the runtime's executable, as `jax.stages.Compiled` does."""
        return self.executable.runtime_executable()

    # What `jax.experimental.serialize_executable.serialize` reads of a `jax.stages.Compiled`.

    _no_kwargs = False

    @property
    def _params(self) -> Any:
        return self.executable._params

    @property
    def _executable(self) -> Any:
        if (has_constants := bool(self.stages.emitted.constants)) or self.boundary.is_dressed:
            what = "large constants" if has_constants else "key arrays and float0"
            raise argument_error(
                f"{self.name} cannot be serialized: jax would save it without its {what}",
                fix=f"pass {'the arrays' if has_constants else 'jax.random.key_data(key)'} as "
                "arguments",
            )
        return self.executable._executable

    @cached_property
    def memory(self) -> Memory:
        """The bytes of one device by purpose, as XLA reports them; see also `predicted_memory`."""
        use, program = self.predicted_memory, self.stages.optimized.program
        passed = sum(program.types[value].bytes for value in lifted(program))
        return Memory.of(self.executable.memory_analysis(), use.constants, passed)

    def as_text(self, stage: str = "planned") -> str:
        """Returns the program's text after a stage of `STAGES`; `hlo` is XLA's optimized module."""
        return str(self.executable.as_text()) if stage == "hlo" else super().as_text(stage)

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns a call's flat arguments; ArgumentError for a structure not compiled for."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.in_tree:
            raise ArgumentError(
                "the arguments have another structure than those compiled for",
                actual=str(tree),
                required=str(self.in_tree),
                fix="call with the same pytrees",
            )
        return leaves

    def _check_here(self) -> None:
        if self._ahead:
            raise ArgumentError(
                f"a program compiled for {self._ahead} cannot run here",
                actual=f"it is for {self.mesh.size} devices that are not here",
                fix="compile without topology=, for a mesh of devices that are here, to run it",
            )


def _running(local: Mapping[str, Any]) -> str | None:
    """Says which program a call of a `Compiled` runs, by its locals; None if on one process."""
    return local["self"].kind if len(processes_of(local["self"].mesh)) > 1 else None


RUNS[Compiled.run.__code__] = RUNS[Compiled.__call__.__code__] = _running


class Boundary:
    """The shardings and memory orders of a compiled program's flat arguments and results.

    The program itself has only arrays on its own mesh; of a key array it takes the data, and for
    one of float0, whose elements have no bytes, one of bool.
    """

    def __init__(
        self, request: Request, emitted: Emitted, devices: Sequence[Any] | None = None
    ) -> None:
        mesh = jax_mesh(request.mesh, devices, request.axis_types)
        args, out = jax.tree.leaves(request.args), jax.tree.leaves(request.out)
        taken = [*args, *map(type_of, request.closed_refs)]
        given = [*out, *(struct for struct in taken if struct.is_ref)]  # refs at the end
        self._orders, self._needs_x64 = emitted.argument_orders, emitted.needs_x64
        self._donated = frozenset(emitted.donated)
        self._dtypes = [numpy_dtype(type_.dtype) for type_ in emitted.argument_types]
        self.arguments, planned = emitted.named_ends(mesh)
        self.argument_formats = formats(self.arguments, self._orders)
        specs = request.out_specs or (None,) * len(planned)
        ranks = [type_.rank for type_ in emitted.result_types]
        results = formats(tuple(map(_as_told, planned, specs, ranks)), emitted.result_orders)
        # What jax is told; `devices` are descriptions of those that are not here.
        weak = tuple(struct.weak_type for struct in given)
        self.outside = execute.Outside(mesh, weak, devices, results)
        self._dressed, self._results = list(map(_is_dressed, taken)), given
        self.is_dressed = any(map(_is_dressed, (*taken, *given)))
        self.refs = [i for i, struct in enumerate(taken) if struct.is_ref]
        self._has_float0 = any(struct.dtype == jax.dtypes.float0 for struct in taken)
        self.compiled_for: Sequence[Any] = (None,) * len(self.arguments)
        # As callers see them, who have key arrays.
        self.seen_arguments = tuple(map(_seen, self.argument_formats, args))
        self.seen_results = tuple(map(_seen, results, out))
        # As it came the last time: an argument with the very same object needs no look at it.
        self._known: list[Any] = [object()] * len(self.arguments)

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether leaves committed to a mesh, key arrays aside, have the program's shardings.

        Or `compiled_for`: those of the call that it was compiled for, which `take` moves.
        """
        return all(
            self._lies_right(index, leaf)
            or mesh_sharding(leaf) in (None, self.compiled_for[index])
            or self._dressed[index]
            for index, leaf in enumerate(leaves)
        )

    def can_dispatch(self, leaves: Sequence[Any]) -> bool:
        """Whether jax's C++ dispatch may run such calls: it takes the leaves as `take` does.

        Arrays on as many devices as the program has it reads as they lie, however they are split.
        """

        def is_taken(leaf: Any, wanted: NamedSharding, dtype: Any) -> bool:
            if not isinstance(leaf, jax.Array):
                return bool(jax.dtypes.canonicalize_dtype(np.result_type(leaf)) == dtype)
            devices = len(leaf.sharding.device_set)
            is_moved = devices == 1 or devices != len(wanted.device_set)
            return is_moved or bool(leaf.sharding.is_equivalent_to(wanted, leaf.ndim))

        if self.refs or self._has_float0 or any(type(x) is jax.ShapeDtypeStruct for x in leaves):
            return False
        data = self.data(leaves)
        every = zip(data, self.arguments, self._dtypes, strict=True)
        try:
            return not self.in_other_layouts(data) and all(is_taken(*one) for one in every)
        except (TypeError, IndexError):  # the program does not take them
            return False

    def take(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the flat arguments in the program's shardings, moved if need be; of keys data."""
        elsewhere = [i for i, leaf in enumerate(leaves) if not self._lies_right(i, leaf)]
        taken = list(leaves)
        if elsewhere:
            data = self.data(leaves)
            for i in elsewhere:
                if not isinstance(data[i], jax.Array):  # jax narrows 64 bits if they are not kept
                    narrow = jax.dtypes.canonicalize_dtype(np.result_type(data[i]))
                    data[i] = np.asarray(data[i], narrow) if narrow == self._dtypes[i] else data[i]
                elif i in self._donated and self.arguments[i].is_fully_replicated:
                    data[i] = data[i].copy()  # else jax takes it as one of the pieces to donate
            with execute.x64_if(self._needs_x64):  # else jax narrows 64-bit elements on the way in
                where = [self.argument_formats[i] for i in elsewhere]
                placed = jax.device_put([data[i] for i in elsewhere], where)
            for index, leaf in zip(elsewhere, placed, strict=True):
                taken[index] = leaf
        return taken

    def in_other_layouts(self, taken: Sequence[Any]) -> list[int]:
        """Returns the numbers of arguments that lie in another memory order than the program's."""
        return [i for i, leaf in enumerate(taken) if order_of(leaf) != self._orders[i]]

    def laid_out(
        self, taken: Sequence[Any], which: Sequence[int], donated: Sequence[int] = ()
    ) -> list[Any]:
        """Returns the arguments from `take`, those numbered `which` in the program's memory order.

        Each is moved alone, and originals of donated ones are freed: only one takes memory twice.
        """
        laid = list(taken)
        for index in which:
            leaf, wanted = laid[index], self.arguments[index]
            order = self._orders[index] or tuple(range(leaf.ndim))
            laid[index] = jax.device_put(leaf, Format(Layout(order), wanted))
            if index in donated:
                leaf.delete()
        return laid

    def data(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the arguments: of key arrays their data, for float0 bools of the same shape."""

        def plain(leaf: Any) -> Any:
            is_key = key_dtype(leaf) is not None
            return jax.random.key_data(leaf) if is_key else np.zeros(leaf.shape, bool)

        pairs = zip(leaves, self._dressed, strict=True)
        return [plain(leaf) if is_dressed else leaf for leaf, is_dressed in pairs]

    def dress(self, results: list[Any]) -> None:
        """Replaces in `results` key arrays' data by key arrays, and bools for float0 by float0."""
        for i, struct in enumerate(self._results) if self.is_dressed else ():
            if struct.dtype == jax.dtypes.float0:
                results[i] = np.zeros(struct.shape, jax.dtypes.float0)
            elif _is_dressed(struct):
                results[i] = jax.random.wrap_key_data(results[i], impl=struct.dtype)

    def _lies_right(self, index: int, leaf: Any) -> bool:
        have = getattr(leaf, "sharding", None)
        if have is self._known[index]:
            return True
        if self._dressed[index] or not isinstance(have, NamedSharding):
            return False
        if not have.is_equivalent_to(self.arguments[index], leaf.ndim):
            return False
        self._known[index] = have
        return True


def _is_dressed(struct: jax.ShapeDtypeStruct) -> bool:
    """Whether a struct is of keys or float0, in place of which the program has plain arrays."""
    return key_dtype(struct) is not None or struct.dtype == jax.dtypes.float0


def _seen(placed: Placement, struct: jax.ShapeDtypeStruct) -> Format:
    """Returns `placed` as a `Format`; of a key array's data, without memory order and last dim."""
    if key_dtype(struct) is None:
        return placed if isinstance(placed, Format) else Format(None, placed)
    sharding = placed.sharding if isinstance(placed, Format) else placed
    assert isinstance(sharding, NamedSharding)
    spec = PartitionSpec(*(*sharding.spec, *[None] * struct.ndim)[: struct.ndim])
    return Format(None, NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind))


def _placed(struct: jax.ShapeDtypeStruct, where: Format) -> jax.ShapeDtypeStruct:
    kind: Any = {"weak_type": struct.weak_type, "sharding": where.sharding}
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, **kind)


def _as_told(planned: NamedSharding, spec: PartitionSpec | None, rank: int) -> NamedSharding:
    """Returns a result's sharding by the user's spec if that means the same as the planned one.

    Else the planned one, which lacks axes of size 1. They split nothing, but jax's types have them.
    """
    if spec is None or PartitionSpec.UNCONSTRAINED in spec.partitions:
        return planned
    if not set(jax.tree.leaves(spec.partitions)) <= set(planned.mesh.axis_names):
        return planned  # it is on another mesh of the same devices
    told = NamedSharding(planned.mesh, spec, memory_kind=planned.memory_kind)
    return told if told.is_equivalent_to(planned, rank) else planned

"""`auto`: lets the planner choose a spec for every argument that has none.

The planner solves the same problem as for any plan, with more to choose from: an argument may have
any sharding over whole axes that divide its dims, an op may split every factor over every axis.
"""

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax

from spmd.api import Jitted, jit, like_parameters, mark_sharding, module_request
from spmd.compiler import Request, Trial, plan_problem, problem_for
from spmd.errors import MeshError, PlanError, SpmdError
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import first_match, partition_spec
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.planning.plan import Plan, Weighed
from spmd.planning.problem import opened
from spmd.planning.search import Candidate, Search
from spmd.predict.backends import memory_for
from spmd.progress import doing, progress


@dataclass(frozen=True)
class ChosenSpecs:
    """Holds the specs of a planned program's arguments; printed, they are code to paste.

    Attributes:
      mesh: the mesh.
      specs: path of an argument's leaf (`params/w`) -> spec, for all leaves, also those with marks.
      seconds: predicted seconds of one call.
    """

    mesh: Mesh
    specs: Mapping[str, tuple[Any, ...]]
    seconds: float
    _inferred: frozenset[str]

    @classmethod
    def of(cls, request: Request, plan: Plan, *more: Any) -> Self:
        """Returns those of a program with a plan; `more` are the fields of a subclass."""
        specs = dict(zip(request.arg_names, _specs(plan), strict=False))  # constants are behind
        return cls(plan.mesh, specs, plan.run_seconds, _inferred(request.arg_names, plan), *more)

    def rules(self, argument: str) -> dict[str, tuple[Any, ...]]:
        """Returns an argument's `mark_tree` rules, pattern -> spec; {} if inferred, or one leaf."""
        # Numbered siblings go under one pattern if all that it matches agrees; patterns come last.
        specs = {
            name.removeprefix(f"{argument}/"): spec
            for name, spec in self.specs.items()
            if name.startswith(f"{argument}/") and name not in self._inferred
        }
        rules: dict[str, tuple[Any, ...]] = {}
        shared: dict[str, bool] = {}
        for path, spec in specs.items():
            name = glob.escape(path)  # a pattern that only this path matches
            pattern = re.sub(r"(^|/)\d+(?=/|$)", r"\1*", name)
            if pattern not in shared:
                found = {specs[other] for other in specs if first_match(other, (pattern,))}
                shared[pattern] = len(found) == 1
            rules[pattern if shared[pattern] else name] = spec
        return dict(sorted(rules.items(), key=lambda rule: "*" in rule[0]))

    def __str__(self) -> str:
        """Returns code to paste: the mesh, and marks for the arguments."""
        took = f"{self.seconds * 1e3:.3g} ms a step, predicted"
        lines = [f"mesh = spmd.make_mesh({self.mesh})  # {took}"]
        for argument in dict.fromkeys(map(_root, self.specs)):
            rules = self.rules(argument)
            if rules:
                lines.append(f"{argument} = spmd.mark_tree({argument}, mesh, {{")
                lines += [f"    {pattern!r}: {spec!r}," for pattern, spec in rules.items()]
                lines.append("})")
            elif argument in self.specs:
                spec = self.specs[argument]
                lines.append(f"{argument} = spmd.mark_sharding({argument}, mesh, {spec!r})")
            else:
                lines.append(f"# {argument}: inferred from the arguments above")
        return "\n".join(lines)


@dataclass(frozen=True)
class AutoSharding(ChosenSpecs):
    """Holds the mesh and the specs that `auto` chose; printed, it is code to paste.

    Attributes:
      considered: every mesh that `auto` tried: its axes as a name, its predicted seconds, or why no
        plan was found.
      jitted: `spmd.jit` of the function on the mesh; call it with what `mark` returns.
    """

    considered: tuple[Weighed, ...]
    jitted: Jitted[..., Any]

    def mark(self, *args: Any) -> tuple[Any, ...]:
        """Returns a call's arguments marked with the chosen specs, static ones as they are."""
        given = self.jitted.recipe.arguments(args, {})  # those that are not static
        leaves, tree = jax.tree.flatten([argument.value for argument in given])
        if len(leaves) != len(self.specs):
            raise SpmdError(
                "these arguments are not those that the specs were chosen for",
                actual=f"{len(leaves)} leaves",
                required=f"{len(self.specs)}: {', '.join(list(self.specs)[:8])}",
                fix="pass arguments of the structure that spmd.auto was given",
            )
        pairs = zip(leaves, self.specs.values(), strict=True)
        marked = [mark_sharding(leaf, self.mesh, spec) for leaf, spec in pairs]
        values = zip([a.key for a in given], jax.tree.unflatten(tree, marked), strict=True)
        return tuple((dict(enumerate(args)) | dict(values)).values())

    def __str__(self) -> str:
        """Returns code to paste, and what other meshes would have taken."""
        lines = [super().__str__()]
        for other in self.considered:
            if other.name != str(self.mesh):
                took = other.refusal if other.seconds is None else f"{other.seconds * 1e3:.3g} ms"
                lines.append(f"# {other.name}: {took}")
        return "\n".join(lines)


def auto(
    fn: Callable[..., Any],
    mesh: Any,
    *args: Any,
    topology: Topology | None = None,
    memory_limit: int | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
) -> AutoSharding:
    """Chooses a spec for every argument that has none, and the mesh if there are several.

    Marks of the arguments, and marks inside the function, are kept.

    Args:
      fn: a function for one device.
      mesh: a mesh, or a list or tuple of meshes to choose from.
      *args: arrays or `ShapeDtypeStruct`s, marked or not.
      topology: the machine to plan for; guessed from the mesh when left out.
      memory_limit: bytes that one device may use; if left out, what the topology's devices have.
      donate_argnums: as for `spmd.jit`; a donated argument and its update get the same sharding.
      static_argnums: as for `spmd.jit`.

    Returns:
      An `AutoSharding`; printed, it is code to paste and edit.

    Raises:
      MeshError: the list of meshes is empty.
      PlanError: no mesh has a plan that keeps to the memory limit.

    Example:
      >>> found = spmd.auto(train_step, mesh, params, state, batch, donate_argnums=(0, 1))
      >>> print(found)
    """
    meshes = list(mesh) if isinstance(mesh, list | tuple) else [mesh]
    if not meshes:
        raise MeshError("auto has no mesh to choose from", fix="pass at least one mesh")
    options = Options(topology=topology, memory_limit=memory_limit)
    numbers: Any = {"donate_argnums": donate_argnums, "static_argnums": static_argnums}
    jitted: list[Jitted[..., Any]] = [jit(fn, mesh=m, **numbers, options=options) for m in meshes]
    requests = [each.request(*args) for each in jitted]
    search = Search[Trial](memory_for(requests[0].topology, memory_limit))
    with progress(f"specs of {jitted[0].__name__}", options.shows_progress):
        made = [
            search.weigh(Candidate(str(request.mesh), partial(_open, request, options)))
            for request in requests
        ]
    if not search.tried:
        reasons = "; ".join(f"{entry.name}: {entry.refusal}" for entry in search.weighed)
        raise PlanError(
            "auto found no plan", actual=reasons, fix="use more devices or microbatches"
        )
    place = made.index(search.best)
    plan = search.best.plan
    return AutoSharding.of(requests[place], plan, search.weighed, jitted[place])


def auto_specs(
    module: Any,
    mesh: Any,
    arg_specs: Sequence[Any],
    result_specs: Sequence[Any] | None = None,
    options: Options | None = None,
    updates: Sequence[tuple[int, int]] = (),
) -> list[tuple[Any, ...]]:
    """Returns a spec for every argument of a static StableHLO module, chosen where there is none.

    Arguments are as for `lower_stablehlo`; of options, the topology and the memory limit count.
    PlanError: no plan keeps to that limit.
    """
    options = options or Options()
    request = module_request(module, mesh, arg_specs, result_specs, options, updates)
    return _specs(_open(request, options).plan)[: len(request.arg_names)]


def _specs(plan: Plan) -> list[tuple[Any, ...]]:
    return [tuple(partition_spec(sharding, plan.mesh)) for sharding in plan.arguments]


def _open(request: Request, options: Options) -> Trial:
    """Returns the Trial of the fastest plan, arguments having any shardings that keep marks."""
    problem = problem_for(request)
    doing("plan")
    problem = opened(problem, [True] * len(problem.arguments))
    return plan_problem(problem, options, request.donated)


def _inferred(names: Sequence[str], plan: Plan) -> frozenset[str]:
    """Returns the names of leaves that need no mark, since `spmd.jit` infers the specs they have.

    Those are all leaves of an argument such as optimizer state: the specs of all but scalars follow
    from leaves of other arguments, as `opt_state/0/mu/w` from `params/w`.
    """
    count = len(names)
    shapes = [plan.program.types[value].shape for value in plan.program.body.args[:count]]
    dims, roots = [sharding.dims for sharding in plan.arguments[:count]], list(map(_root, names))
    found: set[str] = set()
    for root in dict.fromkeys(roots):
        others = [None if r == root else own for r, own in zip(roots, dims, strict=True)]
        filled, reasons = like_parameters(names, shapes, others)
        mine = [i for i, r in enumerate(roots) if r == root]
        alike = [i for i in mine if reasons[i] is not None and filled[i] == dims[i]]
        if alike and all(i in alike or not shapes[i] for i in mine):
            found.update(names[i] for i in mine)
    return frozenset(found)


def _root(name: str) -> str:
    return name.partition("/")[0]

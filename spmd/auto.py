"""`auto`: specs for every argument that has none, chosen by the planner.

The same formulation as any plan, with more to choose from: an argument may lie in every way that
its dims divide, an op may split every factor over every axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from spmd.api import Jitted, jit, like_parameters, mark_sharding
from spmd.errors import MeshError, PlanError, SpmdError
from spmd.frontend.marks import Entries
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import as_mesh, partition_spec
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.pipeline import Request, plan_problem, propagated_of
from spmd.planning.plan import Plan
from spmd.planning.problem import opened, problem_of
from spmd.progress import doing, progress


@dataclass(frozen=True)
class Considered:
    """One mesh that was looked at: the predicted seconds of a step, or why there is no plan."""

    mesh: Mesh
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True)
class AutoSharding:
    """What `auto` chose.

    Attributes:
      mesh: the mesh.
      specs: argument path -> spec, for every argument leaf, the user's own included.
      seconds: predicted time of a step.
      considered: every mesh that was looked at.
      jitted: the function with its mesh; call it with marked arguments.
    """

    mesh: Mesh
    specs: Mapping[str, tuple[Any, ...]]
    seconds: float
    considered: tuple[Considered, ...]
    jitted: Jitted[..., Any]
    _names: tuple[str, ...]
    _inferred: frozenset[str]

    def mark(self, *args: Any) -> tuple[Any, ...]:
        """The arguments, arrays or `ShapeDtypeStruct`s, with these specs."""
        leaves, tree = jax.tree.flatten(args)
        if len(leaves) != len(self._names):
            raise SpmdError(
                "these arguments are not those that the specs were chosen for",
                actual=f"{len(leaves)} leaves",
                required=f"{len(self._names)}: {', '.join(self._names[:4])}, ...",
            )
        marked = [
            mark_sharding(leaf, self.mesh, self.specs[name])
            for leaf, name in zip(leaves, self._names, strict=True)
        ]
        return tuple(jax.tree.unflatten(tree, marked))

    def rules(self, argument: str) -> dict[str, tuple[Any, ...]]:
        """Rules for `mark_tree` of one argument; leaves that agree share a pattern."""
        paths = {
            name.partition("/")[2]: spec
            for name, spec in self.specs.items()
            if name.partition("/")[0] == argument and name not in self._inferred
        }
        return _patterns({path: spec for path, spec in paths.items() if path})

    def __str__(self) -> str:
        """Code to paste: the mesh, and a mark for each argument."""
        axes = ", ".join(
            f"{n}={s}" for n, s in zip(self.mesh.axis_names, self.mesh.sizes, strict=True)
        )
        lines = [f"mesh = spmd.make_mesh({axes})  # {self.seconds * 1e3:.3g} ms a step, predicted"]
        for argument in dict.fromkeys(name.partition("/")[0] for name in self._names):
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
        for other in self.considered:
            if other.mesh != self.mesh:
                took = f"{other.seconds * 1e3:.3g} ms" if other.seconds else other.reason
                lines.append(f"# {other.mesh}: {took}")
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

    Marks that the arguments and the function carry are kept.

    Args:
      fn: a function for one device.
      mesh: a mesh, or several to choose from.
      *args: arrays or `ShapeDtypeStruct`s, marked or not.
      topology: the machine to plan for; guessed from the mesh when left out.
      memory_limit: bytes that one device may use; the topology's memory when left out.
      donate_argnums: as for `spmd.jit`: donated arguments and their updates look alike.
      static_argnums: as for `spmd.jit`.

    Returns:
      An `AutoSharding`; printed, it is code to paste and edit.

    Raises:
      MeshError: there is no mesh to choose from.
      PlanError: no mesh has a plan that keeps to the memory limit.

    Example:
      >>> found = spmd.auto(train_step, mesh, params, state, batch, donate_argnums=(0, 1))
      >>> print(found)
    """
    meshes = list(mesh) if isinstance(mesh, list | tuple) else [mesh]
    if not meshes:
        raise MeshError("auto has no mesh to choose from", fix="pass at least one mesh")
    tried: list[tuple[Considered, AutoSharding | None]] = []
    for given in meshes:
        options = Options(topology=topology, memory_limit=memory_limit)
        jitted = jit(
            fn,
            mesh=given,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            options=options,
        )
        try:
            what = f"specs of {jitted.__name__} on {as_mesh(given)}"
            with progress(what, options.shows_progress):
                found = _on_mesh(jitted, as_mesh(given), args, memory_limit)
            tried.append((Considered(found.mesh, found.seconds), found))
        except PlanError as error:
            tried.append((Considered(as_mesh(given), None, error.what), None))
    considered = tuple(entry for entry, _ in tried)
    best = [found for _, found in tried if found is not None]
    if not best:
        reasons = "; ".join(f"{entry.mesh}: {entry.reason}" for entry in considered)
        raise PlanError(
            "auto found no plan", actual=reasons, fix="use more devices or microbatches"
        )
    fastest = min(best, key=lambda found: found.seconds)
    return replace(fastest, considered=considered)


def _on_mesh(
    jitted: Jitted[..., Any], mesh: Mesh, args: Sequence[Any], memory_limit: int | None
) -> AutoSharding:
    request = jitted.request(*args)
    plan = _open_plan(request, memory_limit)
    names = request.arg_names
    specs = {
        name: tuple(partition_spec(sharding, mesh))
        for name, sharding in zip(names, plan.arguments, strict=True)
    }
    inferred = _inferred(request, plan)
    return AutoSharding(mesh, specs, plan.seconds, (), jitted, names, inferred)


def _open_plan(request: Request, memory_limit: int | None) -> Plan:
    """The plan in which arguments without a spec may lie in any way."""
    propagated = propagated_of(request)
    doing("plan")
    problem = problem_of(propagated, request.topology, (), request.links)
    entries = request.arg_entries or (None,) * len(problem.arguments)
    free = [entry is None or None in entry for entry in entries]
    options = Options(memory_limit=memory_limit)
    return plan_problem(replace(opened(problem, free), is_open=True), options, request.donated).plan


def _inferred(request: Request, plan: Plan) -> frozenset[str]:
    """Arguments that get their spec without being told: optimizer state, like its parameter."""
    names = request.arg_names
    types = plan.program.types
    avals = [(types[value].shape,) for value in plan.program.body.args]
    roots = list(dict.fromkeys(name.partition("/")[0] for name in names))
    found: set[str] = set()
    for root in roots:
        others: list[Entries | None] = [
            None if name.partition("/")[0] == root else _entries(sharding, plan.mesh)
            for name, sharding in zip(names, plan.arguments, strict=True)
        ]
        filled, reasons = like_parameters(names, avals, others)
        mine = [i for i, name in enumerate(names) if name.partition("/")[0] == root]
        alike = [
            reasons[i] is not None and filled[i] == _entries(plan.arguments[i], plan.mesh)
            for i in mine
        ]
        scalar = [not types[plan.program.body.args[i]].rank for i in mine]
        if any(alike) and all(a or s for a, s in zip(alike, scalar, strict=True)):
            found.update(names[i] for i in mine)
    return frozenset(found)


def _entries(sharding: Sharding, mesh: Mesh) -> Entries:
    spec = partition_spec(sharding, mesh)
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in spec)


def _patterns(specs: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Paths to specs, numbered siblings that agree under one pattern."""
    groups: dict[str, list[str]] = {}
    for path in specs:
        groups.setdefault(re.sub(r"(^|/)\d+(?=/|$)", r"\1*", path), []).append(path)
    rules: dict[str, tuple[Any, ...]] = {}
    for pattern, paths in groups.items():
        if len({specs[path] for path in paths}) == 1:
            rules[pattern] = specs[paths[0]]
        else:
            rules.update({path: specs[path] for path in paths})
    return dict(sorted(rules.items(), key=lambda rule: "*" in rule[0]))

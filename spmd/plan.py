"""`plan`: the fastest mesh of a machine for a program, and the best of whatever else is free.

Nothing runs, and nothing of the machine has to be here: each candidate is planned as `jit` plans
it, and judged by its predicted seconds and bytes. The search starts at the first of each choice,
and goes to neighbours of the best so far: a prime factor of one axis moved to another, two axes in
the other order, another choice.
"""

import ast
import contextlib
import inspect
import itertools
import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from spmd.api import Jitted, Lowered, jit
from spmd.auto import ChosenSpecs, auto
from spmd.errors import ArgumentError, PlanError, SpmdError, described
from spmd.explain import words as w
from spmd.explain.costs import costs
from spmd.explain.prices import costly_text
from spmd.mesh.make import make_mesh
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology, as_topology
from spmd.options import Options
from spmd.predict.backends import room_for
from spmd.predict.timeline import COMPUTE
from spmd.progress import doing, progress

WORTH = 0.01  # share of the rate that a change has to win to be recommended

REFUSALS = (SpmdError, ValueError, TypeError)
"""What a build may raise for a mesh and choices that do not go together."""


class Task(NamedTuple):
    """What a `build` returns: a function for one device, with its marks, and its arguments."""

    fn: Callable[..., Any]  # or a `spmd.jit` of it; without any marks, specs are found by `auto`
    args: Sequence[Any]  # arrays or `ShapeDtypeStruct`s
    donate_argnums: int | Sequence[int] = ()
    tokens: int = 0  # how many one run handles, for rates; 0 if that is not known
    flops: float = 0.0  # operations that one run is credited with, for the MFU; 0 if not known
    dtype: str = "bf16"  # whose peak the MFU is a share of, as in `Topology.peak_flops`
    settings: Mapping[str, Any] = {}  # name -> value, of the program that trains or serves it


Build = Callable[..., Any]
"""(mesh, **choices) -> a `Task`, (function, arguments), or a `Lowered` for the mesh's machine."""


class Spot(NamedTuple):
    """A point of the search: a mesh of a machine, and a value for each choice."""

    axes: tuple[tuple[str, int], ...]  # (name, size), major first
    chosen: tuple[Any, ...]  # in the order of the choices

    def text(self, names: Iterable[str]) -> str:
        """Returns `data=4, model=2, remat=full`; `names` are those of the choices."""
        said = (*self.axes, *zip(names, self.chosen, strict=True))
        return ", ".join(f"{name}={value}" for name, value in said)

    def neighbours(self, choices: Mapping[str, Sequence[Any]]) -> "Iterator[Spot]":
        """Yields the points that differ in one thing; those most likely to be better first."""
        places = range(len(self.axes))
        for a, b in itertools.permutations(places, 2):
            (_, many), axes = self.axes[a], list(self.axes)
            if prime := next((p for p in range(2, many + 1) if many % p == 0), 0):
                axes[a] = axes[a][0], many // prime
                axes[b] = axes[b][0], axes[b][1] * prime
                yield self._replace(axes=tuple(axes))
        for i, values in enumerate(choices.values()):
            for value in values:
                if value != self.chosen[i]:
                    yield self._replace(chosen=(*self.chosen[:i], value, *self.chosen[i + 1 :]))
        for a, b in itertools.combinations([p for p in places if self.axes[p][1] > 1], 2):
            axes = list(self.axes)
            axes[a], axes[b] = axes[b], axes[a]
            yield self._replace(axes=tuple(axes))


@dataclass(frozen=True)
class RankedPlan:
    """A candidate that was planned.

    Attributes:
      machine: what it is planned for.
      axes: the mesh: axis -> size, major first.
      chosen: choice -> value.
      lowered: the planned program: `explain`, `report`, `compile`, ...
      work: what was built.
      price: of one device for an hour, in whatever currency; None if it is not known.
    """

    machine: Topology
    axes: Mapping[str, int]
    chosen: Mapping[str, Any]
    lowered: Lowered = field(repr=False)
    work: Task = field(repr=False)
    price: float | None = None

    @property
    def seconds(self) -> float:
        """Predicted seconds of one run."""
        return self.lowered.cost

    @cached_property
    def bytes(self) -> int:
        """Predicted peak of one device's memory."""
        return self.lowered.predicted_memory.peak

    @property
    def verdict(self) -> str:
        """`fits`, `tight` (without the headroom that the backend's compiler takes), or not."""
        return room_for(self.bytes, self.machine)

    @property
    def rate(self) -> float:
        """Tokens a second of the whole machine; runs a second if tokens are not known."""
        return (self.work.tokens or 1) / self.seconds

    @property
    def mfu(self) -> float:
        """The share of the devices' peak that the credited operations are; 0 if unknown."""
        peak = self.machine.peak_flops(self.work.dtype) * self.lowered.mesh.size
        return self.work.flops / (self.seconds * peak)

    @property
    def cost(self) -> float | None:
        """What a million tokens (or runs) cost, if the price is known."""
        hours = 1e6 / self.rate / 3600
        return None if self.price is None else self.price * self.lowered.mesh.size * hours

    @cached_property
    def sent(self) -> dict[str, int]:
        """Mesh axes (`data`, or `data, model`) -> bytes that one device sends along them."""
        found = Counter[str]()
        for each in self.lowered.collectives:
            found[whole_axes(each.axes, self.lowered.mesh)] += each.bytes * each.count
        return found

    @cached_property
    def spent(self) -> dict[str, float]:
        """`compute`, `MOVES`, mesh axes -> seconds by which they make a run longer, most first."""
        found: dict[str, float] = {}
        for cost in costs(self.lowered.timeline, self.lowered.mesh, self.machine):
            axes = whole_axes(cost.axes.split(", "), self.lowered.mesh) or cost.kind
            found[axes] = found.get(axes, 0.0) + cost.seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def compiled_text(self) -> str:
        """Compiles by the machine's own compiler, and returns what that says of memory and time."""
        started = time.monotonic()
        compiled = self.lowered.compile()
        took, held = time.monotonic() - started, compiled.memory.peak_bytes
        said = f"{self.lowered.mesh}: compiled for {self.machine} in {took:.0f} s, "
        said += f"{w.bytes_text(held)} allocated ({w.bytes_text(self.bytes)} predicted)"
        if (seconds := (compiled.cost_analysis() or {}).get("optimal_seconds", 0.0)) > 0:
            said += f", kernels {w.seconds_text(seconds)} by its model"
        return said

    def recipe(self, suffix: str = ".py") -> str:
        """Returns the plan for a file: settings if it is YAML, else mesh and specs as code.

        ArgumentError: YAML is asked for, and the program has no settings.
        """
        if suffix not in (".yaml", ".yml"):
            return f"{ChosenSpecs.of(self.lowered.request, self.lowered.stages.plan)}\n"
        if not self.work.settings:
            raise ArgumentError(
                "this program has no settings", fix="write its specs into a .py file instead"
            )
        return "".join(f"{k}: {json.dumps(v)}\n" for k, v in self.work.settings.items())


@dataclass(frozen=True)
class Plans:
    """What `plan` found; printed, it is a table.

    Attributes:
      name: of the program.
      rows: all that was planned: what fits by its rate, then the others by their bytes.
      refused: candidate -> why it could not be planned.
      seconds: how long the search took.
      is_over: whether it came to an end, or time did.
      larger: the best with twice the batch, if `build` has one; planned without saving memory.
    """

    name: str
    rows: tuple[RankedPlan, ...]
    refused: Mapping[str, str]
    seconds: float
    is_over: bool
    larger: RankedPlan | None = None

    @property
    def best(self) -> RankedPlan:
        """The first row."""
        return self.rows[0]

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """Names of the choices that were free."""
        names = dict.fromkeys(name for row in self.rows for name in row.chosen)
        return tuple(n for n in names if len({str(row.chosen[n]) for row in self.rows}) > 1)

    def label(self, row: RankedPlan) -> str:
        """Returns `data=4, model=2; remat=full`: the mesh, what was free, which of machines."""
        parts = [str(row.lowered.mesh)]
        if len({each.machine for each in self.rows}) > 1:
            parts.insert(0, str(row.machine))
        if more := [f"{name}={row.chosen[name]}" for name in self.varied]:
            parts.append(", ".join(more))
        return "; ".join(parts)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes a page that compares the candidates: times by axis, memory, all figures."""
        from spmd.explain.page.page import render_plans

        best, heads_rows = self.best, self.table(len(self.rows))
        each = f"{best.rate / best.lowered.mesh.size:,.0f} tokens/s a device"
        cards = [
            ("the best mesh", str(best.lowered.mesh), f"of {best.machine}"),
            ("a run, predicted", w.seconds_text(best.seconds), each if best.work.tokens else ""),
            ("memory of a device", w.bytes_text(best.bytes), best.verdict),
        ]
        if best.work.flops:
            cards.insert(2, ("MFU", f"{best.mfu:.1%}", "of the devices' peak"))
        bars = [(self.label(row), row) for row in self.rows]
        title, _, tried = self.title.partition(": ")
        said = [f"{line[:1].upper()}{line[1:]}." for line in (tried, *self.advice())]
        Path(path).write_text(render_plans(title, said, cards, bars, *heads_rows), encoding="utf-8")

    @property
    def title(self) -> str:
        """What was searched, and how far."""
        on = ", ".join(dict.fromkeys(str(row.machine) for row in self.rows))
        tried = f"{w.plural(len(self.rows), 'candidate')} planned in {self.seconds:.0f} s"
        refused = f", {len(self.refused)} refused" if self.refused else ""
        ending = "no neighbour of the best is better" if self.is_over else "stopped by the time"
        return f"{self.name} on {on}: {tried}{refused}; {ending}"

    def table(self, most: int = 10) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Returns (heads, rows of text) of the first `most` rows."""
        shown = self.rows[:most]
        has_tokens = any(row.work.tokens for row in shown)

        def sent(axes: str, row: RankedPlan) -> str:
            return w.bytes_text(row.sent[axes]) if axes in row.sent else "-"

        def free(name: str, row: RankedPlan) -> str:
            return str(row.chosen[name])

        # Head, whether there is anything to show, text of a row.
        columns: list[tuple[str, bool, Callable[[RankedPlan], str]]] = [
            ("machine", len({row.machine for row in self.rows}) > 1, lambda r: str(r.machine)),
            ("mesh", True, lambda r: str(r.lowered.mesh)),
            *((name, True, partial(free, name)) for name in self.varied),
            ("a run", True, lambda r: w.seconds_text(r.seconds)),
            ("tokens/s", has_tokens, lambda r: f"{r.rate:,.0f}"),
            ("a device", has_tokens, lambda r: f"{r.rate / r.lowered.mesh.size:,.0f}"),
            ("MFU", any(row.work.flops for row in shown), lambda r: f"{r.mfu:.1%}"),
            ("memory", True, lambda r: w.bytes_text(r.bytes)),
            ("verdict", True, lambda r: r.verdict),
            *(
                (f"sent: {axes}", True, partial(sent, axes))
                for axes in dict.fromkeys(axes for row in shown for axes in row.sent)
            ),
            (
                "cost/M",
                any(row.price is not None for row in shown),
                lambda r: "-" if r.cost is None else f"{r.cost:.3g}",
            ),
        ]
        kept = [(head, show) for head, is_shown, show in columns if is_shown]
        rows = [tuple(show(row) for _, show in kept) for row in shown]
        return tuple(head for head, _ in kept), rows

    def advice(self) -> list[str]:
        """Returns sentences on the best: what bounds it, what to change, and what that gives."""
        best, whole = self.best, sum(self.best.spent.values())
        shares = [
            f"{what if what == COMPUTE else f'waiting for {what}'} {w.share_text(seconds, whole)}"
            for what, seconds in best.spent.items()
            if seconds > WORTH * whole
        ]
        lines = [f"a run is {', '.join(shares)}"]
        if best.verdict != "fits":
            lines.append(
                f"memory: {w.bytes_text(best.bytes)} of {w.bytes_text(best.machine.hbm_bytes)}, "
                f"{best.verdict}: more devices, a smaller batch or more microbatches need less"
            )
        if (costly := best.lowered.prices.costly_mark) is not None:
            lines.append(costly_text(costly, best.lowered.mesh))
        others = [(self.label(row), row) for row in self.rows if row.verdict == "tight"]
        if self.larger is not None:
            others.insert(0, (f"batch={self.larger.chosen['batch']}", self.larger))
        for what, row in others:
            if row.machine == best.machine and row.rate > (1 + WORTH) * best.rate:
                more = f"{row.rate / best.rate - 1:+.1%} a second"
                lines.append(f"{what}: {more}; memory: {row.verdict}")
        return lines

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int = 10) -> str:
        """Returns the table, what bounds the best, and how much was tried."""
        heads, rows = self.table(most)
        lines = w.aligned([heads, *rows], [i for i, head in enumerate(heads) if head in _RIGHT])
        return "\n".join([self.title, *lines, "", f"best: {self.label(self.best)}", *self.advice()])


_RIGHT = ("a run", "tokens/s", "a device", "MFU", "memory", "cost/M")


def plan(
    build: Build,
    machines: str | Topology | Sequence[str | Topology],
    *,
    axes: Sequence[str] = ("data", "model"),
    meshes: Sequence[Mapping[str, int]] | None = None,
    prices: Mapping[str, float] | None = None,
    most_seconds: float = 55.0,
    shows_progress: bool = True,
    **choices: Any,
) -> Plans:
    """Searches the meshes of machines, and what else is free, for the fastest plan that fits.

    Args:
      build: (mesh, **choices) -> `Task` or (function, arguments); it is called for each candidate.
        A parameter whose default is a tuple is free: the search chooses one of its values.
      machines: what to plan for, as `v5p-256`, `h200:8`, `h200:4x8` (hosts x GPUs), or topologies.
      axes: names of the mesh axes, major first; every way to share the devices among them counts.
      meshes: these meshes alone, axis -> size, each over all of a machine's devices.
      prices: chip or machine -> what one device costs an hour.
      most_seconds: in which no candidate is begun that would end later, as long as the longest
        took, for all machines together; each gets at least one. The best is tried once more with
        twice its batch, without saving memory.
      shows_progress: whether a terminal shows what is being planned.
      **choices: parameters of `build`: a value, or a list or tuple of values to choose from.

    Returns:
      All that was planned, the fastest that fits first.

    Raises:
      ArgumentError: `build` has no such parameter.
      MeshError: a machine that is not known.
      PlanError: nothing could be planned.

    Example:
      >>> def build(mesh, batch=(64, 128)):
      ...     return train_step, (params, jax.ShapeDtypeStruct((batch, 512), "int32"))
      >>> print(spmd.plan(build, "v5e:4x4"))
    """
    named = [machines] if isinstance(machines, str | Topology) else list(machines)
    topologies = [as_topology(machine) for machine in named]
    free, known = choices_of(build, choices), prices or {}
    # Whether there is one batch: then the best is planned again, with a larger one.
    grows = [type(value) for value in free.get("batch", ())] == [int]
    name = getattr(build, "__name__", str(build))
    started, rows, refused, is_over = time.monotonic(), list[RankedPlan](), dict[str, str](), True
    with progress(f"plans of {name}", shows_progress), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # of marks and idle axes: they cost
        for i, (machine, given) in enumerate(zip(topologies, named, strict=True)):
            end = started + most_seconds * (i + 1) / len(topologies)
            priced = (str(given), machine.name, machine.chip.name)
            price = next((known[each] for each in priced if each in known), None)
            at = partial(_planned, build, machine, list(free), price)
            found, ended = _search(at, machine, axes, meshes, free, end, 1 + grows)
            for spot, made in found.items():
                if isinstance(made, RankedPlan):
                    rows.append(made)
                else:
                    refused[f"{machine}, {spot.text(free)}"] = made
            is_over &= ended
        if not rows:
            raise PlanError(
                f"no plan of {name} was found",
                actual="; ".join(f"{spot}: {why}" for spot, why in list(refused.items())[:4]),
                fix="free other axes or choices, or name more devices",
            )
        rows.sort(key=_order)
        best, larger = rows[0], None
        if grows:
            chosen = {**best.chosen, "batch": 2 * best.chosen["batch"]}
            spot = Spot(tuple(best.axes.items()), tuple(chosen.values()))
            # A plan that has to save memory takes several times as long to find, and advises
            # nobody.
            again = partial(_planned, build, best.machine, list(free), best.price, spot)
            with contextlib.suppress(*REFUSALS):
                larger = again(memory_limit=1 << 60)
    return Plans(name, tuple(rows), refused, time.monotonic() - started, is_over, larger)


def choices_of(build: Build, given: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Returns a build's parameters after the mesh -> the values to choose from, one if it is fixed.

    ArgumentError: `given` has another name, or a parameter without default is not given.
    """
    parameters = list(inspect.signature(build).parameters.values())[1:]
    known = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    unknown = [name for name in given if name not in known and len(known) == len(parameters)]
    missing = [
        n for n, default in known.items() if default is inspect.Parameter.empty and n not in given
    ]
    if unknown or missing:
        which = f"no parameter {unknown[0]!r}" if unknown else f"no value for {missing[0]!r}"
        raise ArgumentError(
            f"there is {which} of {getattr(build, '__name__', build)}",
            required=f"parameters: {', '.join(known) or 'none but the mesh'}",
            fix=f"leave {unknown[0]} out" if unknown else f"give {missing[0]}",
        )
    values = {**known, **given}
    return {n: list(v) if isinstance(v, tuple | list) else [v] for n, v in values.items()}


def read_choice(text: str) -> Any:
    """Reads `64`, `0.1`, `True` as Python has them, `64,128` as a tuple; anything else is text."""
    values = []
    for part in map(str.strip, text.split(",")):
        try:
            values.append(ast.literal_eval(part))
        except (SyntaxError, ValueError):
            values.append(part)
    return tuple(values) if len(values) > 1 else values[0]


def _order(row: RankedPlan) -> tuple[int, float]:
    """Returns what rows are sorted by: what fits by its rate, then the others by their bytes."""
    verdict = ("fits", "tight", "does not fit").index(row.verdict)
    return verdict, row.bytes if verdict == 2 else -row.rate


def _search(
    at: Callable[[Spot], RankedPlan], machine: Topology, axes: Sequence[str],
    meshes: Sequence[Mapping[str, int]] | None, free: Mapping[str, Sequence[Any]], end: float,
    left: int,
) -> tuple[dict[Spot, RankedPlan | str], bool]:  # fmt: skip
    """Returns (what was planned or why not, whether no neighbour is left to be tried).

    It begins with `meshes`, else with all devices along one axis, and a host's along the last. A
    plan is begun as long as there is time for `left` of them before `end`.
    """
    found: dict[Spot, RankedPlan | str] = {}
    first = tuple(values[0] for values in free.values())
    sizes = [[machine.count] + [1] * (len(axes) - 1)]
    if len(axes) > 1 and (inner := math.gcd(machine.count, 4)) > 1:
        sizes.append([machine.count // inner, *sizes[0][1:-1], inner])
    begins = [dict(zip(axes, each, strict=True)) for each in sizes] if meshes is None else meshes
    starts = [Spot(tuple(mesh.items()), first) for mesh in begins]

    def next_spot() -> Spot | None:
        made = {spot: row for spot, row in found.items() if isinstance(row, RankedPlan)}
        best = [min(made, key=lambda spot: _order(made[spot]))] if made else list(found)
        around = (each for spot in best for each in spot.neighbours(free))
        known = None if meshes is None else {spot.axes for spot in starts}
        near = (each for each in around if known is None or each.axes in known)
        return next((each for each in itertools.chain(starts, near) if each not in found), None)

    longest = 0.0
    while (begun := time.monotonic()) + left * longest < end or not found:
        if (spot := next_spot()) is None:
            return found, True
        doing(f"{len(found) + 1}: {spot.text(free)} on {machine}")
        try:
            found[spot] = at(spot)
        except REFUSALS as error:
            found[spot] = str(error).partition("\n")[0]
        longest = max(longest, time.monotonic() - begun)
    return found, False


def _planned(
    build: Build, machine: Topology, names: Sequence[str], price: float | None, spot: Spot,
    **options: Any,
) -> RankedPlan:  # fmt: skip
    axes = dict(spot.axes)
    mesh = make_mesh(tuple(axes.values()), tuple(axes), topology=machine)
    chosen = dict(zip(names, spot.chosen, strict=True))
    built = build(mesh, **chosen)
    if isinstance(built, Lowered):
        return RankedPlan(machine, axes, chosen, built, Task(build, ()), price)
    is_pair = isinstance(built, tuple) and len(built) == 2 and callable(built[0])
    if not is_pair and not isinstance(built, Task):
        raise ArgumentError(
            "a build has to return a function and its arguments",
            actual=described(built),
            required="(function, (argument, ...)), or a spmd.Task",
            fix="return train_step, (params, opt_state, batch)",
        )
    work = Task(*built)
    return RankedPlan(machine, axes, chosen, lower(work, mesh, machine, **options), work, price)


def lower(work: Task, mesh: Mesh, machine: Topology, **options: Any) -> Lowered:
    """Plans a program for a machine; if nothing of it is marked, with specs that `auto` finds."""
    # Whether loops should be written out takes as long to weigh as a plan, and hardly ranks meshes.
    options["unroll"] = 0
    fn, args = work.fn, work.args
    if isinstance(fn, Jitted):
        recipe = replace(fn.recipe, options=replace(fn.recipe.options, **options))
        return Jitted(recipe).lower(*args, topology=machine)
    numbers: Any = {"donate_argnums": work.donate_argnums}
    jitted = jit(fn, mesh=mesh, **numbers, options=Options(**options))
    lowered = jitted.lower(*args, topology=machine)
    if mesh.size > 1 and not lowered.stages.plan.propagated.marks:
        found = auto(fn, mesh, *args, topology=machine, **numbers)
        lowered = jitted.lower(*found.mark(*args), topology=machine)
    return lowered


def whole_axes(axes: Sequence[str], mesh: Mesh) -> str:
    """Returns `data, model` of axes and their parts, `("model", "data:(2)4")`."""
    found = {axis.partition(":")[0] for axis in axes}
    return ", ".join(axis for axis in mesh.axis_names if axis in found)

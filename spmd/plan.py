"""`plan`: the fastest mesh of a machine for a program, and the best of whatever else is free.

Nothing runs, and nothing of the machine has to be here: each candidate is planned as `jit` plans
it, and judged by its predicted seconds and bytes. The search starts at the first of each choice,
and goes to neighbours of the best so far: a prime factor of one axis moved to another, two axes in
the other order, another choice.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from spmd.planning.search import Candidate, Search
from spmd.predict.backends import memory_for, room_for
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
    flops: float = 0.0  # operations that one run is credited with, for the MFU; 0: as `tokens`
    dtype: str = "bf16"  # whose peak the MFU is a share of, as in `Topology.peak_flops`
    settings: Mapping[str, Any] = {}  # name -> value, of the program that trains or serves it


Build = Callable[..., Any]
"""(mesh, **choices) -> a `Task`, (function, arguments), or a `Lowered` for the mesh's machine."""


class Spot(NamedTuple):
    """A point of the search: a mesh of a machine, and a value for each choice."""

    axes: tuple[tuple[str, int], ...]  # (name, size), major first
    chosen: tuple[Any, ...]  # in the order of the choices

    def neighbours(self, choices: Mapping[str, Sequence[Any]]) -> Iterator[Spot]:
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
        found: dict[str, int] = {}
        for each in self.lowered.collectives:
            axes = whole_axes(each.axes, self.lowered.mesh)
            found[axes] = found.get(axes, 0) + each.bytes * each.count
        return found

    @cached_property
    def spent(self) -> dict[str, float]:
        """`compute`, and mesh axes -> seconds by which they make a run longer, the most first."""
        found: dict[str, float] = {}
        for cost in costs(self.lowered.timeline, self.lowered.mesh, self.machine):
            axes = whole_axes(cost.axes.split(", "), self.lowered.mesh) or COMPUTE
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
            return f"{ChosenSpecs.of(self.lowered)}\n"
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
      larger: the best with twice the batch, if `build` has a `batch` that was not free.
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
        values: dict[str, set[str]] = {}
        for row in self.rows:
            for name, value in row.chosen.items():
                values.setdefault(name, set()).add(str(value))
        return tuple(name for name, found in values.items() if len(found) > 1)

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
        from spmd.explain.page.plans import PlanBar, render

        best, heads_rows = self.best, self.table(len(self.rows))
        each = f"{best.rate / best.lowered.mesh.size:,.0f} tokens/s a device"
        cards = [
            ("the best mesh", str(best.lowered.mesh), f"of {best.machine}"),
            ("a run, predicted", w.seconds_text(best.seconds), each if best.work.tokens else ""),
            ("memory of a device", w.bytes_text(best.bytes), best.verdict),
        ]
        if best.work.flops:
            cards.insert(2, ("MFU", f"{best.mfu:.1%}", "of the devices' peak"))
        bars = [
            PlanBar(self.label(r), r.spent, r.bytes, r.machine.hbm_bytes, r.verdict)
            for r in self.rows
        ]
        title, _, tried = self.title.partition(": ")
        said = [f"{line[:1].upper()}{line[1:]}." for line in (tried, *self.advice())]
        page = render(title, said, cards, bars, *heads_rows)
        Path(path).write_text(page, encoding="utf-8")

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
        machines = len({row.machine for row in self.rows}) > 1
        sent = list(dict.fromkeys(axes for row in shown for axes in row.sent))
        has = {
            "machine": machines,
            "tokens/s": any(row.work.tokens for row in shown),
            "MFU": any(row.work.flops for row in shown),
            "cost/M": any(row.price is not None for row in shown),
        }
        found = []
        for row in shown:
            cells = {
                "machine": str(row.machine),
                "mesh": str(row.lowered.mesh),
                **{name: str(row.chosen[name]) for name in self.varied},
                "a run": w.seconds_text(row.seconds),
                "tokens/s": f"{row.rate:,.0f}",
                "a device": f"{row.rate / row.lowered.mesh.size:,.0f}",
                "MFU": f"{row.mfu:.1%}",
                "memory": w.bytes_text(row.bytes),
                "verdict": row.verdict,
                **{
                    f"sent: {axes}": w.bytes_text(row.sent[axes]) if axes in row.sent else "-"
                    for axes in sent
                },
                "cost/M": "-" if row.cost is None else f"{row.cost:.3g}",
            }
            has["a device"] = has["tokens/s"]
            found.append({head: text for head, text in cells.items() if has.get(head, True)})
        return tuple(found[0]), [tuple(row.values()) for row in found]

    def advice(self) -> list[str]:
        """Returns sentences on the best: what bounds it, what to change, and what that gives."""
        best, lines = self.best, []
        whole = sum(best.spent.values())
        shares = [
            f"{what if what == COMPUTE else f'waiting for {what}'} {w.share_text(seconds, whole)}"
            for what, seconds in best.spent.items()
            if seconds > WORTH * whole
        ]
        lines.append(f"a run is {', '.join(shares)}")
        if best.verdict != "fits":
            lines.append(
                f"memory: {w.bytes_text(best.bytes)} of {w.bytes_text(best.machine.hbm_bytes)} is "
                f"{best.verdict}; more devices, a smaller batch or more microbatches need less"
            )
        if (costly := best.lowered.prices.costly_mark) is not None:
            lines.append(costly_text(costly, best.lowered.mesh))
        for other in filter(None, (self.larger, *self.rows)):
            is_other = other is self.larger or other.verdict == "tight"
            if other.machine == best.machine and is_other and other.rate > (1 + WORTH) * best.rate:
                more = f"{other.rate / best.rate - 1:+.1%} a second; memory: {other.verdict}"
                what = (
                    f"batch={other.chosen['batch']}" if other is self.larger else self.label(other)
                )
                lines.append(f"{what}: {more}")
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
    most_seconds: float = 50.0,
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
      most_seconds: when to stop, for all machines together; each gets at least one candidate.
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
    free = choices_of(build, choices)
    name = getattr(build, "__name__", str(build))
    started, rows, refused, is_over = time.monotonic(), list[RankedPlan](), dict[str, str](), True
    with progress(f"plans of {name}", shows_progress), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # of marks and idle axes: they cost
        for i, (machine, given) in enumerate(zip(topologies, named, strict=True)):
            end = started + most_seconds * (i + 1) / len(topologies)
            price = _price(machine, str(given), prices or {})
            at = partial(_planned, build, machine, list(free), price)
            starts = _starts(machine, axes, meshes, free)
            found, refusals, ended = _search(at, machine, starts, free, meshes is None, end)
            rows += found
            refused |= {f"{machine}, {spot}": why for spot, why in refusals.items()}
            is_over &= ended
    if not rows:
        raise PlanError(
            f"no plan of {name} was found",
            actual="; ".join(f"{spot}: {why}" for spot, why in list(refused.items())[:4]),
            fix="free other axes or choices, or name more devices",
        )
    order = {"fits": 0, "tight": 1, "does not fit": 2}
    rows.sort(key=lambda r: (order[r.verdict], r.bytes if r.verdict == "does not fit" else -r.rate))
    larger = _larger(build, free, rows[0])
    return Plans(name, tuple(rows), refused, time.monotonic() - started, is_over, larger)


def choices_of(build: Build, given: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Returns a build's parameters after the mesh -> the values to choose from, one if it is fixed.

    ArgumentError: `given` has another name, or a parameter without default is not given.
    """
    parameters = dict(list(inspect.signature(build).parameters.items())[1:])
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    unknown = [name for name in given if name not in known and not takes_more]
    missing = [n for n, p in known.items() if p.default is p.empty and n not in given]
    if unknown or missing:
        which = f"no parameter {unknown[0]!r}" if unknown else f"no value for {missing[0]!r}"
        raise ArgumentError(
            f"there is {which} of {getattr(build, '__name__', build)}",
            required=f"parameters: {', '.join(known) or 'none but the mesh'}",
            fix=f"leave {unknown[0]} out" if unknown else f"give {missing[0]}",
        )
    values = {name: p.default for name, p in known.items()} | dict(given)
    return {n: list(v) if isinstance(v, tuple | list) else [v] for n, v in values.items()}


def read_choice(text: str) -> Any:
    """Reads `64`, `0.1`, `True` as Python has them, `64,128` as a tuple; anything else is text."""
    parts = [part.strip() for part in text.split(",")]
    values = []
    for part in parts:
        try:
            values.append(ast.literal_eval(part))
        except (SyntaxError, ValueError):
            values.append(part)
    return tuple(values) if len(values) > 1 else values[0]


def _price(machine: Topology, given: str, prices: Mapping[str, float]) -> float | None:
    names = (given, machine.name, machine.chip.name)
    return next((prices[name] for name in names if name in prices), None)


def _starts(
    machine: Topology,
    axes: Sequence[str],
    meshes: Sequence[Mapping[str, int]] | None,
    free: Mapping[str, Sequence[Any]],
) -> list[Spot]:
    """Returns where a search begins: all devices along one axis, or a host's along the last."""
    first = tuple(values[0] for values in free.values())
    if meshes is not None:
        return [Spot(tuple(mesh.items()), first) for mesh in meshes]
    many, ones = machine.count, [(name, 1) for name in axes[1:]]
    spots = [Spot(((axes[0], many), *ones), first)]
    inner = math.gcd(many, 4)
    if ones and inner > 1:
        last = (*ones[:-1], (axes[-1], inner))
        spots.append(Spot(((axes[0], many // inner), *last), first))
    return spots


def _search(
    at: Callable[[Spot], RankedPlan],
    machine: Topology,
    starts: Sequence[Spot],
    free: Mapping[str, Sequence[Any]],
    moves_axes: bool,
    end: float,
) -> tuple[list[RankedPlan], dict[str, str], bool]:
    """Returns (what was planned, name -> why not, whether no neighbour is left to be tried)."""
    search, spots = Search[_PerToken](memory_for(machine, None)), dict[Spot, _PerToken | None]()
    refused: dict[str, str] = {}

    def visit(spot: Spot) -> None:
        doing(f"{len(spots) + 1}: {_spot_text(spot, list(free))} on {machine}")
        try:
            spots[spot] = search.weigh(Candidate(str(spot), lambda: _PerToken(at(spot))))
            refusal = search.weighed[-1].refusal if spots[spot] is None else ""
        except REFUSALS as error:
            spots[spot], refusal = None, str(error).partition("\n")[0]
        if refusal:
            refused[_spot_text(spot, list(free))] = refusal

    for spot in starts:
        if not spots or time.monotonic() < end:
            visit(spot)
    while time.monotonic() < end:
        around = starts
        if search.tried:
            best = next(spot for spot, made in spots.items() if made is search.best)
            around = list(best.neighbours(free))
        else:
            around = [each for spot in list(spots) for each in spot.neighbours(free)]
        if not moves_axes:
            around = [s for s in around if s.axes in {spot.axes for spot in starts}]
        if (new := next((each for each in around if each not in spots), None)) is None:
            return [made.row for made in search.tried], refused, True
        visit(new)
    return [made.row for made in search.tried], refused, False


def _larger(build: Build, free: Mapping[str, Sequence[Any]], best: RankedPlan) -> RankedPlan | None:
    """Returns the best with twice its `batch`; None if it has none, or it was searched."""
    batch = best.chosen.get("batch")
    if type(batch) is not int or len(free["batch"]) > 1:
        return None
    spot = Spot(tuple(best.axes.items()), tuple({**best.chosen, "batch": 2 * batch}.values()))
    try:
        return _planned(build, best.machine, list(free), best.price, spot)
    except REFUSALS:
        return None


class _PerToken(NamedTuple):
    """What a search compares of a row: a batch that is larger may take longer."""

    row: RankedPlan

    @property
    def seconds(self) -> float:
        return 1 / self.row.rate

    @property
    def bytes(self) -> int:
        return self.row.bytes


def _spot_text(spot: Spot, names: Sequence[str]) -> str:
    said = (*spot.axes, *zip(names, spot.chosen, strict=True))
    return ", ".join(f"{name}={value}" for name, value in said)


def _planned(
    build: Build, machine: Topology, names: Sequence[str], price: float | None, spot: Spot
) -> RankedPlan:
    axes = dict(spot.axes)
    mesh = make_mesh(tuple(axes.values()), tuple(axes), topology=machine)
    chosen = dict(zip(names, spot.chosen, strict=True))
    built = build(mesh, **chosen)
    if isinstance(built, Lowered):
        return RankedPlan(machine, axes, chosen, built, Task(build, ()), price)
    work = as_work(built)
    return RankedPlan(machine, axes, chosen, lower(work, mesh, machine), work, price)


def as_work(built: Any) -> Task:
    """Returns what a `build` returned as a `Task`; ArgumentError if it is none."""
    if isinstance(built, Task):
        return built
    if isinstance(built, tuple) and len(built) == 2 and callable(built[0]):
        return Task(*built)
    raise ArgumentError(
        "a build has to return a function and its arguments",
        actual=described(built),
        required="(function, (argument, ...)), or a spmd.Task",
        fix="return train_step, (params, opt_state, batch)",
    )


def lower(work: Task, mesh: Mesh, machine: Topology) -> Lowered:
    """Plans a program for a machine; if nothing of it is marked, with specs that `auto` finds."""
    # Whether loops should be written out takes as long to weigh as a plan, and hardly ranks meshes.
    fn, options = work.fn, Options(unroll=0)
    numbers: Any = {"donate_argnums": work.donate_argnums}
    if isinstance(fn, Jitted):
        return Jitted(replace(fn.recipe, options=replace(fn.recipe.options, unroll=0))).lower(
            *work.args, topology=machine
        )
    lowered = jit(fn, mesh=mesh, **numbers, options=options).lower(*work.args, topology=machine)
    if mesh.size > 1 and not lowered.stages.plan.propagated.marks:
        found = auto(fn, mesh, *work.args, topology=machine, **numbers)
        args = found.mark(*work.args)
        lowered = jit(fn, mesh=mesh, **numbers, options=options).lower(*args, topology=machine)
    return lowered


def whole_axes(axes: Sequence[str], mesh: Mesh) -> str:
    """Returns `data, model` of axes and their parts, `("model", "data:(2)4")`."""
    found = {axis.partition(":")[0] for axis in axes}
    return ", ".join(axis for axis in mesh.axis_names if axis in found)

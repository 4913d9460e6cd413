"""A plan as data: all that reports show of a program, as values that JSON holds.

`PlanReport` is what text, page, notebook and trace are written from, and nothing else; `to_json`
and `from_json` turn it into plain dicts and back. Numbers are bytes and seconds.
"""

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from spmd.errors import ArgumentError
from spmd.explain.costs import Collective, Cost
from spmd.explain.memory import MemoryCurve
from spmd.explain.steps import PipelineRow
from spmd.explain.words import Section
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding

FORMAT, VERSION = "spmd plan", 1
"""What a file of a plan says that it is; the version changes with the meaning of a field."""


class Machine(NamedTuple):
    """The machine that a program is planned for."""

    name: str  # as `Topology` takes it
    platform: str | None  # `tpu`, `cuda`, `rocm` or `cpu`
    hbm_bytes: int  # the memory of a device


class Leaf(NamedTuple):
    """How one leaf of the arguments, results or constants is sharded, and why."""

    name: str  # its path in the user's pytree
    type: TensorType
    spec: str  # its sharding as text: `("data", None)`, and `on the host` where it lies there
    sharding: Sharding  # for each dim, numbers of the mesh's atoms
    local: TensorType  # one device's piece
    origin: str  # `marked`, or the mark that its sharding comes from, or that none reaches it


class Inside(NamedTuple):
    """Intermediate values that look alike: results of ops, and resharded copies of them."""

    op: str  # which makes them, or `copy for` the one that reads them
    type: TensorType
    spec: str
    local: TensorType
    source: str  # the user's source line and its callers'
    count: int  # type: ignore[assignment]  # hides tuple.count; how many they are


class PlanSlot(NamedTuple):
    """When an op, or a loop or conditional around others, is predicted to run."""

    lane: str  # `compute`, or the mesh axes whose links it uses
    kind: str  # `compute`, or the kind of a collective
    label: str  # the op, or `all_gather over data`
    source: str  # the user's source line and its callers'
    start: float  # seconds from the start of the run; inside a loop, of its first iteration
    seconds: float  # each time that it runs; of a loop, of all iterations
    depth: int  # how many loops it is inside of
    trips: int  # how often it runs, as the loops around it say
    runs: int | None  # of a loop how often it goes round; None if that is not known
    opens: str  # `loop` or `conditional`, of the slots of greater depth behind it; else empty
    layer: str  # of the user's model
    work: str  # the kind of work, as `matrix products`
    reason: str  # why a collective is there

    @property
    def end(self) -> float:
        """When it ends, or the loop's last iteration does."""
        return self.start + self.seconds


def occurrences(slots: Sequence[PlanSlot], whole: bool) -> Iterator[PlanSlot]:
    """Yields a slot for each time that an op runs; a loop comes before what it runs.

    Unless `whole`, only the first iteration of a loop is there, stretched to the time of all.
    """
    heads = [at for at, slot in enumerate(slots) if slot.depth == slots[0].depth]
    for at, end in pairwise([*heads, len(slots)]):
        slot, inside = slots[at], slots[at + 1 : end]
        yield slot
        runs = UNKNOWN_TRIPS if slot.runs is None else slot.runs
        for turn in range(runs if whole else min(runs, 1)):
            for inner in occurrences(inside, whole):
                if whole:
                    yield inner._replace(start=inner.start + turn * slot.seconds / runs)
                else:
                    start = slot.start + (inner.start - slot.start) * runs
                    yield inner._replace(start=start, seconds=inner.seconds * runs)


def loop_text(slot: PlanSlot) -> str:
    """Returns how often a loop runs: `loop ×4`, or `loop, taken as ×16`; else `conditional`."""
    if slot.opens != "loop":
        return "conditional"
    return f"loop, taken as ×{UNKNOWN_TRIPS}" if slot.runs is None else f"loop ×{slot.runs}"


class PlanTimeline(NamedTuple):
    """When everything in one run of one device's program happens."""

    seconds: float  # of one run
    compute_seconds: float  # arithmetic alone
    comm_seconds: float  # collectives alone, one after another
    exposed_seconds: float  # how long arithmetic waits for collectives
    scheduled_seconds: float  # at which the last slot ends: less where overlap slows things down
    slots: tuple[PlanSlot, ...]  # in program order, a loop before what is inside it


class PlanReport(NamedTuple):
    """All that is shown of a planned program."""

    name: str  # what the program is called
    title: str  # the same with its file
    mesh: Mesh
    machine: Machine
    solver: str  # which planner, and how near the least sum of costs it came
    timeline: PlanTimeline
    least_seconds: float  # no plan can be faster: its arithmetic, split evenly
    peak_bytes: int  # of one device, predicted
    verdict: str  # `fits`, `tight` or `does not fit`
    sent_bytes: int  # by one device in one run
    measured_seconds: float | None  # of a step, if steps were run
    arguments: tuple[Leaf, ...]
    constants: tuple[Leaf, ...]  # the large ones, which may be split
    results: tuple[Leaf, ...]
    inside: tuple[Inside, ...]
    collectives: tuple[Collective, ...]
    costs: tuple[Cost, ...]  # what a run's time is spent on, by source line, the most first
    code: Mapping[str, str]  # `file:line (function)` -> the code there, of these costs
    memory: tuple[tuple[str, str], ...]  # (what for, bytes as text) of a device
    curve: MemoryCurve
    pipelines: tuple[PipelineRow, ...]
    sections: tuple[Section, ...]  # the report's tables, in order

    def to_json(self) -> dict[str, Any]:
        """Returns dicts, lists, text and numbers; `from_json` makes the same report of them."""
        return {"format": FORMAT, "version": VERSION, **_plain(self)}


def from_json(data: Any) -> PlanReport:
    """Returns the report that `to_json` wrote; ArgumentError for anything else."""
    known = isinstance(data, Mapping) and data.get("format") == FORMAT
    if not known or data["version"] != VERSION:
        raise ArgumentError(
            "this is not a plan that can be read",
            actual=f"version {data['version']}" if known else "no such format in it",
            required=f"JSON of format {FORMAT!r}, version {VERSION}",
            fix="write it again: program.to_json gives it, and spmd explain --json",
        )
    report: PlanReport = _read(PlanReport, {name: data[name] for name in PlanReport._fields})
    return report


def _plain(value: Any) -> Any:
    if isinstance(value, Sharding):
        dims = [list(axes) for axes in value.dims]
        return {"dims": dims, "partial": list(value.partial), "kind": value.kind}
    if isinstance(value, Mesh):
        ids = None if value.device_ids == tuple(range(value.size)) else list(value.device_ids)
        axes = [list(pair) for pair in value.shape_tuple]
        return {"axes": axes, "dcn": list(value.dcn_sizes), "devices": ids}
    if hasattr(value, "_fields"):
        return {name: _plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


_hints = cache(typing.get_type_hints)


def _read(kind: Any, value: Any) -> Any:
    """Returns plain data as a value of a type: the reverse of `_plain`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None or isinstance(value, str | int | float):
            return value
        # Of several types, that of a list, or the one with these fields.
        fields = set(value) if isinstance(value, dict) else None
        of_list = (t for t in inner if typing.get_origin(t))
        by_name = (t for t in inner if set(getattr(t, "_fields", ())) == fields)
        return _read(next(of_list if fields is None else by_name), value)
    if kind is Sharding:
        return Sharding(tuple(map(tuple, value["dims"])), tuple(value["partial"]), value["kind"])
    if kind is Mesh:
        names, sizes = zip(*value["axes"], strict=True) if value["axes"] else ((), ())
        return Mesh(value["devices"], sizes, names, value["dcn"])
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        hints = _hints(kind)
        return kind(**{name: _read(hints[name], each) for name, each in value.items()})
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list):
        many = len(inner) > 1 and inner[1] is not ...
        kinds: Sequence[Any] = inner if many else [inner[0] if inner else Any] * len(value)
        read = [_read(each, one) for each, one in zip(kinds, value, strict=True)]
        return read if origin is list else tuple(read)
    return value

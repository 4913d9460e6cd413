"""Runs steps under jax's profiler, reads the profile, and divides time among its events.

A step is the time of one annotation `STEP` on the host. Where the profile has the events in it:

    CPU   threads of the plane `/host:CPU`. An event is one op of the optimized module; it names
          the op, the module and the device.
    GPU   lines `Stream ...` of the planes `/device:GPU:N`. An event is a kernel or a copy, and
          names its op, except in a CUDA graph; `labels.Order` finds it there.
"""

import re
import statistics
import tempfile
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

STEP = "spmd.measure.step"  # the annotation around each step of a profile
WARM = 2  # runs before any is timed: the first ones load kernels and fill caches of the runtime
PROFILED = 3  # steps that run under the profiler, after those that are timed without it


class Event(NamedTuple):
    """Holds one kernel, copy or op that a device ran; times are seconds after its step began."""

    device: int
    name: str  # the kernel's; on CPUs the op's
    op: str  # the op of the optimized module that it belongs to; empty where the profile names none
    start: float
    end: float
    # of a GPU's kernel: the number of the host's call that launched it, and its number in the CUDA
    # graph that was launched
    launch: tuple[int, int] = (0, 0)


class Step(NamedTuple):
    """Holds one step of a profile: its time, and the events of all devices in it."""

    seconds: float  # until all results are there
    events: tuple[Event, ...]  # in order of their start


class Run(NamedTuple):
    """Holds steps that were run: first some without the profiler, then some under it."""

    times: tuple[float, ...]  # seconds of each step without the profiler
    steps: tuple[Step, ...]  # those under it

    @property
    def seconds(self) -> float:
        """The median of `times`, in seconds."""
        return statistics.median(self.times)


@dataclass
class Feed:
    """Runs a program again and again, without donating the arrays that it was given first."""

    executable: Any
    arguments: Sequence[Any]
    donated: Sequence[int]  # positions among the arguments
    links: Sequence[tuple[int, int]]  # (result, argument that it replaces in the next step)
    updates: dict[int, Any] = field(default_factory=dict)  # argument -> what replaces it

    def prepare(self) -> list[Any]:
        """Returns the next step's arguments; donated ones are results of the last, or copies."""
        made = list(self.arguments)
        for position in self.donated:
            given, update = made[position], self.updates.pop(position, None)
            # A result that was asked for elsewhere is not the next step's argument.
            if update is not None and update.sharding.is_equivalent_to(given.sharding, given.ndim):
                made[position] = update
            else:
                made[position] = jax.device_put(jnp.copy(given), given.format)
        jax.block_until_ready(made)
        return made

    def run(self, arguments: list[Any]) -> None:
        """Runs a step, and waits until its results are there."""
        results = jax.block_until_ready(self.executable(*arguments))
        own = ((r, argument) for r, argument in self.links if argument in self.donated)
        self.updates = {argument: results[r] for r, argument in own}


def run_steps(
    step: Callable[[Any], None], prepare: Callable[[], Any], steps: int, profiled: int = PROFILED
) -> Run:
    """Calls `step(prepare())` to warm up, then `steps` times timed, then `profiled` times profiled.

    `step` has to wait for its results, as the host's clock is read. `prepare` is not timed.
    """

    def timed() -> float:
        given = prepare()
        start = time.perf_counter()
        step(given)
        return time.perf_counter() - start

    for _ in range(WARM):
        timed()
    times = tuple(timed() for _ in range(steps))
    if not profiled:
        return Run(times, ())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow every call down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(profiled):
                given = prepare()
                with jax.profiler.TraceAnnotation(STEP):
                    step(given)
        return Run(times, read_folder(Path(folder)))


def read_folder(folder: Path) -> tuple[Step, ...]:
    """Returns the steps of the profile that jax wrote into a folder, in order."""
    (file,) = folder.rglob("*.xplane.pb")
    return read_steps(jax.profiler.ProfileData.from_file(str(file)))


def read_steps(profile: Any) -> tuple[Step, ...]:
    """Returns the steps of a `jax.profiler.ProfileData` in order, each with its events."""
    # Times are nanoseconds on one clock for all planes; that of a GPU is off by microseconds.
    spans = sorted(
        (event.start_ns, event.end_ns)
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if event.name == STEP
    )
    with warnings.catch_warnings():
        # The first look at an event's stats makes their type, of which Python 3.12 says that it has
        # no module. Where warnings are errors, jaxlib ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        events = tuple(_device_events(profile))
    steps = []
    for begin, end in spans:
        inside = [
            event._replace(start=(event.start - begin) * 1e-9, end=(event.end - begin) * 1e-9)
            for event in events
            if begin <= event.start < end
        ]
        steps.append(Step((end - begin) * 1e-9, tuple(sorted(inside, key=lambda e: e.start))))
    return tuple(steps)


def _device_events(profile: Any) -> Iterator[Event]:
    planes = {plane.name: plane for plane in profile.planes}
    gpus = {name: found[1] for name in planes if (found := re.match(r"/device:GPU:(\d+)", name))}
    for name, number in gpus.items():
        for line in planes[name].lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    stats = dict(event.stats)
                    launch = (stats.get("correlation_id", 0), stats.get("cuda_graph_node_id", 0))
                    op, times = str(stats.get("hlo_op", "")), (event.start_ns, event.end_ns)
                    yield Event(int(number), event.name, op, *times, launch)
    if not gpus and "/host:CPU" in planes:
        yield from _cpu_events([_Thread(line) for line in planes["/host:CPU"].lines])


class _Thread:
    """Holds a CPU thread's events: ops, tasks, and ends of ops, also ones other threads began."""

    def __init__(self, line: Any) -> None:
        self.ops: list[tuple[Event, Mapping[str, Any]]] = []  # each with its stats
        self.ends: list[tuple[float, int]] = []  # (moment, number) of what others began
        self.tasks: list[float] = []  # when it began with each task of its pool
        for event in line.events:
            if event.name == "ThreadpoolListener::StartRegion":
                self.tasks.append(event.start_ns)
                continue
            stats = dict(event.stats)
            if event.name.startswith("end: ") and "_c" in stats:
                self.ends.append((event.start_ns, stats["_c"]))
            elif "hlo_op" in stats and "device_ordinal" in stats:
                device, op = int(stats["device_ordinal"]), str(stats["hlo_op"])
                ran = Event(device, event.name, op, event.start_ns, event.end_ns)
                self.ops.append((ran, stats))
        self.ops.sort(key=lambda op: op[0].start)
        self.tasks.sort()

    def task_at(self, moment: float) -> float:
        """Returns when the task that runs at a moment began, in nanoseconds; 0 if there is none."""
        at = bisect_right(self.tasks, moment)
        return self.tasks[at - 1] if at else 0.0

    def first_for(self, device: int, after: float, before: float) -> float:
        """Returns the next start after `after` of an op of `device`; `before` if none is before."""
        at = bisect_right(self.ops, after, key=lambda op: op[0].start)
        own = (event.start for event, _ in self.ops[at:] if event.device == device)
        return min(before, next(own, before))


def _cpu_events(threads: Sequence[_Thread]) -> Iterator[Event]:
    """Yields an event for each op, in nanoseconds, that lasts until all its threads are done."""
    # A thread that hands an op to its pool goes on at once: `dot` ends, and some time later, on
    # another thread, there is an event `end: dot`; `_p` of the one is `_c` of the other. But before
    # that thread says so it runs what waited for the op, in the same task:
    #
    #   one | dot | add |
    #   two |   task: part of dot | all_reduce | end: dot
    ended: dict[Any, tuple[_Thread, float, float]] = {
        number: (thread, thread.task_at(moment), moment)
        for thread in threads
        for moment, number in thread.ends
    }
    for event, stats in [op for thread in threads for op in thread.ops]:
        end = event.end
        if (last := ended.get(stats.get("_p"))) and last[2] > end:
            thread, began, moment = last
            end = max(end, thread.first_for(event.device, max(began, event.start), moment))
        yield event._replace(end=end)


def shares(spans: Sequence[tuple[int, float, float]]) -> list[tuple[float, float]]:
    """Divides a device's time among spans (rank, start, end) of its work, which may overlap.

    Of each it returns the seconds in which it ran that count for it, while nothing of a lower rank
    ran; and those that do not, for which the time counts.

    before: dot 0..4, all_gather 3..7, copy 6..8        (seconds; ranks 0, 2, 1)
    after:  dot 4, all_gather 2 and 2 hidden, copy 2

    At any moment the time counts for the spans with the lowest rank that run, in equal parts. All
    `seconds` add up to the time in which anything ran.
    """
    seconds, hidden = [0.0] * len(spans), [0.0] * len(spans)
    timed = [(i, start, end) for i, (_, start, end) in enumerate(spans) if end > start]
    edges = sorted([(t, True, i) for i, t, _ in timed] + [(t, False, i) for i, _, t in timed])
    running: dict[int, set[int]] = {}
    before = 0.0
    for moment, _, i in edges:
        levels = [running[rank] for rank in sorted(running) if running[rank]]
        for level, totals in zip(levels, (seconds, *[hidden] * len(levels)), strict=False):
            for j in level:
                totals[j] += (moment - before) / len(level)
        running.setdefault(spans[i][0], set()).symmetric_difference_update({i})
        before = moment
    return list(zip(seconds, hidden, strict=True))

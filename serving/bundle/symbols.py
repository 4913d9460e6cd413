"""Sizes of a bundle's symbolic dims: those that are given, and one that the memory decides.

A pool of pages is as large as the memory allows that is left on a device beside weights, the rest
of the state, and what the functions need while they run.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from spmd.errors import ArgumentError, bytes_text
from spmd.frontend.sizes import sizes_of, symbols_in
from spmd.lowering.emit import Emitted
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import first_match, jax_mesh
from spmd.mesh.topology import Topology
from spmd.models.placement import axes_of, present
from spmd.options import Options
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import Entrypoint, LeafEntry, Manifest, Sizes, Symbol, Variant
from spmd.serving.bundle.placement import spec_for
from spmd.serving.bundle.programs import (
    CompiledFunction,
    FunctionKey,
    Lower,
    Placed,
    PlanMore,
    Say,
    heaviest,
    placements,
    plan_functions,
    with_primary,
)

MEMORY_SHARE = 0.95
"""Of a device's memory, as far as XLA has it, that a bundle takes if nobody says otherwise."""

XLA_SHARE, XLA_SHARES = 0.92, ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Of a GPU's memory that XLA takes when a server starts (0.75 untold), and how users say it."""

MEMORY_SHARE_ON_CPU = 0.1
"""The same on CPUs, whose memory is everybody's."""

LARGEST = (1 << 31) - 1
"""Of a value: exported programs compute with 32 bits."""

FIRST = 0.99
"""Of the value with which weights and state alone would fill the memory, that of the first plan. If
its functions fit into the hundredth that is left, it is the last plan, too."""

ROUNDS = 8

SPARE = 1.1
"""So many times as much memory as the planned functions need is kept for those planned later."""

_LOG = logging.getLogger("serving")


class PlannedBundle(NamedTuple):
    """A bundle's functions, planned."""

    symbols: Mapping[str, Sizes]  # name -> value
    manifest: Manifest  # `Manifest.sized`
    emitted: Mapping[str, Emitted]  # name -> program
    notes: list[str]  # sentences on specs that do not fit
    more: PlanMore  # plans another function, which has to fit into the room
    room: int | None = None  # bytes of each device that it may take, where these decided a size


Held = tuple[Manifest, Placed]
"""A bundle as it was written, and where its weights and its state lie."""

Plan = Callable[[Mapping[str, Sizes], Collection[str], bool], PlannedBundle]
"""Plans functions, named as they were written, for values of all symbols: `FunctionKey.fills`."""


def planner(manifest: Manifest, mesh: Mesh, lower: Lower, say: Say = lambda text: None) -> Plan:
    """What plans functions at the sizes of symbols, each of them once for the same sizes."""
    made: dict[tuple[str, FunctionKey], Emitted] = {}

    def lower_once(entry: Entrypoint, asked: FunctionKey) -> Emitted:
        key = entry.name, asked
        if key not in made:
            made[key] = lower(entry, asked)
        return made[key]

    def plan(values: Mapping[str, Sizes], wanted: Collection[str], fills: bool) -> PlannedBundle:
        sized = manifest.sized(values)
        names = with_primary(sized, wanted)
        planned = plan_functions(sized, names, mesh, lower_once, say, symbols=values, fills=fills)
        return PlannedBundle(values, sized, *planned)

    return plan


def plan_sized(
    manifest: Manifest,
    given: Mapping[str, Sizes] | None,
    mesh: Mesh,
    options: Options,
    memory_share: float | None,
    plan: Plan,
    wanted: Sequence[str],
    beside: Callable[[], Held] | None = None,
) -> PlannedBundle:
    """A bundle's functions at the sizes that are given, or that memory decides.

    Args:
      manifest: of the bundle, as it was written.
      given: symbol -> value. One that is not among them has to be in the state: it gets the largest
        value that it may have. One that is not in the state may have several values.
      options: of the compiler; the topology says how much memory there is.
      memory_share: of each device's memory, which all that the bundle has may take.
      wanted: names of the functions that are planned here; `PlannedBundle.more` plans others.
      beside: what another bundle will hold, whose symbol of this name gets the same value; it is
        asked if memory decides.

    Raises:
      BundleError: a value that a symbol may not have, a symbol without one that memory says nothing
        of, or no room for the least one.
    """
    held = symbols_in({dim for leaf in manifest.state for dim in leaf.shape})
    known: dict[str, Sizes] = {}
    for name, sizes in (given or {}).items():
        if name not in manifest.symbols:
            names = ", ".join(manifest.symbols) or "none"
            raise BundleError(f"the bundle has no symbol {name!r}; it has {names}")
        values = tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)
        if isinstance(sizes, Iterable) and (not values or name in held):
            reason = "the state has it, and has one size" if values else "it needs one at least"
            raise BundleError(f"{name} cannot have {len(values)} sizes: {reason}")
        for value in values:
            if value > LARGEST or not manifest.symbols[name].allows(value):
                raise BundleError(f"{name}={value} cannot be: {name} is {manifest.symbols[name]}")
        several = tuple(sorted({int(value) for value in values}))
        known[name] = several if isinstance(sizes, Iterable) else several[0]
    known = {name: known[name] for name in manifest.symbols if name in known}
    missing = [name for name in manifest.symbols if name not in known]
    if not missing:
        return plan(known, wanted, False)
    if len(missing) > 1 or missing[0] not in held:
        name = next((name for name in missing if name not in held), missing[0])
        reason = "no array of the state has it" if name not in held else "there are two such"
        raise BundleError(
            f"the symbol {name} has no value, and memory cannot decide it ({reason}): give it, as "
            f"symbols={{{name!r}: 128}} or --symbols {name}=128; a batch may have several, by "
            "--batch_sizes 1,8,32"
        )
    if memory_share is not None and not 0 < memory_share <= 1:
        raise BundleError(f"the share of memory has to be above 0 and at most 1: {memory_share:g}")
    room = _room(mesh, options, memory_share)
    others = () if beside is None else (beside(),)
    return _Search(manifest, known, missing[0], mesh, room, plan, wanted, others).run()


class _Search:
    """Looks for the largest value of a symbol with which a bundle fits into memory.

    What is held follows from shapes. What functions need beside it is known of a value only once
    they are planned for it: a line through the last two plans tells what to plan next.
    """

    def __init__(
        self, manifest: Manifest, known: Mapping[str, Sizes], name: str, mesh: Mesh, room: int,
        plan: Plan, wanted: Sequence[str], others: Sequence[Held],
    ) -> None:  # fmt: skip
        self.manifest, self.known, self.name = manifest, known, name
        self.mesh, self.room, self.plan, self.wanted = mesh, room, plan, wanted
        self.others = others
        self.spare = SPARE if set(manifest.functions) - set(wanted) else 1.0
        self.symbol = _split_evenly(manifest, name, mesh)
        most = LARGEST if self.symbol.at_most is None else min(self.symbol.at_most, LARGEST)
        unit = self.symbol.multiple_of
        self.least, self.most = -(-self.symbol.at_least // unit), most // unit  # in units
        if self.most < self.least:
            raise BundleError(f"no value of {name} is {self.symbol}, as this mesh needs it")

    def run(self) -> PlannedBundle:
        """The plan for the largest value, or for one that is smaller by a percent or two.

        A few functions stand for all while the value is looked for, as planning one of a large
        model takes seconds. Should another one need more memory, it joins them.
        """
        few: Sequence[str] = heaviest(self.manifest, self.wanted)
        while True:
            found = self._search(few)
            whole = self.plan(found.symbols, self.wanted, True)
            placed = placements(whole.manifest, whole.emitted, self.mesh)
            value = whole.symbols[self.name]
            assert isinstance(value, int)  # the state has it
            held = self._held(value // self.symbol.multiple_of, placed)
            needs = self._needs(whole, placed)
            if set(few) >= set(self.wanted) or held + self.spare * max(needs.values()) <= self.room:
                break
            worst = whole.manifest.functions[max(needs, key=needs.__getitem__)]
            name = worst.origin.name if isinstance(worst, Variant) else worst.name
            few = [*few, name] if name not in few else self.wanted

        def more(name: str) -> Emitted:
            program = whole.more(name)
            (needed,) = self._needs(whole._replace(emitted={name: program}), placed).values()
            if held + needed > self.room:
                raise BundleError(
                    f"function {name} needs {bytes_text(needed)} of each device beside the "
                    f"{bytes_text(held)} that are held, and {bytes_text(self.room)} may be used; "
                    f"give a smaller {self.name}"
                )
            return program

        return whole._replace(room=self.room, more=more)

    def _search(self, names: Collection[str]) -> PlannedBundle:
        # Memory for 100, of which functions need 10 and more with larger values: 99 -> needed 14,
        # does not fit: 86 might     86 -> needed 13, fits, and the line says that 87 might: enough
        likely = self._largest(self._by_specs(), lambda _: 0)
        units = max(self.least, int(FIRST * likely) if likely < self.most else likely)
        best: PlannedBundle | None = None
        refusal: ArgumentError | None = None
        low, high = self.least - 1, self.most + 1  # fits, does not fit
        points: list[tuple[int, int]] = []
        for _ in range(ROUNDS):
            try:
                value = units * self.symbol.multiple_of
                planned = self.plan({**self.known, self.name: value}, names, True)
            except ArgumentError as error:  # a kernel does not take an array of this size
                refusal, high = error, units
                units = (low + high) // 2
                if units <= low:
                    break
                continue
            placed = placements(planned.manifest, planned.emitted, self.mesh)
            needed = int(self.spare * max(self._needs(planned, placed).values()))
            points = [*points[-1:], (units, needed)]
            fits = self._held(units, placed) + needed <= self.room
            if fits:
                low, best = units, planned
            else:
                high = units
            units = min(self._largest(placed, _line(points)), high - 1)
            if high - low <= 1 or (fits and units <= low + low // 64):
                break
            if units <= low or refusal:  # the line says nothing here: plans differ, kernels refuse
                units = (low + high) // 2
        if best is None:
            if refusal is not None:
                raise refusal
            held = self._held(self.least, placed)
            raise BundleError(
                f"there is no room for {self.name}={self.least * self.symbol.multiple_of}, the "
                f"least: weights and state take {bytes_text(held)} of each device and functions "
                f"{bytes_text(needed)}, and {bytes_text(self.room)} may be used; take more "
                "devices, a larger share of their memory, or export it smaller"
            )
        found = f"{self.name}={best.symbols[self.name]}"
        room, most = bytes_text(self.room), bytes_text(needed)
        _LOG.info(f"{found}: {room} of each device may be used, functions need {most}")
        return best

    def _by_specs(self) -> Placed:
        """Where weights and state lie as specs say; what the planner decides is not split."""
        sized = self.manifest.sized({**self.known, self.name: self.least * self.symbol.multiple_of})
        where, placed = jax_mesh(self.mesh.refined()), {}
        for leaf in (*sized.weights, *sized.state):
            fit = spec_for(leaf, sized.specs, self.mesh)
            entries = (None if entry is ... else entry for entry in (fit.spec if fit else ()))
            placed[leaf.path] = NamedSharding(where, PartitionSpec(*entries))
        return placed

    def _needs(self, planned: PlannedBundle, placed: Placed) -> dict[str, int]:
        """Bytes of a device that each function needs beside what is held: only one runs."""
        functions = planned.manifest.functions
        return {
            name: (program.peak_bytes or 0) - _bytes(functions[name].owned, placed)
            for name, program in planned.emitted.items()
        }

    def _largest(self, placed: Placed, needed: Callable[[int], float]) -> int:
        """The largest value with which what is held leaves as much as is needed."""
        low, high = self.least - 1, self.most
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._held(middle, placed) + needed(middle) <= self.room
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _held(self, units: int, placed: Placed) -> int:
        """Bytes of weights and state on a device, placed so."""
        known = {name: value for name, value in self.known.items() if isinstance(value, int)}
        values = {**known, self.name: units * self.symbol.multiple_of}
        total = 0
        for manifest, where in ((self.manifest, placed), *self.others):
            state = [
                dataclasses.replace(leaf, shape=sizes_of(leaf.shape, values))
                for leaf in manifest.state
            ]
            total += _bytes((*manifest.weights, *state), where)
        return total


def _line(points: Sequence[tuple[int, int]]) -> Callable[[int], float]:
    """The line through the last two points, which does not fall; through one, it is level."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = max(0.0, (y1 - y0) / (x1 - x0)) if x1 != x0 else 0.0
    return lambda x: y1 + slope * (x - x1)


def _bytes(leaves: Sequence[LeafEntry], placed: Placed) -> int:
    """Bytes of arrays on one device."""
    return sum(
        -(-math.prod(leaf.shape) // _parts(placed[leaf.path])) * np.dtype(leaf.dtype).itemsize
        for leaf in leaves
    )


def _parts(sharding: NamedSharding) -> int:
    """Into how many pieces an array is split."""
    axes = {axis for entry in sharding.spec if entry for axis in axes_of(entry)}
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


def _split_evenly(manifest: Manifest, name: str, mesh: Mesh) -> Symbol:
    """A symbol whose values the axes of specs divide, where it is a dim of the state."""
    symbol = manifest.symbols[name]
    parts = symbol.multiple_of
    for leaf in manifest.state:
        pattern = first_match(leaf.path, manifest.specs)
        spec = manifest.specs[pattern] if pattern is not None else ()
        for dim, entry in zip(leaf.shape, spec, strict=False):
            if dim == name:
                axes = axes_of(present(entry, mesh.shape))
                parts = math.lcm(parts, math.prod(mesh.shape[axis] for axis in axes))
    return Symbol(symbol.at_least, symbol.at_most, parts)


def too_much(
    planned: PlannedBundle, programs: Mapping[str, CompiledFunction], mesh: Mesh
) -> list[str]:
    """A sentence, where XLA takes more memory than there is room: sizes follow predictions."""
    if planned.room is None:
        return []
    placed = placements(planned.manifest, planned.emitted, mesh)
    held = _bytes((*planned.manifest.weights, *planned.manifest.state), placed)
    needed, name = max((_allocated(program), name) for name, program in programs.items())
    if held + needed <= planned.room:
        return []
    sizes = ", ".join(f"{symbol}={value}" for symbol, value in planned.symbols.items())
    return [
        f"{sizes} may be too much: XLA allocates {bytes_text(needed)} of each device for {name}, "
        f"beside the {bytes_text(held)} that are held, and {bytes_text(planned.room)} may be used; "
        "load it with a smaller memory_share, or give the size"
    ]


def _allocated(program: CompiledFunction) -> int:
    """Bytes of a device beside a function's arguments."""
    stats = program.executable.memory_analysis()
    if stats is None:  # not all backends tell
        return 0
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.temp_size_in_bytes + results)


# Memory


def take_gpu_memory(
    share: float | None = None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Has XLA take most of a GPU's memory unless the user said how much; before it has devices.

    A process that has a `share` leaves the rest to others.
    """
    if not any(name in environment for name in XLA_SHARES):
        environment[XLA_SHARES[0]] = str(min(XLA_SHARE, share or 1.0))


def _room(mesh: Mesh, options: Options, share: float | None) -> int:
    """Bytes of each device that a bundle may take: the least of all devices, on all processes."""
    devices = [d for d in jax_mesh(mesh).devices.flat if d.process_index == jax.process_index()]
    topology = options.topology or Topology.for_devices(list(jax_mesh(mesh).devices.flat))
    room = min(int(_left(device, topology, share)) for device in devices)
    if jax.process_count() > 1:  # MiB: arrays have 32 bits
        room = int(np.min(multihost_utils.process_allgather(np.int32(room >> 20)))) << 20
    return room


def _left(device: jax.Device, topology: Topology, share: float | None) -> float:
    if device.platform == "cpu":
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
        of_all = MEMORY_SHARE_ON_CPU if share is None else share
        return of_all * min(there, topology.hbm_bytes)
    told = device.memory_stats() or {}  # not all devices tell
    there = min(told.get("bytes_limit", topology.hbm_bytes), topology.hbm_bytes)
    used = told.get("bytes_in_use", 0)
    most = topology.hbm_bytes if share is None else share * topology.hbm_bytes
    return float(min(most, MEMORY_SHARE * there) - used)

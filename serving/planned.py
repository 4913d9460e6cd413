"""Finds how to serve a model on machines that are not here: `spmd plan --serve`.

A model is a named one (llama2-7b), a config.json, or the folder of a Llama's bundle. For each mesh
of a machine, quantization and number of slots, the model's step functions are planned for the
machine, and priced; then the engine's own scheduler meets the traffic on a clock of its own, with
steps that take the predicted times. Nothing runs. Targets decide how many machines there are.

Traffic is one of streams, wide, long, prefix, one (as of benchmarks/run loads), a .jsonl file of
requests, or lengths in tokens with clients (at_once) or requests a second (rate), in groups by
`requests`, and with tokens that all prompts begin with (common):

    spmd plan --serve llama2-7b h200:1 --traffic streams
    spmd plan --serve llama3.1-8b h200:1 v6e:2x4 --price h200=3.5,v6e=2.7 \\
        --traffic prompt=245-445,answer=64-256,rate=40 --first_token 500,2000 --between 50
    spmd plan --serve llama3.1-70b h200:4 --quantize none,fp8 --traffic monday.jsonl

Exit status: 0; 1 if nothing fits and meets the targets; 2 for flags that cannot be used.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import spmd
from spmd.cli.flags import Parser, positive, words
from spmd.cli.plan import prices
from spmd.cli.specs import default_to_cpus
from spmd.errors import ArgumentError, SpmdError
from spmd.explain import words as w
from spmd.ir.dialect.composites import arguments_of
from spmd.lowering.emit import Emitted
from spmd.models import decode
from spmd.models.decode.shape import ServingShape, default_rows
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.planned import config_of
from spmd.models.llama.quantize import QUANTIZATIONS, quantized_types
from spmd.ops.paged import ATTENTION
from spmd.predict.ops import arithmetic_seconds
from spmd.predict.timeline import Slot, predict_timeline
from spmd.progress import doing, progress
from spmd.serving.bundle.folder import read_manifest
from spmd.serving.bundle.manifest import MANIFEST, Entrypoint
from spmd.serving.bundle.memory import described
from spmd.serving.bundle.programs import FunctionKey, lowered_of, static_module
from spmd.serving.bundle.symbols import MEMORY_SHARE, SPARE, XLA_SHARE, planner
from spmd.serving.engine.backend import Limits
from spmd.serving.language_bundle import SMALL, check_shape
from spmd.serving.simulated import (
    LOADS,
    LayersSeconds,
    OfferedLoad,
    SimulatedLoad,
    StepTimes,
    fewest_machines,
    simulate,
)

KEEPS_UP = 0.05
"""Share of the requests at a rate that may wait for a slot when the last one comes."""

SLOTS = (16, 64, 256)

MOST_MACHINES = 64


class ServingModel(NamedTuple):
    """What is to be served."""

    name: str
    config: LlamaConfig
    quantize: str | None = None  # None leaves it open
    shape: ServingShape | None = None  # that of a bundle

    @staticmethod
    def named(name: str) -> "ServingModel":
        """That of a bundle's folder, or a model as `spmd plan` knows it.

        ArgumentError: a bundle that is not a Llama's.
        """
        fields: dict[str, Any] = {"scan_layers": False}
        if not (Path(name) / MANIFEST).is_file():
            fields |= {"dtype": "bfloat16", "param_dtype": "bfloat16"}
            return ServingModel(name, dataclasses.replace(config_of(name), **fields))
        manifest = read_manifest(name)
        facts, shape = manifest.contract.get("model", {}), manifest.contract.get("shape", {})
        try:
            config = LlamaConfig(**{**facts, **fields})
            lists = {n: tuple(shape[n]) for n in ("rows", "lengths")}
            kind = (manifest.quantization or {"kind": "none"})["kind"]
            return ServingModel(name, config, kind, ServingShape(**{**shape, **lists}))
        except (TypeError, KeyError) as error:
            raise ArgumentError(
                f"{name} is no bundle of a Llama: {error}",
                fix="name a model, a config.json, or a folder that export_llama made",
            ) from error


class StepCosts(NamedTuple):
    """A step of a model, on one device; sums over layers, so that two are a third's difference."""

    seconds: float  # of what a greedy step does, but for attention
    longest: float  # the same with filters and alternatives, as a server's scheduler is told
    bytes: float  # at its peak, but for the cache
    page_bytes: float  # of a page of the cache
    reads: Mapping[float, float]  # reach -> seconds to read a position's keys and values
    pairs: Mapping[float, float]  # reach -> seconds for a row and a position

    def more(self, layers: float, first: "StepCosts") -> "StepCosts":
        """That of so many more layers, where it has one more than `first`."""

        def at(a: Any, b: Any) -> Any:
            if isinstance(a, Mapping):
                return {reach: at(a.get(reach, 0.0), value) for reach, value in b.items()}
            return b + layers * (b - a)

        return StepCosts(*map(at, first, self))


@functools.cache
def step_costs(
    config: LlamaConfig, quantize: str, topology: spmd.Topology, shape: ServingShape
) -> Mapping[int, StepCosts]:
    """Rows -> costs, of steps that are planned for a machine: as `load_bundle` plans them."""
    types = quantized_types(config, quantize)
    found, state, specs, primary = decode.functions(LlamaRows(config), shape, types)
    found = [one for one in found if one.tags["kind"] == "step"]
    mesh = spmd.make_mesh(
        data=shape.groups, model=topology.count // shape.groups, topology=topology
    )
    manifest, traced = described(
        found, topology.platform or "cpu", types, {**specs, **SMALL}, state, primary
    )
    lowered: dict[str, spmd.Lowered] = {}

    def lower(entry: Entrypoint, asked: FunctionKey) -> Emitted:
        doing(f"{entry.name}, {config.num_hidden_layers} layers, {mesh} of {topology}")
        module = static_module(traced(entry.name), entry, asked)
        lowered[entry.name] = lowered_of(module, mesh.refined(), asked, spmd.Options())
        return lowered[entry.name].stages.emitted.major_to_minor()

    pages = shape.pages_of_slot
    names = {int(one.tags["rows"]): one.name for one in found}
    planner(manifest, mesh, lower)({decode.PAGES: pages}, list(names.values()), "fill")
    return {rows: _costs(lowered[name], topology, pages) for rows, name in names.items()}


def _costs(lowered: spmd.Lowered, topology: spmd.Topology, pages: int) -> StepCosts:
    stages = lowered.stages
    greedy = predict_timeline(stages.optimized.program, stages.plan.mesh, topology, least=True)
    reads, pairs, page_bytes = dict[float, float](), dict[float, float](), 0.0
    for slot in filter(_is_attention, greedy.slots):
        queries, pool, table = slot.op.kind.operands[:3]
        reach = table.shape[2] * pool.shape[2]
        reach = min(reach, int(arguments_of(slot.op.kind).get("window", reach)))
        a_page = sum(t.bytes for t in (pool, *slot.op.kind.operands[6:])) / pool.shape[1]
        read = a_page / pool.shape[2] / topology.hbm_bandwidth
        pair = arithmetic_seconds(slot.op.kind, topology) / (queries.shape[1] * reach)
        reads[reach] = reads.get(reach, 0.0) + read * slot.trips
        pairs[reach] = pairs.get(reach, 0.0) + pair * slot.trips
        page_bytes += a_page * slot.trips
    seconds, longest = (
        line.seconds - sum(s.seconds * s.trips for s in line.slots if _is_attention(s))
        for line in (greedy, lowered.timeline)
    )
    held = lowered.predicted_memory.peak - pages * page_bytes
    return StepCosts(seconds, longest, held, page_bytes, reads, pairs)


def _is_attention(slot: Slot) -> bool:
    return slot.op.kind.attrs.get("name") == ATTENTION


@dataclasses.dataclass(frozen=True)
class ServingSetup:
    """One way to serve a model on one machine, priced.

    Attributes:
      pages: of a group; 0 if the model does not fit.
      bytes: of one device at most.
    """

    model: ServingModel
    topology: spmd.Topology
    quantize: str
    shape: ServingShape
    times: StepTimes
    pages: int
    bytes: float
    price: float | None

    @staticmethod
    def of(
        model: ServingModel, topology: spmd.Topology, quantize: str, shape: ServingShape,
        price: float | None = None,
    ) -> "ServingSetup":  # fmt: skip
        """Plans a few steps of a few layers; other sizes lie on lines between them."""
        check_shape(shape)
        config, slots = model.config, shape.slots_of_group
        few = {1, next(n for n in shape.rows if n >= slots), *shape.rows[-1:]}
        few |= {n for n in shape.rows if n == 1024}
        # Layers that are alike count as often as there are some, others are planned as they are.
        layers, alike = config.num_hidden_layers, len(config.window_spans) == 1
        counts = (1, 2) if alike and layers > 2 else (layers,)
        planned = shape._replace(rows=tuple(sorted(few)), lengths=(shape.max_length,))
        made = [
            step_costs(
                dataclasses.replace(config, num_hidden_layers=n), quantize, topology, planned
            )
            for n in counts
        ]
        costs = {rows: made[-1][rows].more(layers - counts[-1], made[0][rows]) for rows in few}
        some = costs[shape.rows[-1]]
        # What a server takes of a device's memory, and what it keeps for later functions.
        share = MEMORY_SHARE * (float(XLA_SHARE) if topology.platform == "cuda" else 1.0)
        held = SPARE * max(one.bytes for one in costs.values())
        room = share * topology.hbm_bytes - held
        pages = int(min(room // some.page_bytes, slots * shape.pages_of_slot))
        pages = pages if pages >= shape.pages_of_slot else 0
        rows, known = shape.rows, sorted(costs)
        seconds, longest = (
            np.interp(rows, known, [getattr(costs[n], field) for n in known]).tolist()
            for field in ("seconds", "longest")
        )
        attention = [LayersSeconds(some.reads[n], some.pairs[n], n) for n in some.reads]
        # As `language_backend.step_seconds` says it: all rows see all that their tables reach.
        for i, n in enumerate(rows):
            seen = min(min(n, slots) * shape.max_length, pages * shape.page)
            each = [(a.pair * n * min(a.reach, shape.max_length), a.read * seen) for a in attention]
            longest[i] += sum(max(0.0, pairs - read) for pairs, read in each)
        told = dict(zip(rows, longest, strict=True))
        times = StepTimes(dict(zip(rows, seconds, strict=True)), told, attention)
        total = max(one.bytes for one in costs.values()) + pages * some.page_bytes
        return ServingSetup(model, topology, quantize, shape, times, pages, total, price)

    @property
    def limits(self) -> Limits:
        """As the engine knows them; without drafts."""
        shape = self.shape
        sizes = shape.slots, shape.max_length, shape.rows, shape.groups, shape.page, self.pages
        return Limits(
            *sizes, top_logprobs=shape.top_logprobs, vocab_size=self.model.config.vocab_size
        )

    def serve(self, load: OfferedLoad, machines: int) -> SimulatedLoad:
        """What clients see of so many machines that share a load."""
        shares = (load.share(i, machines) for i in range(machines))
        return SimulatedLoad.of(
            simulate(share, self.limits, self.times) for share in shares if share.requests
        )


class Targets(NamedTuple):
    """Milliseconds at most, of p50 and p99."""

    first: tuple[float, float] = (float("inf"),) * 2
    gap: tuple[float, float] = (float("inf"),) * 2

    def are_met(self, load: SimulatedLoad) -> bool:
        """Whether they are, and the machines keep up."""
        first = zip((50, 99), self.first, strict=True)
        gap = zip((50, 99), self.gap, strict=True)
        met = all(load.first_ms(p) <= most for p, most in first)
        return met and all(load.gap_ms(p) <= most for p, most in gap) and load.late <= KEEPS_UP


class ServingRow(NamedTuple):
    """A setup, how many machines it takes, and what clients see."""

    setup: ServingSetup
    machines: int
    load: SimulatedLoad
    is_met: bool

    @property
    def devices(self) -> int:
        """Of all machines."""
        return self.setup.topology.count * self.machines

    @property
    def cost(self) -> float | None:
        """What a million tokens of answers cost, if the price is known."""
        price = self.setup.price
        return None if price is None else price * self.devices / self.load.rate / 3600 * 1e6

    def order(self) -> tuple[bool, float, float]:
        """What rows are sorted by: targets, then cost or devices, then tokens/s."""
        cost = self.cost
        return not self.is_met, self.devices if cost is None else cost, -self.load.rate

    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        setup, load, cost = self.setup, self.load, self.cost
        mesh = f"data={setup.shape.groups}, model={setup.topology.count // setup.shape.groups}"
        return (
            str(setup.topology), mesh, setup.quantize, str(setup.shape.slots), f"{setup.pages:,}",
            str(self.machines), f"{load.rate:,.0f}",
            f"{load.first_ms(50):,.0f} / {load.first_ms(99):,.0f}",
            f"{load.gap_ms(50):.1f} / {load.gap_ms(99):.1f}", w.bytes_text(round(setup.bytes)),
            "yes" if self.is_met else "no", "-" if cost is None else f"{cost:.3g}",
        )  # fmt: skip


HEADS = (
    "machine", "mesh", "weights", "slots", "pages", "machines", "tokens/s", "first token, ms",
    "between, ms", "memory", "enough", "cost/M",
)  # fmt: skip


def setups(given: argparse.Namespace, load: OfferedLoad) -> list[partial[ServingSetup]]:
    """All that is weighed: machines x meshes x quantizations x slots."""
    model, found = ServingModel.named(given.model), list[partial[ServingSetup]]()
    page = model.shape.page if model.shape else given.page
    longest = -(-max(load.longest, given.max_length or 0) // page) * page
    for name in given.machines:
        topology = spmd.Topology(name)
        priced = (name, topology.name, topology.chip.name)
        price = next((given.price[each] for each in priced if each in given.price), None)
        usual = [next((n for n in SLOTS if n >= load.at_once), SLOTS[-1])]
        for across in given.model_axis or range(1, topology.count + 1):
            if topology.count % across or model.config.num_attention_heads % across:
                continue
            groups = topology.count // across
            for slots in given.slots or ([SLOTS[-1]] if not load.at_once else usual):
                shape = model.shape or ServingShape(
                    slots, longest, given.rows or default_rows(max(slots // groups, 1), longest),
                    (longest,), page, groups, cache_dtype=given.cache_dtype,
                )  # fmt: skip
                if shape.groups != groups or shape.slots % groups:
                    continue
                for kind in [model.quantize] if model.quantize else given.quantize:
                    found.append(partial(ServingSetup.of, model, topology, kind, shape, price))
    if not found:
        raise ArgumentError(
            f"no mesh of {', '.join(given.machines)} can serve {given.model} so",
            fix="name other machines, --slots that groups divide, or leave --model_axis out",
        )
    return found


def _pair(text: str) -> tuple[float, float]:
    """Parses `500,2000` as p50 and p99, `2000` as p99 alone."""
    first, _, last = text.partition(",")
    return (float(first), float(last)) if last else (float("inf"), float(first))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part) for part in text.split(",")}))


def _kinds(text: str) -> tuple[str, ...]:
    if unknown := [kind for kind in words(text) if kind not in QUANTIZATIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not among {', '.join(QUANTIZATIONS)}")
    return words(text)


def make_parser() -> Parser:
    """Returns the parser of the flags of `spmd plan --serve`."""
    made = Parser("spmd plan --serve", __doc__)
    add = made.add_argument
    add("model", help="a model's name, config.json, or the folder of a Llama's bundle")
    add("machines", nargs="+", help="what to plan for, as h200:1, v6e:2x4")
    add("--traffic", default="streams", help=f"what is asked for: {', '.join(LOADS)}, ...")
    add("--first_token", type=_pair, help="target: ms until it, p50,p99 or p99")
    add("--between", type=_pair, help="target: ms between tokens, p50,p99 or p99")
    add("--quantize", type=_kinds, default=("none",), help="weights, as none,int8,fp8,int4")
    add("--slots", type=_numbers, help="sequences that run together (256, or as clients need)")
    add("--model_axis", type=_numbers, help="devices that share a layer (all that divide)")
    add("--rows", type=_numbers, help="of steps, as of scripts/export_llama")
    add("--max_length", type=positive, help="tokens of a sequence (the longest of the traffic)")
    add("--page", type=positive, default=64, help="tokens of a page of the cache")
    add("--cache_dtype", default="bfloat16", help="of keys and values, or int8")
    add("--price", type=prices, default={}, help="of a device an hour, as v6e=2.7,h200=3.5")
    add("--most_machines", type=positive, default=MOST_MACHINES, help="that share the traffic")
    add("--top", type=positive, default=10, help="so many rows of the table")
    return made


def plan_serving(given: argparse.Namespace) -> tuple[list[ServingRow], list[str]]:
    """Plans, prices and serves each setup: (the best first, why others are left out)."""
    load = OfferedLoad.read(given.traffic)
    none = Targets()
    targets = Targets(given.first_token or none.first, given.between or none.gap)
    rows, refused = list[ServingRow](), list[str]()
    with progress(f"plans of {given.model}", True):
        for make in setups(given, load):
            setup = make()
            where = f"{setup.topology}, data={setup.shape.groups}, {setup.quantize}"
            if load.longest > setup.limits.longest:
                held = f"a pool of {setup.pages:,} pages holds {setup.limits.longest:,} tokens"
                refused.append(f"{where}: {held}, and a sequence has {load.longest:,}")
                continue
            found = fewest_machines(
                partial(setup.serve, load), targets.are_met, given.most_machines
            )
            rows.append(ServingRow(setup, *found))
    return sorted(rows, key=ServingRow.order), refused


def main(arguments: Sequence[str]) -> int:
    """Runs `spmd plan --serve` with these flags and returns its exit status."""
    given = make_parser().parse_args(arguments)
    default_to_cpus()
    started = time.monotonic()
    try:
        rows, refused = plan_serving(given)
    except (SpmdError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    took = time.monotonic() - started
    print(f"serving {given.model}, {given.traffic}: {w.plural(len(rows), 'setup')} in {took:.0f} s")
    lines = [HEADS, *(row.cells() for row in rows[: given.top])]
    print("\n".join([*w.aligned(lines, range(3, len(HEADS))), *refused]))
    if not rows:
        return 1
    best = rows[0].setup
    shape, flags = (
        best.shape,
        f"--mesh data={best.shape.groups},model={best.topology.count // best.shape.groups}",
    )
    sizes = ",".join(map(str, shape.rows))
    print(
        f"\nbest: export_llama --slots {shape.slots} --groups {shape.groups} --rows {sizes} "
        f"--max_length {shape.max_length} --quantize {best.quantize}; serve {flags}, on "
        f"{w.plural(rows[0].machines, 'machine')}"
    )
    return 0 if rows[0].is_met else 1

r"""Finds how to serve a model on machines that are not here: `spmd plan --serve`.

A model is a named one (llama2-7b), a config.json, or the folder of a Llama's bundle. For each mesh,
quantization and number of slots, the model's step functions are planned for the machine, and
priced; then the engine's own scheduler meets the traffic on a clock of its own, in steps that take
the predicted times, greedy and without drafts. Targets decide how many machines share the traffic.

Traffic is streams, wide, long, prefix or one (loads of benchmarks/run loads); a .jsonl file of
requests; or lengths in tokens, with clients (at_once) or requests a second (rate), and if need be
`requests`, and the tokens with which all prompts begin (common).

Examples:
    spmd plan --serve llama2-7b h200:1 --traffic streams
    spmd plan --serve llama3.1-8b h200:1 v6e:2x4 --price h200=3.5,v6e=2.7 \
        --traffic prompt=245-445,answer=64-256,rate=40 --first_token 500,2000 --between 50
    spmd plan --serve llama3.1-70b h200:4 --quantize none,fp8 --traffic monday.jsonl

Exit status: 0; 1 if nothing fits and meets the targets; 2 for flags that cannot be used.
"""

import argparse
import bisect
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.cli.flags import Parser, numbers, positive, words
from spmd.cli.plan import prices
from spmd.cli.specs import default_to_cpus
from spmd.errors import ArgumentError, SpmdError
from spmd.explain import words as w
from spmd.lowering.emit import Emitted
from spmd.models import decode
from spmd.models.decode.shape import ServingShape, default_rows, usual_turns
from spmd.models.llama.config import DTYPES, LlamaConfig
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.planned import config_of
from spmd.models.llama.quantize import QUANTIZATIONS, quantized_types
from spmd.ops.paged import ATTENTION
from spmd.predict.ops import arithmetic_seconds
from spmd.predict.timeline import COMPUTE, predict_timeline
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
    OfferedLoad,
    SimulatedLoad,
    StepTimes,
    read_load,
    simulate,
)

KEEPS_UP = 0.05
"""Share of the requests at a rate that may wait for a slot when the last one comes."""

MOST_MACHINES = 64

Costs = Mapping[str, float]
"""Of a step on one device: `seconds` and `longest` (with all ways to draw), both without attention;
`bytes` at the peak without the cache, `page` of the cache; `read` and `pair` as of `StepTimes`."""


@functools.cache
def step_costs(
    config: LlamaConfig, quantize: str, topology: spmd.Topology, shape: ServingShape
) -> Mapping[int, Costs]:
    """Rows of a step -> costs, of steps that are planned for a machine as a server plans them."""
    types = quantized_types(config, quantize)
    functions, state, specs, primary = decode.functions(LlamaRows(config), shape, types)
    steps = {int(f.tags["rows"]): f for f in functions if f.tags["kind"] == "step"}
    across, pages = topology.count // shape.groups, shape.pages_of_slot
    mesh = spmd.make_mesh(data=shape.groups, model=across, topology=topology)
    told = types, {**specs, **SMALL}, state, primary
    manifest, traced = described(list(steps.values()), topology.platform or "cpu", *told)
    lowered: dict[str, spmd.Lowered] = {}

    def lower(entry: Entrypoint, asked: FunctionKey) -> Emitted:
        doing(f"{entry.name} of {config.num_hidden_layers} layers, {mesh} of {topology}")
        module = static_module(traced(entry.name), entry, asked)
        lowered[entry.name] = lowered_of(module, mesh.refined(), asked, spmd.Options())
        return lowered[entry.name].stages.emitted.major_to_minor()

    names = [function.name for function in steps.values()]
    planner(manifest, mesh, lower)({decode.PAGES: pages}, names, True)
    leaves = jax.tree.leaves(LlamaRows(config).cache_leaves(shape._replace(groups=1), 1))
    page = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)
    page /= min(across, config.kv_heads)
    return {rows: _costs(lowered[f.name], topology, pages, page) for rows, f in steps.items()}


def _costs(lowered: spmd.Lowered, topology: spmd.Topology, pages: int, page: float) -> Costs:
    stages, costs = lowered.stages, {"page": page, "read": 0.0, "pair": 0.0}
    greedy = predict_timeline(stages.optimized.program, stages.plan.mesh, topology, least=True)
    for name, line in (("seconds", greedy), ("longest", lowered.timeline)):
        attention = [s for s in line.slots if s.op.kind.attrs.get("name") == ATTENTION]
        costs[name] = line.seconds - sum(s.seconds * s.trips for s in attention)
    kernels = (slot.trips for slot in greedy.slots if slot.lane == COMPUTE and not slot.op.regions)
    costs["seconds"] += topology.chip.kernel * sum(kernels)  # the scheduler is told nothing of it
    # All rows are taken to see all that their slots hold: of windows nothing is known. Where there
    # is no kernel for attention, it counts among the rest, with tables as long as they can be.
    for slot in attention:
        queries, pool, table = slot.op.kind.operands[:3]
        pairs = queries.shape[1] * table.shape[2] * pool.shape[2]
        read = sum(t.bytes for t in (pool, *slot.op.kind.operands[6:])) / math.prod(pool.shape[1:3])
        costs["pair"] += slot.trips * arithmetic_seconds(slot.op.kind, topology) / pairs
        costs["read"] += slot.trips * read / topology.hbm_bandwidth
    costs["bytes"] = lowered.predicted_memory.peak - pages * page
    return costs


class ServingSetup(NamedTuple):
    """One way to serve a model on one machine, priced."""

    topology: spmd.Topology
    quantize: str
    shape: ServingShape
    limits: Limits  # with no pages if the model does not fit
    times: StepTimes
    bytes: float  # of one device at most
    price: float | None = None  # of a device an hour


def serving_setup(
    config: LlamaConfig, topology: spmd.Topology, quantize: str, shape: ServingShape,
    price: float | None = None,
) -> ServingSetup:  # fmt: skip
    """Plans few steps, of one layer and of two: other sizes lie on lines between them."""
    check_shape(shape)
    slots, longest = shape.slots_of_group, shape.max_length
    few = {shape.rows[0], next(n for n in shape.rows if n >= slots), shape.rows[-1]}
    rows = tuple(n for n in shape.rows if n in few or n == 1024)
    planned = shape._replace(rows=rows, lengths=(longest,))
    layers = config.num_hidden_layers
    counts = (1, 2) if len(config.window_spans) == 1 and layers > 2 else (layers, layers)
    first, second = (
        step_costs(dataclasses.replace(config, num_hidden_layers=n), quantize, topology, planned)
        for n in counts
    )
    more = layers - counts[1]
    costs = [{k: x + more * (x - first[n][k]) for k, x in second[n].items()} for n in rows]
    # What a server takes of a device's memory, and keeps for functions that it plans later.
    share = MEMORY_SHARE * (XLA_SHARE if topology.platform == "cuda" else 1)
    largest = max(cost["bytes"] for cost in costs)
    page, read, pair = (costs[-1][of] for of in ("page", "read", "pair"))
    room = int((share * topology.hbm_bytes - SPARE * largest) // page)
    pages = min(room, slots * shape.pages_of_slot) if room >= shape.pages_of_slot else 0
    seconds, told = (
        dict(zip(shape.rows, map(float, line), strict=True))
        for of in ("seconds", "longest")
        for line in [np.interp(shape.rows, rows, [cost[of] for cost in costs])]
    )
    for n in told:  # as `language_backend.step_seconds` has it: all rows see all of their tables
        seen = min(min(n, slots) * longest, pages * shape.page)
        told[n] += max(0.0, pair * n * longest - read * seen)
    limits = Limits(
        shape.slots, longest, shape.rows, shape.groups, shape.page, pages, shape.top_logprobs,
        config.vocab_size, turns=shape.turns,
    )  # fmt: skip
    times = StepTimes(seconds, told, read, pair)
    held = largest + max(pages, shape.pages_of_slot) * page
    return ServingSetup(topology, quantize, shape, limits, times, held, price)


def read_model(name: str) -> tuple[LlamaConfig, str | None, ServingShape | None]:
    """A model; of a bundle also its quantization and its sizes. ArgumentError: it is no Llama."""
    if not (Path(name) / MANIFEST).is_file():
        fields: Any = {"dtype": "bfloat16", "param_dtype": "bfloat16", "scan_layers": False}
        return dataclasses.replace(config_of(name), **fields), None, None
    manifest = read_manifest(name)
    try:
        config = LlamaConfig(**{**manifest.contract["model"], "scan_layers": False})
        shape = manifest.contract["shape"]
        shape = ServingShape(**{**shape, **{n: tuple(shape[n]) for n in ("rows", "lengths")}})
        return config, (manifest.quantization or {"kind": "none"})["kind"], shape
    except (TypeError, KeyError) as error:
        fix = "name a model, a config.json, or a folder that export_llama made"
        raise ArgumentError(f"{name} is no bundle of a Llama: {error}", fix=fix) from error


def setups(given: argparse.Namespace, load: OfferedLoad) -> Iterator[ServingSetup]:
    """Plans machines x meshes x slots x quantizations."""
    config, quantized, exported = read_model(given.model)
    most = max(given.max_length or 0, max(len(one.prompt) + one.answer for one in load.requests))
    longest = -(-most // given.page) * given.page
    usual = next((n for n in (16, 64) if 0 < load.at_once <= n), 256)
    for name in given.machines:
        topology = spmd.Topology(name)
        known = (given.price.get(n) for n in (name, topology.name, topology.chip.name))
        price = next((each for each in known if each is not None), None)
        for across in given.model_axis or range(1, topology.count + 1):
            groups = topology.count / across
            if not groups.is_integer() or config.num_attention_heads % across:
                continue
            for slots in given.slots or [usual]:
                rows = default_rows(max(slots // int(groups), 1), longest)
                shape = exported or ServingShape(
                    slots, longest, rows, (longest,), given.page, int(groups),
                    cache_dtype=given.cache_dtype, turns=usual_turns(config.parameter_count()),
                )  # fmt: skip
                for kind in (quantized,) if quantized else given.quantize:
                    if shape.groups == groups and not shape.slots % shape.groups:
                        yield serving_setup(config, topology, kind, shape, price)


HEADS = (
    "machine", "mesh", "weights", "slots", "pages", "memory", "machines", "tokens/s",
    "first token, ms", "between, ms", "targets", "cost/M",
)  # fmt: skip


class ServingRow(NamedTuple):
    """A setup, how many machines it takes, and what clients see."""

    setup: ServingSetup
    machines: int
    load: SimulatedLoad
    is_enough: bool

    def order(self) -> tuple[bool, float, float]:
        """What rows are sorted by: targets, then what a million tokens cost, or tokens/s."""
        devices = self.setup.topology.count * self.machines
        each = self.load.seconds * devices / self.load.tokens / 3600 * 1e6
        cost = math.inf if self.setup.price is None else self.setup.price * each
        return not self.is_enough, cost, each

    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        setup, shape, cost = self.setup, self.setup.shape, self.order()[1]
        across = setup.topology.count // shape.groups
        figures = "{:,.0f} / {:,.0f}|{:.1f} / {:.1f}".format(*self.load.figures()).split("|")
        return (
            str(setup.topology), f"data={shape.groups}, model={across}", setup.quantize,
            str(shape.slots), f"{setup.limits.pages:,}", w.bytes_text(round(setup.bytes)),
            str(self.machines), f"{self.load.tokens / self.load.seconds:,.0f}", *figures,
            "met" if self.is_enough else "missed", "-" if math.isinf(cost) else f"{cost:.3g}",
        )  # fmt: skip


def fewest_machines(
    serve: Callable[[int], SimulatedLoad], is_enough: Callable[[SimulatedLoad], bool]
) -> tuple[int, SimulatedLoad, bool]:
    """How many machines are enough, what they do, and whether they are; one if no number is."""
    most = 1
    while most < MOST_MACHINES and not is_enough(serve(most)):
        most *= 2
    counts = range(most // 2 + 1, most + 1)
    found = bisect.bisect_left(counts, True, key=lambda count: is_enough(serve(count)))
    count = counts[found] if found < len(counts) else 1
    return count, serve(count), found < len(counts)


def plan_serving(given: argparse.Namespace) -> tuple[list[ServingRow], list[str]]:
    """Plans, prices and serves each setup: (the best first, why others are left out)."""
    load, rows, refused = read_load(given.traffic), list[ServingRow](), list[str]()
    targets = (*given.first_token, *given.between)

    def is_enough(seen: SimulatedLoad) -> bool:
        pairs = zip(seen.figures(), targets, strict=True)
        return seen.late <= KEEPS_UP and all(figure <= most for figure, most in pairs)

    with progress(f"plans of {given.model}", True):
        for setup in setups(given, load):
            try:
                serve = functools.cache(functools.partial(simulate, load, *setup[3:5]))
                rows.append(ServingRow(setup, *fewest_machines(serve, is_enough)))
            except ValueError as error:  # a sequence that the pool cannot hold
                memory = w.bytes_text(setup.topology.hbm_bytes)
                needs = f"needs {w.bytes_text(round(setup.bytes))} of {memory}"
                where = f"{setup.topology}, data={setup.shape.groups}, {setup.quantize}"
                refused.append(f"{where}: {needs}, {setup.limits.pages} pages: {error}")
    return sorted(rows, key=ServingRow.order), refused


def _target(text: str) -> tuple[float, float]:
    p50, _, p99 = text.rpartition(",")  # of "2000" the latter
    return float(p50 or math.inf), float(p99)


def kinds(text: str) -> tuple[str, ...]:
    """Parses `none,fp8`."""
    if unknown := [kind for kind in words(text) if kind not in QUANTIZATIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not among {', '.join(QUANTIZATIONS)}")
    return words(text)


def make_parser() -> Parser:
    """Returns the parser of the flags of `spmd plan --serve`."""
    made, none = Parser("spmd plan --serve", __doc__), (math.inf, math.inf)
    add = made.add_argument
    add("model", help="a model's name, config.json, or the folder of a Llama's bundle")
    add("machines", nargs="+", help="what to plan for, as h200:1, v6e:2x4")
    add("--traffic", default="streams", help=f"what is asked for: {', '.join(LOADS)}, ...")
    add("--first_token", type=_target, default=none, help="target: ms until it, p50,p99 or p99")
    add("--between", type=_target, default=none, help="target: ms between tokens, p50,p99 or p99")
    add("--quantize", type=kinds, default="none", help="weights, as none,int8,fp8,int4")
    add("--slots", type=numbers, help="sequences that run together (256, or as clients need)")
    add("--model_axis", type=numbers, help="devices that share a layer (all that divide)")
    add("--max_length", type=positive, help="tokens of a sequence (the longest of the traffic)")
    add("--page", type=positive, default=64, help="tokens of a page of the cache")
    add("--cache_dtype", choices=(*DTYPES, "int8"), default="bfloat16", help="of keys and values")
    add("--price", type=prices, default={}, help="of a device an hour, as v6e=2.7,h200=3.5")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs `spmd plan --serve` with these flags and returns its exit status."""
    given, started = make_parser().parse_args(arguments), time.monotonic()
    default_to_cpus()
    try:
        rows, refused = plan_serving(given)
    except (SpmdError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not rows:
        why = refused or [f"no mesh of {', '.join(given.machines)} has these sizes"]
        print(f"error: {given.model} cannot be served so", *why, sep="\n", file=sys.stderr)
        return 1
    tried = f"{w.plural(len(rows), 'setup')} in {time.monotonic() - started:.0f} s"
    lines = w.aligned([HEADS, *(row.cells() for row in rows)], range(3, len(HEADS)))
    shape, (_, mesh, kind, *_) = rows[0].setup.shape, rows[0].cells()
    flags = f"--slots {shape.slots} --groups {shape.groups} --max_length {shape.max_length}"
    flags += f" --rows {','.join(map(str, shape.rows))} --quantize {kind}"
    flags += f" --cache_dtype {shape.cache_dtype}"
    print(f"{given.model}, {given.traffic}: {tried}", *lines, *refused, "", sep="\n")
    print(f"best: export_llama {flags}; serve --mesh {mesh.replace(' ', '')}")
    return 0 if rows[0].is_enough else 1

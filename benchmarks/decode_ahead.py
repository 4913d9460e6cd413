"""The steps of a served Llama for a TPU slice that is not here: time, bytes, memory, copies.

Programs are those that a server runs (`spmd.models.decode`), tensor parallel over the slice, with
jax's kernel for attention. They are compiled with libtpu (`tpu` extra), half a minute for each, for
2 and for 4 layers; figures of the whole model are these and as much as the 2 more take for all
others. Every slot holds `--context` tokens; a step of R rows has one of each slot, and behind
these a prompt's. Nothing runs.

`greedy` is a step in which all draw the likeliest token, `drawn` one with every way of drawing and
with likeliest tokens beside (the branches that the TPU compiler's cycles make the longest are not
looked for: those that move the most bytes are taken). Their milliseconds are the kernels' by the
compiler's cycles, attention's by the bytes that it reads, and what is waited for of collectives,
by our figures of the links. Kernels whose weights are read ahead have no cycles for that: what
reading weights and cache takes at least is its own column, and a step takes the larger of the two.

Example:
    benchmarks/run decode_ahead --rows 8b-v5e --steps 64
"""

import dataclasses
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if "jax" not in sys.modules:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks.hlo.modelled import Modelled, modelled
from benchmarks.hlo.read import array_bytes, arrays
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, positive, words
from spmd.lowering.ahead import devices_ahead
from spmd.lowering.emit import Emitted
from spmd.lowering.execute import Outside, compile_emitted
from spmd.measure.hlo import Instruction, parse_module_text
from spmd.mesh.spec import jax_mesh
from spmd.models import decode
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.quantize import quantized_types
from spmd.serving.bundle.manifest import Entrypoint
from spmd.serving.bundle.memory import described
from spmd.serving.bundle.programs import FunctionKey, lowered_of, static_module
from spmd.serving.bundle.symbols import planner


class Setup(NamedTuple):
    """One model on one slice."""

    model: str  # named config
    quantize: str  # of weights
    topology: str  # the slice
    slots: int  # sequences that decode


ROWS = {
    "8b-v5e": Setup("llama3.1-8b", "none", "v5e:2x4", 256),
    "8b-v6e": Setup("llama3.1-8b", "none", "v6e:2x4", 256),
    "70b-v5e": Setup("llama3.1-70b", "int8", "v5e:2x4", 128),
    "70b-v6e": Setup("llama3.1-70b", "int8", "v6e:2x4", 256),
}

LAYERS = (2, 4)
"""How many are compiled."""

PARTS = {
    "attention": r"paged|/attention\.py",
    "draw": r"sampling\.py|decode/steps\.py|logits",
    "products": r"_linears",
}
"""Where the time goes: by the source of an instruction; the first that is found counts."""


def plan(given: Any, setup: Setup, layers: int) -> dict[int, tuple[spmd.Lowered, Emitted]]:
    """Rows of a step -> its plan and what is compiled, as `load_bundle` makes it."""
    config = config_of(setup, layers)
    rows = tuple(sorted(given.steps))
    shape = decode.ServingShape(
        setup.slots, given.context, rows, (given.context,), cache_dtype=given.cache_dtype
    )
    types = quantized_types(config, setup.quantize)
    functions, state, specs, primary = decode.functions(LlamaRows(config), shape, types)
    functions = [function for function in functions if function.tags["kind"] == "step"]
    topology = spmd.Topology(setup.topology)
    mesh = spmd.make_mesh(data=1, model=topology.count, topology=topology)
    manifest, traced = described(functions, "tpu", types, specs, state, primary)
    lowered: dict[str, spmd.Lowered] = {}

    def lower(entry: Entrypoint, asked: FunctionKey) -> Emitted:
        # Of symbols only the state has one, so an entry is no variant.
        module = static_module(traced[entry.name][1], entry, asked)
        lowered[entry.name] = lowered_of(module, mesh.refined(), asked, spmd.Options())
        return lowered[entry.name].stages.emitted.major_to_minor()

    pages = setup.slots * given.context // shape.page
    emitted = planner(manifest, list(traced), mesh, lower)({decode.PAGES: pages}, True).emitted
    names = {count: decode.step_name("step", count, given.context) for count in rows}
    return {count: (lowered[name], emitted[name]) for count, name in names.items()}


def config_of(setup: Setup, layers: int = 0) -> LlamaConfig:
    """The model, of so many layers, or of all."""
    fields = {"dtype": "bfloat16", "param_dtype": "bfloat16", "scan_layers": False}
    return ahead.model_of(setup.model, layers, **fields)


def build(lowered: spmd.Lowered, emitted: Emitted, setup: Setup) -> ahead.Built:
    """Compiles a step."""
    start, topology = time.perf_counter(), spmd.Topology(setup.topology)
    devices = devices_ahead(emitted.mesh, topology)
    outside = Outside(jax_mesh(emitted.boundary_mesh, devices), devices=devices)
    executable = compile_emitted(emitted, {}, outside)
    return ahead.with_compiler(ahead.planned(lowered), emitted.mesh, topology, executable, start)


class Figures(NamedTuple):
    """What is known of a step; seconds and bytes of one device, all of which grow with layers."""

    planned: float  # seconds of our timeline
    greedy: float  # seconds of kernels and waits
    drawn: float
    waits: float  # of `greedy`
    parts: Counter[str]  # of `greedy`
    sent: float
    kinds: Counter[str]  # collectives of `greedy`
    arguments: float  # bytes: weights, pool and the rest of the state
    temporary: float
    copies: float  # of arrays as large as a layer's pool

    def at(self, more: "Figures", layers: int) -> "Figures":
        """Of a model of so many layers; `self` and `more` have `LAYERS`."""
        scale = (layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])

        def line(a: Any, b: Any) -> Any:
            if isinstance(a, Counter):
                return Counter({key: line(a[key], b[key]) for key in {**a, **b}})
            return a + (b - a) * scale

        return Figures(*map(line, self, more))


def figures(given: Any, setup: Setup, rows: int, built: ahead.Built) -> Figures:
    """Reads what the compiler made."""
    topology, config = spmd.Topology(setup.topology), config_of(setup)
    mesh = spmd.Mesh(None, (1, topology.count), ("data", "model")).refined()
    attention = cached_bytes(given, setup, rows, config) / topology.hbm_bandwidth

    def kernel(instruction: Instruction) -> float:
        return attention if '"tpu_custom_call"' in instruction.rest else 0.0

    def read(least: bool) -> Modelled:
        return modelled(built.text, mesh, topology, kernel, least=least)

    greedy, drawn = read(True), read(False)
    parts = Counter[str]()
    for source, seconds in greedy.sources.items():
        found = (part for part, pattern in PARTS.items() if re.search(pattern, source))
        parts[next(found, "rest")] += seconds
    return Figures(
        float(built.seconds or 0), greedy.seconds, drawn.seconds, greedy.exposed_seconds, parts,
        greedy.sent, Counter(greedy.kinds), float(built.allocated or 0) - float(built.temporary or 0),
        float(built.temporary or 0), copies(given, setup, config, built.text),
    )  # fmt: skip


def pool_bytes(given: Any, setup: Setup, config: LlamaConfig) -> float:
    """Keys and values of a layer on one device, all slots being full."""
    item = {"int8": 1}.get(given.cache_dtype, 2)
    heads = max(1, config.kv_heads // spmd.Topology(setup.topology).count)
    return setup.slots * given.context * heads * 2 * config.head_width * item


def cached_bytes(given: Any, setup: Setup, rows: int, config: LlamaConfig) -> float:
    """What a step reads of a layer's pool."""
    return pool_bytes(given, setup, config) * min(1.0, rows / setup.slots)


def copies(given: Any, setup: Setup, config: LlamaConfig, text: str) -> int:
    """Copies and transposes of arrays as large as a pool, also between kinds of memory."""
    least = pool_bytes(given, setup, config)
    return sum(
        instruction.opcode in ("copy", "copy-start", "transpose")
        and max((array_bytes(*a) for a in arrays(instruction.type)), default=0) >= least
        for computation in parse_module_text(text).computations.values()
        for instruction in computation
    )


def whole(given: Any, name: str, setup: Setup) -> Iterator[tuple[int, Figures, float]]:
    """(rows, figures, seconds to compile one) of each step."""
    plans: dict[int, Any] = {}
    for rows in given.steps:
        found, took = [], 0.0
        for layers in LAYERS:

            def make(rows: int = rows, layers: int = layers) -> ahead.Built:
                if layers not in plans:
                    plans[layers] = plan(given, setup, layers)
                return build(*plans[layers][rows], setup)

            label = f"{name}_{rows}_{layers}_{given.context}_{given.cache_dtype}.json"
            built = ahead.kept(given.cache and given.cache / label, make)
            found.append(figures(given, setup, rows, built))
            took = float(built.compiling or 0)
        yield rows, found[0].at(found[1], config_of(setup).num_hidden_layers), took


def cells(given: Any, setup: Setup, rows: int, found: Figures) -> Iterator[str]:
    """A line of the table."""
    config, topology = config_of(setup), spmd.Topology(setup.topology)
    types = quantized_types(config, setup.quantize)
    weights = jax.tree.leaves({k: v for k, v in types.items() if k != "embed_tokens"})
    read = sum(math.prod(x.shape) * x.dtype.itemsize for x in weights) / topology.count
    read += cached_bytes(given, setup, rows, config) * config.num_hidden_layers
    least = read / topology.hbm_bandwidth
    step = max(found.greedy - found.waits, least) + found.waits
    yield from (f"{1e3 * x:.2f}" for x in (found.planned, found.greedy, found.drawn, least, step))
    yield f"{1e3 * found.waits:.2f}"
    yield ", ".join(f"{part} {1e3 * x:.2f}" for part, x in found.parts.most_common())
    yield f"{found.sent / 1e6:.1f}"
    yield ", ".join(f"{count:.0f} {kind}" for kind, count in found.kinds.most_common())
    gib = [f"{x / 2**30:.1f}" for x in (found.arguments, found.temporary, topology.hbm_bytes)]
    yield f"{gib[0]} + {gib[1]} of {gib[2]}"
    yield f"{found.copies:.0f}"


HEADER = (
    "row", "rows", "plan ms", "greedy ms", "drawn ms", "reading ms", "step ms", "of that waiting",
    "greedy, where", "MB sent", "collectives", "GiB", "copies of a pool", "compile s",
)  # fmt: skip


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run decode_ahead", __doc__)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(ROWS), help="which models and slices")
    add("--steps", type=words, default="1,64,256,1024", help="rows of the steps")
    add("--context", type=positive, default=1024, help="tokens of each sequence, in pages of 64")
    add("--cache_dtype", default="bfloat16", help="of keys and values, or int8")
    add("--cache", type=Path, help="folder that keeps what the TPU compiler made")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    given.steps = [int(rows) for rows in given.steps]
    print(f"jax {jax.__version__}, context {given.context}, cache {given.cache_dtype}")
    print_head(HEADER)
    for name in given.rows:
        setup = ROWS[name]
        for rows, found, took in whole(given, name, setup):
            print_line([name, str(rows), *cells(given, setup, rows, found), f"{took:.0f}"])


if __name__ == "__main__":
    main()

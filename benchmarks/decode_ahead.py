"""The steps of a served Llama for a TPU slice that is not here: time, bytes, memory, copies.

Programs are those that a server runs (`spmd.models.decode`), tensor parallel over the slice, with
jax's kernel for attention. They are compiled with libtpu (`tpu` extra), a minute for each, with
`--layers` layers; what belongs to layers counts as often as the model has more of them. Every slot
holds `--context` tokens; a step of R rows has one row of each slot, as far as they go, and rows of
a prompt behind them. Nothing runs.

`plan` is our timeline of the few layers, in which all is drawn in every way. The others are the
whole model's, of a step in which all draw the likeliest token: `kernels` by the compiler's cycles,
attention's by the bytes that it reads; `waiting` what collectives take beyond the kernels beside
them, by our figures of the links; `drawing` what filters and reported alternatives take beside, in
the branches that send the most. Weights that are read ahead have no cycles: `reading` is what
weights and cache take at the chip's rate. A step is the larger of kernels and reading, and waiting.

Example:
    benchmarks/run decode_ahead --rows 8b-v5e --steps 64
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks.hlo.modelled import modelled
from benchmarks.hlo.runs import array_bytes, arrays
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


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")

ROWS = {
    "8b-v5e": Setup("llama3.1-8b", "none", "v5e:2x4", 256),
    "8b-v6e": Setup("llama3.1-8b", "none", "v6e:2x4", 256),
    "70b-v5e": Setup("llama3.1-70b", "int8", "v5e:2x4", 128),
    "70b-v6e": Setup("llama3.1-70b", "int8", "v6e:2x4", 256),
}

PARTS = {
    "attention": r"\(write_and_attend|/ops/paged",
    "draw": r"^\S|sampling\.py|decode/steps\.py|decode/packing\.py|\(logits\)",
    "embedding": r"spmd_program/gather",
    "products": r"\(_linears\)",
}
"""Where the time goes, by the source of an instruction: the first that is found in it counts.

Branches and loops, whose computations are named in front, are those of drawing.
"""

ONCE = ("draw", "embedding")
"""Parts that a step has once, and not in every layer."""


def plan(given: Any, setup: Setup) -> dict[int, tuple[spmd.Lowered, Emitted]]:
    """Rows of a step -> its plan and what is compiled, as `load_bundle` makes it."""
    config = config_of(setup, given.layers)
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
        module = static_module(traced(entry.name), entry, asked)
        lowered[entry.name] = lowered_of(module, mesh.refined(), asked, spmd.Options())
        return lowered[entry.name].stages.emitted.major_to_minor()

    pages = setup.slots * given.context // shape.page
    names = {count: decode.step_name("step", count, given.context) for count in rows}
    plans = planner(manifest, mesh, lower)
    emitted = plans({decode.PAGES: pages}, list(names.values()), "fit").emitted
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


def parts_of(
    given: Any, setup: Setup, rows: int, text: str, least: bool
) -> Mapping[str, Mapping[str, float]]:
    """Of the whole model, what each part takes: the fields of `Modelled.parts`.

    Args:
      least: as for `modelled`.
    """
    topology, config = spmd.Topology(setup.topology), config_of(setup)
    mesh = spmd.Mesh(None, (1, topology.count), ("data", "model")).refined()
    attention = cached_bytes(given, setup, rows, config) / topology.hbm_bandwidth

    def kernel(instruction: Instruction) -> float:
        return attention if '"tpu_custom_call"' in instruction.rest else 0.0

    found: defaultdict[str, dict[str, float]] = defaultdict(partial(defaultdict, float))
    for source, part in modelled(text, mesh, topology, kernel, least=least).parts.items():
        name = next((n for n, pattern in PARTS.items() if re.search(pattern, source)), "rest")
        for field, amount in part.items():
            scale = 1 if name in ONCE else config.num_hidden_layers / given.layers
            found[name][field] += amount * scale
    return found


def pool_bytes(given: Any, setup: Setup, config: LlamaConfig) -> float:
    """Keys and values of a layer on one device, all slots being full."""
    item = {"int8": 1}.get(given.cache_dtype, 2)
    heads = max(1, config.kv_heads // spmd.Topology(setup.topology).count)
    return float(setup.slots * given.context * heads * 2 * config.head_width * item)


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


def built_of(given: Any, name: str) -> Iterator[tuple[int, ahead.Built]]:
    """(rows, what the compiler made) of each step."""
    plans: dict[int, Any] = {}
    for rows in given.steps:

        def make(rows: int = rows) -> ahead.Built:
            if not plans:
                plans.update(plan(given, ROWS[name]))
            lowered, emitted = plans[rows]
            return build(lowered, emitted, ROWS[name])

        label = f"{name}_{rows}_{given.layers}_{given.context}_{given.cache_dtype}.json"
        yield rows, ahead.kept(given.cache and given.cache / label, make)


def cells(given: Any, setup: Setup, rows: int, built: ahead.Built) -> Iterator[str]:
    """A line of the table."""
    config, topology = config_of(setup), spmd.Topology(setup.topology)
    greedy, drawn = (
        parts_of(given, setup, rows, built.text, least=least) for least in (True, False)
    )
    fields = ("kernels", "waits", "sent", *KINDS)
    total = {field: sum(part[field] for part in greedy.values()) for field in fields}
    seconds = {name: part["kernels"] + part["waits"] for name, part in greedy.items()}
    more = sum(part["kernels"] + part["waits"] for part in drawn.values()) - sum(seconds.values())
    weights = {
        name: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(types))
        for name, types in quantized_types(config, setup.quantize).items()
    }
    layers, held = config.num_hidden_layers, sum(weights.values()) / topology.count
    read = held - weights["embed_tokens"] / topology.count
    read += cached_bytes(given, setup, rows, config) * layers
    least = read / topology.hbm_bandwidth
    step = max(total["kernels"], least) + total["waits"]
    times = (built.seconds or 0, total["kernels"], total["waits"], more, least, step)
    yield from (f"{1e3 * x:.2f}" for x in times)
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    yield ", ".join(f"{name} {1e3 * x:.2f}" for name, x in ordered)
    yield f"{total['sent'] / 1e6:.1f}"
    yield ", ".join(f"{total[kind]:.0f} {kind}" for kind in KINDS if total[kind] >= 1)
    held += pool_bytes(given, setup, config) * layers
    sizes = held, built.temporary or 0, topology.hbm_bytes
    yield " / ".join(f"{x / 2**30:.1f}" for x in sizes)
    yield f"{copies(given, setup, config, built.text) * layers / given.layers:.0f}"
    yield ahead.cell(built.compiling, 1, 0)


HEADER = (
    "row", "rows", "plan ms", "kernels ms", "waiting ms", "drawing ms", "reading ms", "step ms",
    "where", "MB sent", "collectives", "GiB held / temporary / chip", "copies of a pool",
    "compile s",
)  # fmt: skip


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run decode_ahead", __doc__)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(ROWS), help="which models and slices")
    add("--steps", type=words, default="1,64,256,1024", help="rows of the steps")
    add("--layers", type=positive, default=2, help="how many are compiled")
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
        for rows, built in built_of(given, name):
            print_line([name, str(rows), *cells(given, setup, rows, built)])

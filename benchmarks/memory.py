"""Predicted memory of a device beside XLA's own figures.

The programs are those of `benchmarks/run bytes`, reshards aside. Nothing runs: they are compiled
for eight virtual CPU devices, or for the accelerators of the machine, or for accelerators that are
not here (`--topology v5e:2x4` or `h200:8`, with the `tpu` or `cuda` extra): there, layers of
Llama-2 7B's width are compiled too. XLA takes the more memory the more there is;
`--compiler_option` can give it less.

Example:
    benchmarks/run memory --only 'decode|resnet'
    benchmarks/run memory --topology h200:8 --only 7b \
        --compiler_option xla_gpu_memory_limit_slop_factor=3
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial

import jax

import spmd
from benchmarks.compiled_ahead import Case, model_of
from benchmarks.programs import catalog
from benchmarks.programs.program import Built, Program, on_meshes
from benchmarks.tables import print_table
from spmd.cli.flags import Parser
from spmd.explain.memory import Memory


def wide_llama(mesh: spmd.Mesh, remat: str, scan: bool) -> Built:
    """A training step of four layers of Llama-2 7B's width, bf16 compute."""
    config = model_of("llama2-7b", 4, dtype="bfloat16", remat=remat, scan_layers=scan)
    case = Case(config, mesh, None, (32, 4096))
    return Built(case.step(), case.types(), (0, 1))


WIDE: list[Program] = [
    program
    for stack in ("scan", "unrolled")
    for remat in ("none", "full", "dots", "save_attention")
    for program in on_meshes(
        f"7b/{stack}-{remat}", partial(wide_llama, remat=remat, scan=stack == "scan"), "8x1", "4x2"
    )
]
"""For accelerators: CPUs would have nothing to compute attention with but all its weights."""

Lines = Iterator[list[str]]


def lines(found: Sequence[Program], topology: spmd.Topology | None, options: spmd.Options) -> Lines:
    """Of each program the prediction beside XLA's report."""
    for program in found:
        mesh = spmd.Mesh(None, tuple(program.axes.values()), tuple(program.axes))
        built = program.build(mesh)
        jitted = spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate, options=options)
        lowered = jitted.lower(*built.args, topology=topology)
        predicted = Memory.predicted(lowered.predicted_memory)
        reported = lowered.compile().memory
        figures = [predicted.arguments, predicted.temporary, reported.temporary]
        figures += [predicted.peak_bytes, reported.peak_bytes]
        ratio = predicted.peak_bytes / reported.peak_bytes
        yield [program.name, *(f"{figure / 2**20:.1f}" for figure in figures), f"{ratio:.2f}"]


HEADER = (
    "program", "arguments", "temporary, predicted", "XLA's", "peak, predicted", "XLA's", "ratio"
)  # fmt: skip


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run memory", __doc__)
    add = parser.add_argument
    add("--topology", default="", help="compile for this machine instead, e.g. v5e:2x4")
    add("--only", default="", help="programs whose name this regular expression finds")
    add("--compiler_option", action="append", default=[], help="NAME=VALUE for XLA; repeatable")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    topology = spmd.Topology(given.topology) if given.topology else None
    machine = topology or f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    print(f"jax {jax.__version__}, {machine}; MiB of each device")
    wide = [program for program in WIDE if topology and re.search(given.only, program.name)]
    small = [p for p in catalog.programs(given.only) if not p.family.startswith("reshard")]
    options = spmd.Options(
        compiler_options=dict(option.split("=", 1) for option in given.compiler_option)
    )
    print_table(HEADER, lines([*wide, *small], topology, options))

"""Training steps for TPU slices that are not here: ours beside plain `jax.jit`, by XLA's compiler.

Both get the same program, marks, donation and optimizer-state shardings, and are compiled with
libtpu (`tpu` extra), minutes for each program. The peer runs with its windowed einsums, which are
the default, and without. Nothing runs: times are modelled (`benchmarks/hlo/modelled.py`).

Example:
    benchmarks/run tpu --rows v5e-16-scanned --cache plans
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import compiled_ahead as ahead
from benchmarks.hlo.modelled import Modelled, modelled
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, words


class Setup(NamedTuple):
    """One configuration, of Llama-2 7B's width."""

    topology: str  # the slice
    mesh: tuple[int, int]  # sizes of the axes data and model
    scanned: bool  # whether layers are scanned, or written out
    remat: str = "none"  # which activations are kept


ROWS = {
    "v5e-16-scanned": Setup("v5e:4x4", (16, 1), True),
    "v5e-16-unrolled": Setup("v5e:4x4", (16, 1), False),
    "v5e-8x2-scanned": Setup("v5e:4x4", (8, 2), True, "full"),
    "v5e-4x4-scanned": Setup("v5e:4x4", (4, 4), True),
    "v5e-4x4-unrolled": Setup("v5e:4x4", (4, 4), False),
    "v4-16-scanned": Setup("v4:2x2x4", (16, 1), True),
    "v4-4x4-scanned": Setup("v4:2x2x4", (4, 4), True),
    "v5p-16-scanned": Setup("v5p:2x2x4", (16, 1), True),
    "v5p-4x4-scanned": Setup("v5p:2x2x4", (4, 4), True),
}

OURS = "spmd.jit"
PROGRAMS: Mapping[str, Mapping[str, str]] = {
    OURS: {},
    "jax.jit": {},
    "jax.jit, no windowed einsum": {
        "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
    },
}
"""What is compiled, and its compiler options."""


def case_of(given: Any, row: Setup) -> ahead.Case:
    """The training step, on its machine."""
    axes = dict(zip(("data", "model"), row.mesh, strict=True))
    fields: dict[str, Any] = {"attention": "einsum", "scan_layers": row.scanned, "remat": row.remat}
    return ahead.Row("llama2-7b", row.topology, axes).case(given, **fields)


def build(given: Any, row: str, name: str) -> ahead.Built:
    """Compiles a program, or reads what was made of it last time."""

    def make() -> ahead.Built:
        case = case_of(given, ROWS[row])
        return (
            ahead.by_spmd(case)[0] if name == OURS else ahead.by_jax(case, options=PROGRAMS[name])
        )

    label = "_".join([row, name, str(given.layers)]).replace(" ", "_")
    return ahead.kept(given.cache and given.cache / f"{label}.json", make)


def line(name: str, built: ahead.Built, step: Modelled) -> list[str]:
    """Cells of the table."""
    exposed = f"{step.exposed_seconds * 1e3:.1f} ({step.exposed_seconds / step.seconds:.1%})"
    return [
        name,
        f"{step.seconds * 1e3:.1f}",
        f"{step.kernel_seconds * 1e3:.1f}",
        exposed,
        f"{step.large_hidden} of {step.large}",
        f"{step.sent / 1e9:.2f}",
        ahead.cell(built.temporary, 2**30, 2),
        ahead.cell(built.compiling, 1, 0),
    ]


HEADER = (
    "row", "program", "modelled ms", "kernels ms", "exposed ms", "asynchronous above 1 MB",
    "GB sent", "temporary GiB", "compile s",
)  # fmt: skip


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run tpu", __doc__)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(ROWS), help="which configurations")
    add("--programs", type=words, default="0,1,2", help="ours, jax.jit, the same without einsums")
    add("--layers", type=int, default=4, help="how many layers")
    add("--batch", type=int, default=32, help="sequences in a step")
    add("--seq_len", type=int, default=1024, help="tokens in a sequence")
    add("--cache", type=Path, help="folder that keeps what the TPU compiler made")
    add("--synchronous", action=Switch, default=False, help="list large synchronous collectives")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, {given.layers} layers, batch {given.batch} x {given.seq_len}")
    print_head(HEADER)
    names = list(PROGRAMS)
    for row in given.rows:
        case = case_of(given, ROWS[row])
        for number in map(int, given.programs):
            built = build(given, row, names[number])
            step = modelled(built.text, case.mesh, case.topology)
            print_line([row, *line(names[number], built, step)])
            for c, waited in step.synchronous if given.synchronous else ():
                what = f"{c.count} x {c.kind} among {c.group_size}, {c.bytes / 1e6:.1f} MB each"
                print(f"    {what}, {waited * 1e3:.2f} ms together: {c.op_name} {c.source}")

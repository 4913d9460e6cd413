"""Programs of other people's packages: numbers, bytes and compile time beside plain `jax.jit`.

Each program is a package's own model and step, compiled by `spmd.jit(step, mesh=mesh)` in place of
`jax.jit(step)`: one line changes, and the arguments are placed alike for both. `numbers` compares
results of a small run on eight virtual CPU devices. The other columns are of a large program that
is not run: `spmd`, `XLA` and `given` are the megabytes that a device sends, `ratio` is ours over
`given` (benchmarks/bytes.py says how they are counted), `flop ratio` our arithmetic over its. The
seconds are of compilation after tracing: all of our stages and XLA's; XLA's with Shardy's.

Examples:
    tools/run packages
    tools/run packages --only 'haiku|keras' --nonumbers --topology h200:8
"""

import re
import sys
from collections.abc import Iterator, Sequence

import spmd
from benchmarks.bytes import Row, decimal, first_line, geometric_mean, measure, megabytes
from benchmarks.corpus.packages.catalog import MODULES, Entry, entries
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch

HEADER = (
    "program", "numbers", "spmd MB", "XLA MB", "given MB", "ratio", "flop ratio",
    "spmd s", "XLA s",
)  # fmt: skip


def numbers(entry: Entry) -> str:
    """`equal`, or why not."""
    try:
        entry.compare_numbers()
    except Exception as error:  # whatever a program raises is a result
        return first_line(error)
    return "equal"


def line(name: str, found: str, row: Row) -> list[str]:
    """A program's cells."""
    ours, given = row.spmd, row.given
    flops = ours.flops / given.flops if ours and given and given.flops else None
    seconds = decimal(row.stages + ours.seconds, 1) if ours else row.errors.get("spmd", "")
    sent = (megabytes(side and side.bytes) for side in (ours, row.alone, given))
    own = (decimal(row.ratio), decimal(flops), seconds, decimal(given and given.seconds, 1))
    return [name, found, *sent, *own]


def summary(rows: Sequence[Row]) -> str:
    """How many programs send less, as much and more."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    less, more = sum(r < 1 for r in ratios), sum(r > 1.05 for r in ratios)
    mean = geometric_mean(ratios)
    return (
        f"{len(ratios)} programs: {less} send fewer bytes than XLA, {more} more than 1.05 times as "
        f"many; geometric mean {'' if mean is None else f'{mean:.2f}'}."
    )


def chosen(only: str) -> Iterator[Entry]:
    """The entries whose name the regular expression finds; what cannot be imported is said."""
    for module in MODULES:
        try:
            yield from (entry for entry in entries(module) if re.search(only, entry.name))
        except ImportError as error:
            print(f"{module}: {error}", file=sys.stderr)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run packages", __doc__)
    add = parser.add_argument
    add("--only", default="", help="programs whose name this regular expression finds")
    add("--numbers", action=Switch, default=True, help="run the small programs and compare")
    add("--topology", default="v5e:2x4", help="machine of eight devices to plan for")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    given = make_parser().parse_args(arguments)
    options = spmd.Options(topology=spmd.Topology(given.topology))
    rows = []
    print_head(HEADER)
    for entry in chosen(given.only):
        found = numbers(entry) if given.numbers else ""
        rows.append(measure(entry.program(), options, guess_trips=True))
        print_line(line(entry.name, found, rows[-1]))
    print(f"\n{summary(rows)}")

"""Writes the tables of docs/coverage.md and docs/coverage_programs.md: every op, and what is run.

With --check it writes nothing, and fails if a page is out of date.

Example:
    tools/run coverage --check
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.corpus.program import QUICK_MESH
from benchmarks.corpus.programs import PROGRAMS
from benchmarks.tables import with_rows
from spmd.cli.flags import Parser, Switch
from spmd.frontend.canonicalize import CANONICAL
from spmd.frontend.importer.handlers import SAME
from spmd.frontend.importer.ops import LEGALIZED, REFUSED, dialect_ops
from spmd.lowering.local import table as local

ROOT = Path(__file__).resolve().parent.parent
OPS_PAGE = ROOT / "docs" / "coverage.md"
PROGRAMS_PAGE = ROOT / "docs" / "coverage_programs.md"

STRUCTURE = {
    "custom_call:Sharding": "a mark",
    **dict.fromkeys(SAME, "a mark: it returns its operand"),
    "sdy.constant": "read as `stablehlo.constant`",
    "sdy.data_flow_edge": "left out, its sharding is a mark",
    "sdy.func_data_flow_edge": "left out, its sharding is a mark",
    "sdy.manual_computation": "a region for one device along some axes (`jax.shard_map`)",
    "sdy.mesh": "its axes are written in those of the mesh that is compiled for",
    "sdy.named_computation": "inlined, its shardings are marks",
    "sdy.propagation_barrier": "left out",
    "sdy.return": "the end of a region",
    "sdy.sharding_group": "left out",
    "stablehlo.case": "control flow: its regions are partitioned",
    "stablehlo.composite": "inlined, if not registered; one named like a CHLO op becomes that op",
    "stablehlo.custom_call": "by its target, see below",
    "stablehlo.get_tuple_element": "folded when the program is read",
    "stablehlo.if": "control flow: its regions are partitioned",
    "stablehlo.return": "the end of a region",
    "stablehlo.tuple": "folded when the program is read",
    "stablehlo.while": "control flow: its regions are partitioned",
}


def how(name: str) -> str:
    """What becomes of an op, in a few words; empty if nobody knows."""
    has_rule = name in local.registered_ops()
    if name in REFUSED and has_rule:
        return "rule + local lowering in `jax.shard_map`; refused outside, unless of one device"
    if name in REFUSED:
        return f"refused: {REFUSED[name].reason}"
    if name in CANONICAL:
        return "canonicalized"
    if name in LEGALIZED:
        return "canonicalized by StableHLO's passes"
    if has_rule:
        return "rule + local lowering"
    return STRUCTURE.get(name, "")


def names_of(dialects: tuple[str, ...]) -> set[str]:
    """Every op of some dialects that a table names."""
    names = {*CANONICAL, *LEGALIZED, *REFUSED, *STRUCTURE, *local.registered_ops()}
    return {name for name in names if name.startswith(dialects)}


def programs(page: str) -> str:
    """The page about the corpus, with today's table."""
    rows = []
    for program in PROGRAMS:
        what = (program.make.__doc__ or "").partition("\n")[0].strip()
        rows.append((f"`{program.name}`", what, "-" if program.heavy else QUICK_MESH))
    return with_rows(page, ("program", "what it is", "quick on"), rows)


def row(name: str, ran: set[str]) -> tuple[str, str, str]:
    """A row about an op; what is refused or a mere bracket has nothing to execute."""
    what = how(name)
    runs = "yes" if name in ran else "no"
    if what.startswith("refused") or name == "stablehlo.return":
        runs = "-"
    return f"`{name}`", what or "**missing**", runs


def ops(page: str) -> str:
    """The page about ops and custom calls, with today's tables."""
    from tests.ir.dialect.executed import executed_ops

    ran = executed_ops()
    names = {*dialect_ops(), *names_of(("stablehlo.", "chlo.", "sdy."))}
    for what, found in (("op", names), ("call", names_of(("custom_call:",)))):
        rows = [row(name, ran) for name in sorted(found)]
        page = with_rows(page, (what, "how", "executed"), rows)
    return page


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run coverage", __doc__)
    parser.add_argument("--check", action=Switch, help="write nothing; fail if a page is old")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pages, or checks them."""
    given = make_parser().parse_args(arguments)
    for page, write in ((OPS_PAGE, ops), (PROGRAMS_PAGE, programs)):
        old = page.read_text(encoding="utf-8")
        text = write(old)
        if not given.check:
            page.write_text(text, encoding="utf-8")
        elif text != old:
            sys.exit(f"error: {page.relative_to(ROOT)} is out of date: run tools/run coverage")

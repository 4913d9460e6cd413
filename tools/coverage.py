"""Writes the tables of docs/coverage.md and docs/coverage_programs.md: every op, and what is run.

With --check it writes nothing, and fails if a page is out of date.

Example:
    tools/run coverage --check
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import with_rows
from spmd.cli.flags import Parser, Switch
from spmd.frontend.importer.handlers import SAME

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
    from spmd.frontend.canonicalize import CANONICAL
    from spmd.frontend.importer.ops import LEGALIZED, REFUSED
    from spmd.ir.dialect import registry
    from spmd.lowering.local import table as local

    has_rule = name in registry.registered_ops() and name in local.registered_ops()
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
    from spmd.frontend.canonicalize import CANONICAL
    from spmd.frontend.importer.ops import LEGALIZED, REFUSED
    from spmd.ir.dialect import registry

    names = {*CANONICAL, *LEGALIZED, *REFUSED, *STRUCTURE, *registry.registered_ops()}
    return {name for name in names if name.startswith(dialects)}


def executed() -> set[str]:
    """Names of the ops that the tests run, as they say with eight CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    more = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command, env = [sys.executable, "-m", "tests.ir.dialect.executed"], {**os.environ, **more}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def programs(page: str) -> str:
    """The page about the corpus, with today's table."""
    from benchmarks.corpus.program import QUICK_MESH
    from benchmarks.corpus.programs import PROGRAMS

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
    from spmd.frontend.importer.ops import dialect_ops

    ran = executed()
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

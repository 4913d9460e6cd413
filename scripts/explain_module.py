"""Plans a StableHLO file for a mesh, and says what is sharded how, why, and what it costs.

The file is text, bytecode or a portable artifact. Nothing is run and no device is needed: the mesh
and the machine are made up. A spec has an entry for each dim, separated by commas: an axis, several
as `data+model`, `None` (or `-`) for a dim that is not split, `...` for one that is up to the
compiler.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scripts.specs import UsageError, parse_mesh, parse_named_specs

if TYPE_CHECKING:
    import spmd

STAGES = ("program", "propagated", "planned", "local", "optimized", "emitted")

EXAMPLES = """examples:
  scripts/explain model.mlir --mesh data=4,model=2
  scripts/explain model.mlir --mesh data=4,model=2 --arg-spec 0=data,None \\
      --arg-spec params/w=None,model
  scripts/explain model.mlir --mesh data=16,model=16 --topology v5e:16x16 --report report.html
  scripts/explain model.mlir --mesh data=8 --value params/w     # why is it so, and what else costs
  scripts/explain model.mlir --mesh data=8 --value model.py:12  # all that this line makes
  scripts/explain model.mlir --mesh data=8 --stage local        # the program of one device
"""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="scripts/explain",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("module", help="the StableHLO file")
    add("--mesh", default="data=4,model=2", help="axes and their sizes (default: %(default)s)")
    add(
        "--topology",
        help="the machine to plan for, as v5e:4x4, v4:4x4x8 or h200:8 (default: CPUs)",
    )
    add(
        "--arg-spec", "--arg_spec", action="append", default=[], metavar="WHICH=SPEC",
        help="spec of an argument, by its number from 0, its name, or a pattern of names; "
        "arguments without one are open. Repeatable.",
    )  # fmt: skip
    add(
        "--result-spec", "--result_spec", action="append", default=[], metavar="WHICH=SPEC",
        help="the same for a result. Repeatable.",
    )  # fmt: skip
    add("--planner", choices=("exact", "greedy"), default="exact", help="default: %(default)s")
    add("--value", action="append", default=[], metavar="NAME",
        help="explain one value instead: an argument's or result's name (or a pattern), a number "
        "as in %%12, or a source line as in model.py:12. Repeatable.")  # fmt: skip
    add("--stage", choices=STAGES, help="print the program after a stage instead")
    add("--report", metavar="FILE", help="also write the report as an HTML page")
    add("--no-prices", action="store_true",
        help="leave out what other decisions would have cost, which takes longest")  # fmt: skip
    return made


def lower(flags: argparse.Namespace) -> spmd.Lowered:
    """Our compiler's stages for the file, up to the local program."""
    import spmd
    from spmd.frontend.importer.module import boundary_names, parse_module

    axes = parse_mesh(flags.mesh)
    mesh = spmd.Mesh(None, tuple(axes.values()), tuple(axes))
    module = parse_module(flags.module)
    arguments, results = boundary_names(module)
    topology = spmd.Topology(flags.topology) if flags.topology else None
    return spmd.lower_stablehlo(
        module,
        mesh,
        parse_named_specs("arg-spec", flags.arg_spec, arguments),
        parse_named_specs("result-spec", flags.result_spec, results),
        spmd.Options(planner=flags.planner, topology=topology),
    )


def text(lowered: spmd.Lowered, flags: argparse.Namespace) -> str:
    """What is asked for, to print."""
    if flags.stage:
        return lowered.as_text(flags.stage)
    prices = not flags.no_prices
    if flags.value:
        return "\n".join(lowered.explain(name, prices=prices) for name in flags.value)
    return lowered.explain(prices=prices)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    flags = parser().parse_args(argv)
    from spmd.errors import SpmdError

    try:
        lowered = lower(flags)
        print(text(lowered, flags).rstrip())
        if flags.report:
            lowered.report(flags.report, prices=not flags.no_prices)
            print(f"\nreport: {flags.report}", file=sys.stderr)
    except (UsageError, SpmdError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plans a StableHLO file for a mesh, and prints how its values are sharded, why, and the costs.

The file is text, bytecode or a portable artifact. Nothing is run, and no device is needed: flags
describe the mesh and the machine. A spec has an entry for each dim, separated by commas: an axis,
several as `data+model`, `None` (or `-`) for a dim that is not split, `...` for one that is up to
the compiler.

Examples:
    spmd explain model.mlir --mesh data=4,model=2
    spmd explain model.mlir --arg_spec 0=data,None --arg_spec params/w=None,model
    spmd explain model.mlir --mesh data=16,model=16 --topology v5e:16x16 --report report.html
    spmd explain model.mlir --mesh data=8 --value params/w     # why one value is sharded so
    spmd explain model.mlir --mesh data=8 --value model.py:12  # all values made by this line
    spmd explain model.mlir --mesh data=8 --stage local        # the program of one device

Exit status: 0, or 2 for flags, files and specs that cannot be used.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import spmd
from spmd.api import STAGES
from spmd.cli.flags import Parser, Switch
from spmd.cli.specs import add_module_flags, default_to_cpus, read_module


def make_parser() -> Parser:
    """Returns the parser of the flags of `spmd explain`."""
    made = Parser("spmd explain", __doc__)
    add_module_flags(made)
    add = made.add_argument
    add("--topology", help="the machine to plan for, as v5e:4x4, v4:4x4x8 or h200:8 (CPUs)")
    add("--planner", choices=("exact", "greedy"), default="exact", help="which one plans")
    one = made.add_mutually_exclusive_group().add_argument
    one(
        "--value",
        action="append",
        default=[],
        metavar="NAME",
        help="explain one value instead: an argument's or result's name (or a pattern), a number "
        "as in %%12, or a source line as in model.py:12 (repeatable)",
    )
    one("--stage", choices=STAGES[1:-1], help="print the program after a stage instead")
    add("--json", metavar="FILE", help="also write the plan as data, for spmd diff and spmd check")
    add("--report", metavar="FILE", help="also write the report as an HTML page")
    add(
        "--prices",
        action=Switch,
        default=True,
        help="say what other decisions would have cost, which takes longest",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `spmd explain` with these flags (None: `sys.argv`) and returns its exit status."""
    given = make_parser().parse_args(arguments)
    default_to_cpus()
    module, arg_specs, result_specs = read_module(given)
    topology = spmd.Topology(given.topology) if given.topology else None
    lowered = spmd.lower_stablehlo(
        module,
        spmd.Mesh(None, tuple(given.mesh.values()), tuple(given.mesh)),
        arg_specs,
        result_specs,
        spmd.Options(planner=given.planner, topology=topology),
    )
    if given.stage:
        text = lowered.as_text(given.stage)
    elif given.value:
        text = "\n".join(lowered.explain(name, prices=given.prices) for name in given.value)
    else:
        text = lowered.explain(prices=given.prices)
    print(text.rstrip())
    if given.json:
        data = json.dumps(lowered.to_json(prices=given.prices))
        Path(given.json).write_text(data, encoding="utf-8")
    if given.report:
        lowered.report(given.report, prices=given.prices)
        print(f"\nreport: {given.report}", file=sys.stderr)
    return 0

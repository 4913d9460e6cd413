"""Plans a program again, and fails if it sends, holds or takes more than the plan that was kept.

Made for CI: it needs no device of the machine, and no time that is measured. The program is named
as for `spmd plan`; it is planned on the kept plan's mesh and machine.

Examples:
    spmd plan train.py:build v5e-16 --json plans/train.json      # keep the best plan
    spmd check plans/train.json train.py:build                   # in CI
    spmd check plans/train.json train.py:build --write           # keep what it is now

Exit status: 0 if the plan is within its budget, 1 if not, 2 for files that cannot be used.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import spmd
from spmd.cli.diff import read_plan
from spmd.cli.flags import Parser, Switch
from spmd.cli.plan import program, read_choices
from spmd.cli.specs import default_to_cpus
from spmd.explain.contract import BUDGET, Budget, breaches


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `spmd check` with these flags (None: `sys.argv`) and returns its exit status."""
    parser = Parser("spmd check", __doc__)
    add = parser.add_argument
    add("plan", help="the plan that was kept")
    add("program", help="as for spmd plan")
    for figure, share in BUDGET._asdict().items():
        add(f"--{figure}", type=float, default=share, help=f"share by which it may grow ({share})")
    add("--write", action=Switch, help="keep the plan as it is now")
    given, rest = parser.parse_known_args(arguments)
    default_to_cpus()
    kept = read_plan(given.plan)
    build, _ = program(given.program)
    choices: dict[str, Any] = read_choices(build, rest)
    # To the end: what a slow computer would leave out must not look like a worse plan.
    choices |= {"meshes": [dict(kept.mesh.shape)], "most_seconds": math.inf}
    now = spmd.plan(build, kept.machine.name, **choices).best.lowered._report()
    if given.write:
        Path(given.plan).write_text(json.dumps(now.to_json()), encoding="utf-8")
        return 0
    worse = breaches(kept, now, Budget(given.seconds, given.sent, given.memory))
    if not worse:
        print(f"{given.program} keeps to {given.plan}")
        return 0
    print("\n".join([f"{given.program} became worse than {given.plan}:", *worse]))
    return 1

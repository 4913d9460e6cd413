"""Says how one plan differs from another: what each collective, byte and millisecond became.

A plan is a file of JSON, as `spmd plan --json`, `spmd explain --json` and `to_json()` of a program
write it: of two revisions, meshes, machines or options.

Example:
    spmd diff before.json after.json

Exit status: 0 if the plans are the same, 1 if they differ, 2 for files that are none.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from spmd.cli.flags import Parser
from spmd.errors import SpmdError
from spmd.explain.data import PlanReport, from_json
from spmd.explain.page.page import diff_page
from spmd.explain.text import diff_text


def read_plan(file: str) -> PlanReport:
    """Returns the plan in a file; SpmdError if it is none."""
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpmdError(f"{file} is not JSON: {error}") from None
    return from_json(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `spmd diff` with these flags (None: `sys.argv`) and returns its exit status."""
    parser = Parser("spmd diff", __doc__)
    parser.add_argument("a", help="a plan")
    parser.add_argument("b", help="another one")
    parser.add_argument("--report", metavar="FILE", help="also write a page")
    given = parser.parse_args(arguments)
    a, b = read_plan(given.a), read_plan(given.b)
    text = diff_text(a, b)
    print(text.rstrip())
    if given.report:
        Path(given.report).write_text(diff_page(a, b, text), encoding="utf-8")
    figures = [(x.timeline.seconds, x.sent_bytes, x.peak_bytes) for x in (a, b)]
    return 0 if text.rstrip().endswith("nothing changed") and figures[0] == figures[1] else 1

"""Prints how many files, functions and calls it takes to do a thing, in one checkout or several.

A reader who follows what happens pays for these hops. Each scenario (`tools/entered.py`: a step
lowered, a memory limit, a chat, a training run) runs once in a process of its own with a
checkout's code, under a profile hook; functions of spmd, models and serving count.

Example:
    git worktree add /tmp/before main~20
    tools/run hops /tmp/before .
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import print_table
from spmd.cli.flags import Parser
from tools.compare_checkouts import HERE, checkout_of
from tools.entered import SCENARIOS


def measured(checkout: Path, scenario: str) -> str:
    """Files, functions and calls; or the last line of what went wrong."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "SPMD_CACHE_DIR": "none"}
    command = [sys.executable, str(HERE / "tools" / "entered.py"), scenario]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    found = json.loads(done.stdout.splitlines()[-1])
    return f"{found['files']}, {found['functions']:,}, {found['calls']:,}"


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run hops", __doc__)
    about = "folders (default: this repository)"
    parser.add_argument("checkouts", nargs="*", type=checkout_of, default=[HERE], help=about)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a column for each checkout, a row for each scenario."""
    given = make_parser().parse_args(arguments)
    print_table(
        ("files, functions, calls to", *map(str, given.checkouts)),
        ([name, *(measured(checkout, name) for checkout in given.checkouts)] for name in SCENARIOS),
    )

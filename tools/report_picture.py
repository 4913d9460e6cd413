"""Makes the picture of a report that the documentation shows, in a headless Chromium.

The report is that of a benchmark's Llama training step over data=4, model=2 on eight H200s, which
need not be here.

Example:
    tools/run report_picture
    tools/run report_picture --out /tmp/explain.png --height 2400
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import spmd
from benchmarks.programs.catalog import program_named
from spmd.cli.flags import Parser, positive
from tools.house import HERE

PROGRAM = "llama-train/scan@4x2"
WIDTH = 1240


def make_parser() -> Parser:
    """The tool's flags."""
    parser = Parser("tools/run report_picture", __doc__)
    parser.add_argument(
        "--out", default=str(HERE / "docs/assets/explain.png"), help="the picture to write"
    )
    parser.add_argument("--height", type=positive, default=1180, help="pixels of the page")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report, and what a browser shows of it."""
    given = make_parser().parse_args(arguments)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium on this machine: apt-get install chromium", file=sys.stderr)
        return 1
    program = program_named(PROGRAM)
    built = program.build(spmd.Mesh(None, tuple(program.axes.values()), tuple(program.axes)))
    step = spmd.jit(built.fn, donate_argnums=built.donate)
    lowered = step.lower(*built.args, topology=spmd.Topology("h200:8"))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        lowered.report(str(page))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={WIDTH},{given.height}", f"--screenshot={given.out}"]
        command += [f"--user-data-dir={folder}/profile", page.as_uri()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return 0


if __name__ == "__main__":
    sys.exit(main())

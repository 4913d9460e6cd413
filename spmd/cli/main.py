"""The compiler's command: plans programs for machines that are not here, explains and checks them.

    spmd plan      the fastest mesh of a machine for a program
    spmd explain   how a StableHLO file is sharded, why, and what that costs
    spmd verify    whether it computes the same on a mesh as on one device
    spmd diff      how one plan differs from another
    spmd check     whether a program still keeps to the plan that it had

Examples:
    spmd plan llama3-8b h200:8 --batch 64
    spmd explain model.mlir --mesh data=4,model=2

`spmd COMMAND --help` lists a command's flags.
"""

import importlib
import sys
from collections.abc import Sequence

from spmd.cli.flags import Parser
from spmd.errors import SpmdError

COMMANDS = ("plan", "explain", "verify", "diff", "check")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command with its flags (None: `sys.argv`); returns its exit status, 2 for errors."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser("spmd", __doc__)
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    given = parser.parse_args(words[:1] or ["--help"])
    try:
        return int(importlib.import_module(f"spmd.cli.{given.command}").main(words[1:]))
    except (SpmdError, OSError, ModuleNotFoundError, ValueError) as error:
        # Only these two run a program of the user's, and what it needs.
        if not isinstance(error, SpmdError | OSError) and given.command not in ("plan", "check"):
            raise
        is_missing = type(error) is ModuleNotFoundError
        hint = '; named models take pip install "spmd[train,serve]"' if is_missing else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

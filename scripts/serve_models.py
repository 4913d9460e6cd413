r"""Serves several bundles behind one port: a process for each, and this one in front of them.

A YAML file says which, by name, and how scripts/serve is to serve each:

    llama-1b: {bundle: bundles/llama-1b, memory_share: 0.3}
    qwen: {bundle: bundles/qwen, memory_share: 0.5, mesh: {data: 1, model: 2}}

`POST /v2/repository/models/NAME/load` (tritonclient's `load_model`) reads the file anew, and loads
the model, or its new version: beside the old one, which ends what runs on it; both need room.
`/unload` ends one. `/models/NAME/requests` is a page of one, `/metrics` has all.

Examples:
    scripts/serve_models models.yaml
    scripts/serve_models models.yaml --host 0.0.0.0 --port 8000 --api_key_file keys.yaml
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from spmd.cli.flags import Parser
from spmd.models.fields import taken
from spmd.scripts.flags import reach
from spmd.scripts.flags.user_errors import ending_on_interrupt, one_message
from spmd.serving.errors import ServingError
from spmd.serving.http import logs
from spmd.serving.http.fleet import Fleet, FleetServer
from spmd.serving.http.limits import HttpOptions
from spmd.serving.http.server import address, at, heeding_signals, listen

_LOG = logging.getLogger("serving.fleet")


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("scripts/serve_models", __doc__)
    parser.add_argument("models", type=Path, help="YAML: a model's name, and its bundle and flags")
    reach.add_flags(parser, reach.LIMITS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal comes."""
    given = make_parser().parse_args(arguments)
    with ending_on_interrupt(), one_message(ServingError, OSError):
        logs.set_up(given.log_level, given.log_format, replaces=True)
        reached, options = at(given.host, taken(HttpOptions, given)), reach.options(given)
        if options.api_keys:  # others could read them on a command line
            os.environ[reach.KEYS] = ",".join(options.api_keys)
        more = [f"--log_level={given.log_level}", f"--log_format={given.log_format}"]
        if given.api_key_file is not None:
            more.append(f"--api_key_file={given.api_key_file.absolute()}")
        fleet = Fleet(given.models, options, more)
        server = FleetServer(fleet, reached, given.log_level)
        listener = listen(given.host, given.port)
        _LOG.info(
            "listening on %s, loading %s",
            address(listener, server.config.is_ssl),
            ", ".join(fleet.lacking),
        )
        with heeding_signals(server.handle_exit):
            server.run(sockets=[listener])


if __name__ == "__main__":
    main()

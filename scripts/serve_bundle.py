"""Serves a bundle over HTTP.

The port is open from the start; `/health` says 503 until the model is there, partitioned for the
mesh, compiled, warm, and its golden prompts come out as when it was exported. The chat page is at
`/`, OpenAI's endpoints are under `/v1`, KServe's under `/v2`, metrics at `/metrics`.

Examples:
    scripts/serve llama-1b
    scripts/serve llama-70b --mesh data=1,model=8 --host 0.0.0.0 --api_key secret
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu scripts/serve mine
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from rich.console import Console

from scripts.flags import bundle as bundle_flags
from scripts.flags.user_errors import ending_on_interrupt, one_message
from serving.bundle.function import BundleError
from serving.errors import ServingError
from serving.http.server import serve
from serving.http.service import Loaded, Options
from serving.load import load_model
from spmd.cli.flags import Parser
from spmd.errors import SpmdError

USER_ERRORS = (BundleError, ServingError, SpmdError, OSError)
"""What a user can mend: one message instead of a traceback."""

KEYS = "SPMD_API_KEYS"

LIMITS = {
    "max_waiting": "requests that wait for a slot at most; then 429",
    "choices": "completions of one request at most",
    "stops": "stop strings of one request at most",
    "body_bytes": "the largest body of a request",
    "body_seconds": "that a body may take to arrive",
    "bodies_bytes": "of all bodies in memory; then 429",
    "text_threads": "texts that are tokenized at a time, of short and of long ones each",
    "header_seconds": "that a client that connects may take to send a request's headers",
    "write_seconds": "after which an answer that nobody reads is cut off, its request cancelled",
    "connections": "at most; then 503",
    "stall_seconds": "after which a call of the model counts as hung",
    "drain_seconds": "that requests have to finish after SIGTERM",
}
"""Fields of `Options` that are flags as well."""


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("scripts/serve", __doc__)
    bundle_flags.add_flags(parser)
    default = Options()
    add = parser.add_argument
    add("--name", help="of the model in requests (default: the bundle's)")
    add("--host", default="127.0.0.1", help="to listen on; 0.0.0.0 is everywhere")
    add("--port", type=int, default=8000, help="0: any free one")
    add(
        "--api_key",
        action="append",
        default=[],
        help=f"clients have to name one (repeatable; also in ${KEYS}, joined by commas)",
    )
    add(
        "--token_budget",
        type=int,
        help="rows of a group in a step that draws tokens and reads prompts; fewer make the times "
        "between tokens shorter, more that to the first token (default: by predicted times)",
    )
    for name, text in LIMITS.items():
        value = getattr(default, name)
        add(f"--{name}", type=type(value), default=value, help=text)
    add(
        "--log_level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="least important lines to log",
    )
    return parser


def options(given: argparse.Namespace) -> Options:
    """How the server is to behave."""
    keys = [*given.api_key, *os.environ.get(KEYS, "").split(",")]
    return Options(
        api_keys=tuple(key for key in keys if key),
        token_budget=given.token_budget,
        **{name: getattr(given, name) for name in LIMITS},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

    def load() -> Loaded:
        return load_model(bundle_flags.load(given, console), given.bundle, given.name)

    with ending_on_interrupt(), one_message(*USER_ERRORS):
        serve(load, given.host, given.port, options(given), log_level=given.log_level)


if __name__ == "__main__":
    main()

"""The flags of scripts that serve HTTP: where, for whom, and what they log."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.cli.flags import Parser
from spmd.models.fields import of_fields, taken
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.logs import FORMATS

KEYS = "SPMD_API_KEYS"

LIMITS = {
    "body_bytes": "the largest body of a request",
    "body_seconds": "that a body may take to arrive",
    "bodies_bytes": "of all bodies in memory; then 429",
    "header_seconds": "that a client that connects may take to send a request's headers",
    "write_seconds": "after which an answer that nobody reads is cut off, its request cancelled",
    "connections": "at most; then 503",
    "address_connections": "of one address at most, unless it is a trusted proxy; then 429",
    "drain_seconds": "that requests have to finish after SIGTERM",
}
"""Fields of `ServerOptions` about connections and bodies, which are flags as well."""

HTTP = {
    "ssl_certfile": "PEM: the certificate and those that sign it; serves HTTPS alone",
    "ssl_keyfile": "PEM: its key, unless that is in the same file",
    "allow_origins": "sites whose pages may use the server, joined by commas, as in "
    "https://chat.example; * is any (default: none)",
    "allowed_hosts": "names by which it may be asked for, joined by commas, as in *.chat.example; "
    "* is any (default: on a loopback address localhost and addresses, else any)",
    "root_path": "path under which a proxy offers the server, and removes",
    "forwarded_allow_ips": "proxies whose X-Forwarded-For is believed: addresses and networks, "
    "joined by commas, as in 10.0.0.0/8; * is any (default: none)",
    "grpc_port": "serves KServe's protocol by gRPC, too, as tritonclient.grpc speaks it; 0: any "
    "free one; needs the extra grpc",
    "otlp_endpoint": "collector of OpenTelemetry's traces, as in http://localhost:4318; needs the "
    "extra otlp",
}
"""All fields of `HttpOptions`."""


def add_flags(parser: Parser, limits: Mapping[str, str]) -> None:
    """Adds them, `limits` among them."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="to listen on; 0.0.0.0 is everywhere")
    add("--port", type=int, default=8000, help="0: any free one")
    add(
        "--api_key",
        action="append",
        default=[],
        help=f"clients have to name one (repeatable; also in ${KEYS}, joined by commas)",
    )
    of_options = of_fields(add, ServerOptions)
    of_options(
        "--api_key_file", type=Path, help="YAML of more keys and their limits; read when it changes"
    )
    for name, text in limits.items():
        of_options(f"--{name}", help=text)
    add(
        "--log_level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="least important lines to log",
    )
    add("--log_format", default="text", choices=FORMATS, help="json: an object a line")
    of_http = of_fields(add, HttpOptions)
    for name, text in HTTP.items():
        of_http(f"--{name}", help=text)


def options(given: argparse.Namespace, **more: Any) -> ServerOptions:
    """How a server is to behave; `more` are fields that no flag has as they are."""
    keys = [*given.api_key, *os.environ.get(KEYS, "").split(",")]
    return taken(ServerOptions, given, api_keys=tuple(key for key in keys if key), **more)

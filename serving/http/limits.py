"""The server's limits, keys and defaults, the most that a request asks for, and how it is reached.

How it is reached: TLS, proxies, pages of other sites, and where its traces go.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spmd.serving.engine.backend import Sampling
from spmd.serving.errors import ServingError
from spmd.serving.http.tools.formats import BY_NAME

ANY = "*"

GENERATION_CONFIGS = ("auto", "none")

_ORIGIN = re.compile(r"https?://[^/\s?#@]+")


@dataclasses.dataclass(frozen=True)
class HttpOptions:
    """What stands between the server and its clients.

    Raises:
      ServingError: one of them makes no sense.
    """

    # PEM, the certificate and those that sign it; None is plain HTTP
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None  # PEM, its key; None if it is in `ssl_certfile`, too
    # sites whose pages may use the server, as in `https://chat.example`; `*` is any
    allow_origins: tuple[str, ...] = ()
    # names by which the server may be asked for, such as `*.chat.example`; `*` is any, and none is
    # localhost and addresses. None: none on a loopback address, else any.
    allowed_hosts: tuple[str, ...] | None = None
    # the path under which a proxy offers the server, and which the proxy removes
    root_path: str = ""
    # addresses and networks of proxies whose `X-Forwarded-For` says who a client is; `*` trusts
    # everybody
    forwarded_allow_ips: tuple[str, ...] = ()
    # where KServe's protocol is served by gRPC, too; 0: any free port
    grpc_port: int | None = None
    # a collector of OpenTelemetry's traces, as in `http://localhost:4318`
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ServingError("ssl_keyfile needs ssl_certfile: a key without its certificate")
        for origin in self.allow_origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ServingError(
                    f"allow_origins: {origin!r} is no origin; one is like https://chat.example or "
                    "http://localhost:3000, without a path"
                )
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ServingError(f"root_path: {self.root_path!r} is not like /models/llama")
        for address in (one for one in self.forwarded_allow_ips if one != ANY):
            try:  # uvicorn would take what is none for a name that no client ever has
                ipaddress.ip_network(address)
            except ValueError as error:
                raise ServingError(
                    f"forwarded_allow_ips: {error}; 10.0.0.7 and 10.0.0.0/8 are examples"
                ) from error
        if self.otlp_endpoint is not None:
            parts = urlsplit(self.otlp_endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ServingError(
                    f"otlp_endpoint: {self.otlp_endpoint!r} is not like http://localhost:4318"
                )


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The most that a request may ask for."""

    max_length: int  # tokens of prompt and completion together
    vocab_size: int  # number of token ids
    top_logprobs: int  # alternatives reported for each token
    choices: int = 32  # completions of one request, over all of its prompts
    stops: int = 16  # number of stop strings
    stop_length: int = 256  # characters of one stop string
    # how tokens are drawn where a request does not say
    sampling: Sampling = dataclasses.field(default_factory=Sampling)


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """The server's limits and keys.

    Raises:
      ServingError: a number is too small.
    """

    # a request needs one of them; if there are none, anybody may use the model
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None  # more keys, with limits of each, see `spmd.serving.http.keys`
    # how many requests there may be beyond those that have slots. Those whose text is being
    # tokenized count as well.
    max_waiting: int = 256
    # rows of a group in a step that has both rows that draw and chunks of prompts; None takes what
    # the model's backend finds best
    token_budget: int | None = None
    choices: int = 32  # the most completions that one request may ask for
    stops: int = 16  # the most stop strings that one request may have
    grammar_bytes: int = 64 * 2**10  # the largest grammar, schemas and tools included
    # how the model writes calls of tools; None takes what its chat template tells
    tool_format: str | None = None
    # how tokens are drawn where a request does not say: `auto` takes what the model's own
    # `generation_config.json` says, `none` leaves that out
    generation_config: str = "auto"
    # fields of such a file that count instead of the model's
    override_generation_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    body_bytes: int = 16 * 2**20  # the largest body of a request
    body_seconds: float = 30.0  # a body has to arrive within this time
    bodies_bytes: int = 256 * 2**20  # how much memory all bodies together may take
    # how many texts are tokenized at a time, of short ones and of long ones each
    text_threads: int = 2
    # a client that connects has to send a request's headers within this time
    header_seconds: float = 20.0
    write_seconds: float = 120.0  # an answer of which nothing is read for so long is cut off
    connections: int = 4096  # how many there may be
    address_connections: int = 1024  # how many of them may come from one address
    # a call of the model that takes longer counts as hung: `/health` says 503
    stall_seconds: float = 300.0
    drain_seconds: float = 30.0  # how long requests may go on when the server is told to end
    # folder below which adapters may be loaded while the server runs; None: they may not
    adapters_from: str | None = None

    def __post_init__(self) -> None:
        least = {
            "max_waiting": 0, "token_budget": 1, "choices": 1, "stops": 0, "grammar_bytes": 1,
            "body_bytes": 1, "body_seconds": 0, "bodies_bytes": 1, "text_threads": 1,
            "header_seconds": 0, "write_seconds": 0, "connections": 1, "address_connections": 1,
            "stall_seconds": 0, "drain_seconds": 0,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:  # nor NaN
                raise ServingError(f"{name} is {value}; it has to be at least {low}")
        if self.generation_config not in GENERATION_CONFIGS:
            known = " or ".join(GENERATION_CONFIGS)
            raise ServingError(f"generation_config is {self.generation_config!r}, not {known}")
        if self.adapters_from is not None and not Path(self.adapters_from).is_dir():
            raise ServingError(f"adapters_from is {self.adapters_from!r}; it has to be a folder")
        if self.tool_format is not None and self.tool_format not in BY_NAME:
            raise ServingError(
                f"tool_format is {self.tool_format!r}; it has to be one of {', '.join(BY_NAME)}"
            )

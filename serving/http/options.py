"""How the server is reached: TLS, proxies, pages of other sites, and where its traces go."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from urllib.parse import urlsplit

from serving.errors import ServingError

ANY = "*"

_ORIGIN = re.compile(r"https?://[^/\s?#@]+")


@dataclasses.dataclass(frozen=True)
class HttpOptions:
    """What stands between the server and its clients.

    Attributes:
      ssl_certfile: PEM, the certificate and those that sign it; None is plain HTTP.
      ssl_keyfile: PEM, its key; None if it is in `ssl_certfile`, too.
      allow_origins: sites whose pages may use the server, as in `https://chat.example`; `*` is any.
      root_path: the path under which a proxy offers the server, and which the proxy removes.
      forwarded_allow_ips: addresses and networks of proxies whose `X-Forwarded-For` says who a
        client is; `*` trusts everybody.
      otlp_endpoint: a collector of OpenTelemetry's traces, as in `http://localhost:4318`.

    Raises:
      ServingError: one of them makes no sense.
    """

    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allow_origins: tuple[str, ...] = ()
    root_path: str = ""
    forwarded_allow_ips: tuple[str, ...] = ()
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
        for address in self.forwarded_allow_ips:
            if address != ANY:
                _check_address(address)
        if self.otlp_endpoint is not None:
            parts = urlsplit(self.otlp_endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ServingError(
                    f"otlp_endpoint: {self.otlp_endpoint!r} is not like http://localhost:4318"
                )


def _check_address(address: str) -> None:
    """Refuses what is no address: uvicorn would take it for a name that no client ever has."""
    try:
        ipaddress.ip_network(address)
    except ValueError as error:
        raise ServingError(
            f"forwarded_allow_ips: {error}; 10.0.0.7 and 10.0.0.0/8 are examples"
        ) from error

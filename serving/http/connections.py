"""Connections: how many an address may have, and when those end on which nothing happens."""

import asyncio
import contextlib
import dataclasses
import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spmd.serving.errors import ApiError
from spmd.serving.http.admission import address_of
from spmd.serving.http.limits import ANY, ServerOptions
from spmd.serving.http.requests import error_response
from spmd.serving.http.traffic import Traffic

HEADER_BYTES = 2**16
"""So long may headers be, and what frames a body beyond as many bytes as the body has."""

TOLD = 16
"""So many connections of an address beyond its limit are told why they end; others just end."""

TOLD_SECONDS = 1.0
"""So long they have to send the request that is answered so."""

REFUSED = "refused"
"""In the state of a request's scope: that its connection is one too many."""


class Addresses:
    """How many connections each address has.

    Those of trusted proxies, which bring the requests of many, are not counted.

    Args:
      most: of one address.
      proxies: addresses and networks; `*` is all.
      traffic: is told of those who get no answer.
    """

    def __init__(
        self, most: int, proxies: Sequence[str] = (), traffic: Traffic | None = None
    ) -> None:
        self._most, self._traffic = most, traffic
        self._counts: Counter[str] = Counter()
        self._is_open = ANY in proxies
        self._proxies = [ipaddress.ip_network(proxy) for proxy in proxies if proxy != ANY]

    def enter(self, host: str | None) -> int:
        """Counts one more connection; returns how many beyond the limit there are with it.

        Args:
          host: where it comes from; None where there are no addresses.
        """
        if host is None or self._is_trusted(host):
            return 0
        name = address_of(host)
        self._counts[name] += 1
        return max(0, self._counts[name] - self._most)

    def leave(self, host: str | None) -> None:
        """Counts one less."""
        if host is None or self._is_trusted(host):
            return
        name = address_of(host)
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name]

    def turned_away(self) -> None:
        """Notes a connection that ended without an answer."""
        if self._traffic is not None:
            self._traffic.refused(too_many(self._most))

    def _is_trusted(self, host: str) -> bool:
        if self._is_open or not self._proxies:
            return self._is_open
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)


def too_many(most: int) -> ApiError:
    """What those are told who have too many connections."""
    return ApiError(
        429,
        f"there are {most} connections from this address already: use those, or close some",
        code="connections_full",
        retry_after=1,
    )


@dataclasses.dataclass(eq=False)
class Refusing:
    """An app that answers with refusals what it should not answer at all.

    That is what comes on connections beyond the limit of their address, and what is meant for
    another host: a page of any site can have its own name resolve to this machine (DNS rebinding),
    and would be the same site as the server for the browser then.
    """

    app: ASGIApp
    most: int  # connections of one address
    hosts: Sequence[str] = (ANY,)  # as in `HttpOptions.allowed_hosts`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        error = self._error(scope)
        if error is None:
            await self.app(scope, receive, send)
            return
        response = error_response(Request(scope), error)
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        if REFUSED in scope.get("state", {}):
            return too_many(self.most)
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) > 1 or (not given and scope["http_version"] == "1.1"):  # RFC 9112, 3.2
            return ApiError(400, f"one Host header is needed, not {len(given)}")
        if not given or ANY in self.hosts or is_host(given[0], self.hosts):
            return None
        name = given[0][:100]
        message = f"the server is not called {name}: --allowed_hosts says what it is called"
        return ApiError(421, message, code="host_not_allowed")


def is_host(given: str, hosts: Sequence[str]) -> bool:
    """Whether a `Host` header names one of some hosts, whatever the port, as `Refusing` has it.

    Example:
      >>> is_host("a.chat.example:8000", ["*.chat.example"]), is_host("[::1]:80", [])
      (True, True)
    """
    try:
        name = urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return False
    if hosts:
        return any(
            name == host.lower() or (host[:2] == "*." and name.endswith(host[1:].lower()))
            for host in hosts
        )
    # No name server has a say in what an address is.
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name == "localhost" or name.endswith(".localhost")


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 that closes connections on which no request comes, or of which nothing is read.

    Without it, clients that connect and send nothing would use up all connections, and answers that
    nobody reads all memory. Who has too many connections is told so on one more, which then closes.
    """

    options: ServerOptions
    addresses: Addresses

    _host: str | None = None
    _head = _body = 0  # bytes of the request that comes in: all but its body, and that
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer, or turns the connection away."""
        super().connection_made(transport)
        self._host = self.client[0] if self.client else None
        beyond = self.addresses.enter(self._host)
        if not beyond:
            self._watch()
            return
        if beyond > TOLD:
            self._turn_away()
            return
        self.app_state = {**self.app_state, REFUSED: True}
        self._timer = self.loop.call_later(TOLD_SECONDS, self._turn_away)

    def data_received(self, data: bytes) -> None:
        """Reads on; refuses headers, trailers and framing that grow without an end."""
        self._head += len(data)
        super().data_received(data)
        if self._head > HEADER_BYTES + self._body and not self.transport.is_closing():
            self.send_400_response(f"The headers are too large: {HEADER_BYTES} bytes are the most.")

    def on_message_begin(self) -> None:
        """Counts anew."""
        super().on_message_begin()
        self._head = self._body = 0

    def on_body(self, body: bytes) -> None:
        """Counts what is body."""
        super().on_body(body)
        self._head -= len(body)
        self._body += len(body)

    def _turn_away(self) -> None:
        """Ends a connection beyond the limit, unless its answer is on its way."""
        if self.cycle is None:
            self.addresses.turned_away()
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        self.addresses.leave(self._host)
        if self._timer is not None:
            self._timer.cancel()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts a timer: more is to be sent than the client reads."""
        super().pause_writing()
        # Then the request is cancelled, as if the client had hung up.
        seconds = self.options.write_seconds
        self._write_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the timer."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that is not used, even if the last answer was not read."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _watch(self) -> None:
        self._timer = self.loop.call_later(
            self.options.header_seconds, self._check, self.cycle, self._stuck
        )

    def _check(self, cycle: Any, was_stuck: bool) -> None:
        """Closes the connection if no request had come by the last check and none has since."""
        if was_stuck and self._stuck and self.cycle is cycle:
            self.transport.close()
        else:
            self._watch()

    @property
    def _stuck(self) -> bool:
        """Whether a request is due but has not come; between requests uvicorn's own timer runs."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and self.timeout_keep_alive_task is None

"""Runs the server's process: it listens first, then loads the model, and ends in two steps.

On SIGTERM or SIGINT new requests are refused with 503. Those that run may finish within a time
limit; then the process ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvicorn

from spmd.serving.errors import ServingError
from spmd.serving.http import logs
from spmd.serving.http.app import make_app
from spmd.serving.http.connections import Addresses, Protocol
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.service import Service


class Others(typing.Protocol):
    """The other processes that run the model, where there are some: what ends one ends all."""

    def heed(self, error: Exception) -> None:
        """Is told what the model raised; does not return if that ends the processes."""

    def attend(self, drain: Callable[[], None], lose: Callable[[str], None]) -> None:
        """Takes what to do if another process is asked to end, and what before a sudden end.

        Args:
          drain: begins to drain.
          lose: tells clients why, and returns when they have been told.
        """

    def end(self, asked: bool) -> NoReturn:
        """Ends all processes.

        Args:
          asked: whether this one was asked to end; else they are to be started again.
        """


if TYPE_CHECKING:
    from spmd.serving.http.tracing import Tracing

_LOG = logging.getLogger("serving")

IDLE_SECONDS = 75
"""Connections are kept so long between requests: longer than proxies keep theirs, so that the proxy
closes first. Otherwise a request could arrive at a connection that is just being closed."""

CLOSING_SECONDS = 5
"""When the last request is done, so long may answers take to be sent."""

SWITCH_SECONDS = 0.001
"""How long a thread may keep others from running Python. One thread issues steps, one makes text,
and one sends it. With Python's own 5 ms the first one, back from waiting for the device, could wait
for both of the others as long as a step takes, and then the device waits for it."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

LAST_WORDS_SECONDS = 1
"""So long the server says why it ends, when it has to end without having drained."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """uvicorn's server, but the engine drains before the port closes.

    Args:
      http: TLS, proxies, other sites, traces.

    Raises:
      ServingError: the certificate cannot be used, or traces lack their libraries.
    """

    def __init__(
        self, service: Service, log_level: str = "info", http: HttpOptions | None = None
    ) -> None:
        http = http or HttpOptions()
        self._tracing = _tracing(http.otlp_endpoint)
        most = service.options.address_connections
        addresses = Addresses(most, http.forwarded_allow_ips, service.traffic)
        shared = {"options": service.options, "addresses": addresses}  # by all connections
        config = uvicorn.Config(
            make_app(service, http, self._tracing),
            http=type("Protocol", (Protocol,), shared),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=log_level,
            access_log=False,  # `spmd.serving.http.app` writes it
            limit_concurrency=service.options.connections,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=2 * CLOSING_SECONDS,
            server_header=False,
            proxy_headers=bool(http.forwarded_allow_ips),
            forwarded_allow_ips=list(http.forwarded_allow_ips),
            root_path=http.root_path,
            ssl_certfile=http.ssl_certfile,
            ssl_keyfile=http.ssl_keyfile,
        )
        try:
            config.load()
        except OSError as error:
            files = " and ".join(filter(None, (http.ssl_certfile, http.ssl_keyfile)))
            raise ServingError(f"TLS with {files}: {error.strerror or error}") from error
        super().__init__(config)
        self.service = service
        self.over = threading.Event()
        self._last_words: float | None = None
        self.signals = 0
        self._draining = False
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one drains, the second one ends the process at once."""
        self.signals += 1
        self.drain()
        if self.signals > 1:
            self.should_exit = self.force_exit = True

    def drain(self) -> None:
        """Begins to end, as the first signal does."""
        self._draining = True

    def lose(self, why: str) -> None:
        """Fails all requests, and waits until clients have been told; from another thread."""
        _LOG.error("%s; no more requests are taken", why)
        self.service.lose(why)
        self.over.wait(LAST_WORDS_SECONDS + 2 * CLOSING_SECONDS)

    async def on_tick(self, counter: int) -> bool:
        """Checks whether it is time to end; uvicorn calls it ten times a second."""
        if self.service.lost is not None:
            if self._last_words is None:
                self._last_words = time.monotonic() + LAST_WORDS_SECONDS
            self.should_exit |= time.monotonic() > self._last_words
            return await super().on_tick(counter)
        if self._draining and self._deadline is None:
            seconds = self.service.options.drain_seconds
            _LOG.info("draining: no new requests; those that run have %g seconds", seconds)
            self.service.drain()
            self._deadline = time.monotonic() + seconds
        if self._deadline is not None and not self.should_exit:
            is_late = time.monotonic() > self._deadline
            if is_late:
                _LOG.warning("draining took too long: what still runs fails")
            if is_late or self.service.idle:
                await asyncio.to_thread(self.service.stop)
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections when their answers are sent, or soon after; sends the last traces."""
        cut = asyncio.get_running_loop().call_later(CLOSING_SECONDS, self._cut)
        await super().shutdown(sockets)
        cut.cancel()
        if self._tracing is not None and not self.force_exit:
            await asyncio.to_thread(self._tracing.close)

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Protocol):
                connection.transport.abort()


def _tracing(endpoint: str | None) -> Tracing | None:
    if endpoint is None:
        return None
    from spmd.serving.http.tracing import Tracing  # it needs libraries that need not be there

    return Tracing(endpoint)


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket.

    Args:
      host: an IPv4 or IPv6 address, or a host name.
      port: 0 takes any free one.

    Raises:
      ServingError: the address cannot be used.
    """
    if not 0 <= port < 2**16:
        raise ServingError(f"cannot listen on {host}:{port}: ports are below {2**16}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # The library repeats the address in brackets.
        reason = str(error.strerror).partition(" (while")[0]
        raise ServingError(f"cannot listen on {host}:{port}: {reason}") from error


def serve(
    load: Callable[[], Loaded],
    host: str = "127.0.0.1",
    port: int = 8000,
    options: ServerOptions | None = None,
    *,
    http: HttpOptions | None = None,
    log_level: str = "info",
    log_format: logs.LogFormat = "text",
    others: Others | None = None,
) -> None:
    """Serves a model until a signal comes.

    Args:
      load: loads the model, in a thread of its own. Until it is done, `/health` says 503.
      host: where to listen; `0.0.0.0` listens on all interfaces.
      options: limits and keys.
      http: TLS, proxies, other sites, traces.
      log_level: of the messages on stderr.
      log_format: of these messages: lines of text, or a JSON object a line.
      others: the other processes that run the model; with them it does not return, but ends the
        process.

    Raises:
      ServingError: the port, or a file or library that `http` needs, cannot be used; or the model
        cannot be served.
      Exception: whatever `load` raised, after the port was closed.

    Example:
      >>> serve(lambda: load_bundle("llama-1b", mesh), port=8000)
    """
    logs.set_up(log_level, log_format)
    sys.setswitchinterval(SWITCH_SECONDS)
    http = http or HttpOptions()
    if http.allowed_hosts is None and host in LOOPBACK:
        http = dataclasses.replace(http, allowed_hosts=())
    service = Service(options) if others is None else Service(options, others.heed)
    server = Server(service, log_level, http)
    listener = listen(host, port)
    address, actual_port = listener.getsockname()[:2]
    scheme = "https" if server.config.is_ssl else "http"
    failures: list[BaseException] = []

    def run_load() -> None:
        started = time.monotonic()
        try:
            loaded = load()
            service.become_ready(loaded)
        except BaseException as error:
            failures.append(error)
            service.status = "failed"
            server.should_exit = True
        else:
            _LOG.info("%s, after %.1f s", _describe(loaded), time.monotonic() - started)

    loader = threading.Thread(target=run_load, name="load", daemon=True)
    with _heeding_signals(server):
        _LOG.info("listening on %s://%s:%d, loading the model", scheme, address, actual_port)
        if others is not None:
            others.attend(server.drain, server.lose)
        loader.start()
        server.run(sockets=[listener])
        if service.lost is None:
            service.stop()
    server.over.set()
    if failures:
        raise failures[0]
    if service.lost is None:
        _LOG.info("stopped")
    if others is not None:
        others.end(asked=server.signals > 0)
    if loader.is_alive() or not service.ended:
        # The process was told to end while the model loads, or in a long call. A thread inside XLA
        # crashes when the interpreter shuts down around it, so the process ends without that.
        logging.shutdown()
        os._exit(0)


@contextlib.contextmanager
def _heeding_signals(server: Server) -> Iterator[None]:
    """Handles signals while the model loads; uvicorn does so only once its loop runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.signal(sig, server.handle_exit) for sig in SIGNALS}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def _describe(loaded: Loaded) -> str:
    if loaded.language is None:
        return f"ready: {loaded.name}, a model of tensors"
    limits, info = loaded.language.limits, loaded.language.info
    facts = ", ".join(f"{name} {info[name]}" for name in ("mesh", "device_kind") if name in info)
    return (
        f"ready: {loaded.name}, {limits.slots} slots of {limits.longest} tokens, "
        f"{limits.groups * limits.pages} pages of {limits.page}, "
        f"{loaded.language.compile_total} programs compiled{', ' if facts else ''}{facts}"
    )

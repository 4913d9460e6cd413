"""Runs the server's process: it listens first, then loads the model, and ends in two steps.

On SIGTERM or SIGINT new requests are refused with 503. Those that run may finish within a time
limit; then the process ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import importlib.util
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvicorn
from starlette.types import ASGIApp

from spmd.serving.engine.core import Core
from spmd.serving.engine.remote import Line, Obedient, RemoteCore
from spmd.serving.errors import ServingError
from spmd.serving.http import logs
from spmd.serving.http.app import make_app
from spmd.serving.http.connections import Addresses, Protocol
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.service import STOP_SECONDS, Service
from spmd.serving.http.traffic import Traffic

if TYPE_CHECKING:
    from spmd.serving.bundle.group import Leader
    from spmd.serving.http.tracing import Tracing

_LOG = logging.getLogger("serving")

IDLE_SECONDS = 75
"""Connections are kept so long between requests: longer than proxies keep theirs, so that the proxy
closes first. Otherwise a request could arrive at a connection that is just being closed."""

CLOSING_SECONDS = 5
"""When the last request is done, so long may answers take to be sent."""

SWITCH_SECONDS = 0.001
"""How long a thread may keep others from running Python. One thread makes text, one sends it, and
one issues steps unless that is in another process. With Python's own 5 ms the last one, back from
waiting for the device, could wait for both of the others as long as a step takes, and then the
device waits for it."""

UNIX = "unix:"

LOOPBACK = ("127.0.0.1", "::1", "localhost")

LAST_WORDS_SECONDS = 1
"""So long the server says why it ends, when it has to end without having drained."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def server_config(
    app: ASGIApp, traffic: Traffic, options: ServerOptions, http: HttpOptions, log_level: str
) -> uvicorn.Config:
    """How uvicorn is to serve an app.

    Raises:
      ServingError: the certificate cannot be used.
    """
    addresses = Addresses(options.address_connections, http.forwarded_allow_ips, traffic)
    shared = {"options": options, "addresses": addresses}  # by all connections
    config = uvicorn.Config(
        app,
        http=type("Protocol", (Protocol,), shared),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=log_level,
        access_log=False,  # `spmd.serving.http.app` writes it
        limit_concurrency=options.connections,
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
    return config


class Serving(uvicorn.Server):
    """uvicorn's server, with the same app behind gRPC if a port for it is given.

    Args:
      app: what is served.
      config: how.
      http: has the port.
      options: has the largest body.
    """

    def __init__(
        self, app: ASGIApp, config: uvicorn.Config, http: HttpOptions, options: ServerOptions
    ) -> None:
        super().__init__(config)
        self._grpc = app, http, options

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is to end."""
        app, http, options = self._grpc
        async with contextlib.AsyncExitStack() as stack:
            if http.grpc_port is not None and sockets:
                from spmd.serving.http.kserve import grpc_front  # its packages need not be there

                host = sockets[0].getsockname()[0]
                port = await stack.enter_async_context(grpc_front.serving(app, host, http, options))
                _LOG.info("listening for gRPC on %s:%d", host, port)
            await super().serve(sockets)


class Server(Serving):
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
        self._tracing: Tracing | None = None
        if http.otlp_endpoint is not None:
            from spmd.serving.http.tracing import Tracing  # its libraries need not be there

            self._tracing = Tracing(http.otlp_endpoint)
        app = make_app(service, http, self._tracing)
        config = server_config(app, service.traffic, service.options, http, log_level)
        super().__init__(app, config, http, service.options)
        self.service = service
        self.over = threading.Event()
        self._last_words: float | None = None
        self.signals = 0
        self.is_orphan = False
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
        if self.is_orphan:  # the port is free for who takes this one's place
            for one in self.servers:
                one.close()
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


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket.

    Args:
      host: an IPv4 or IPv6 address, or a host name; or `unix:PATH`, of a socket to be made.
      port: 0 takes any free one.

    Raises:
      ServingError: the address cannot be used.
    """
    if host.startswith(UNIX):
        made = socket.socket(socket.AF_UNIX)
        made.bind(host.removeprefix(UNIX))
        made.listen(1024)
        return made
    if not 0 <= port < 2**16:
        raise ServingError(f"cannot listen on {host}:{port}: ports are below {2**16}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # The library repeats the address in brackets.
        reason = str(error.strerror).partition(" (while")[0]
        raise ServingError(f"cannot listen on {host}:{port}: {reason}") from error


def address(listener: socket.socket, is_ssl: bool) -> str:
    """Where a socket listens, for people."""
    where = listener.getsockname()
    scheme = "https" if is_ssl else "http"
    return where if isinstance(where, str) else "{}://{}:{}".format(scheme, *where)


def at(host: str, http: HttpOptions) -> HttpOptions:
    """With the names by which a server that listens there may be asked for.

    Raises:
      ServingError: there can be no gRPC, for want of its package or of the port.
    """
    if http.grpc_port is not None:
        if not all(importlib.util.find_spec(name) for name in ("grpc", "tritonclient")):
            raise ServingError('grpc_port: pip install "spmd[grpc]" installs what it needs')
        listen(host, http.grpc_port).close()
    if http.allowed_hosts is None and host in LOOPBACK:
        return dataclasses.replace(http, allowed_hosts=())
    return http


def serve(
    load: Callable[[], Loaded],
    host: str = "127.0.0.1",
    port: int = 8000,
    options: ServerOptions | None = None,
    *,
    http: HttpOptions | None = None,
    log_level: str = "info",
    log_format: logs.LogFormat = "text",
    others: Leader | None = None,
    apart: bool = False,
) -> None:
    """Serves a model until a signal comes.

    Args:
      load: loads the model, in a thread of its own. Until it is done, `/health` says 503.
      host: where to listen; `0.0.0.0` listens on all interfaces.
      options: limits and keys.
      http: TLS, proxies, other sites, traces.
      log_level: of the messages on stderr.
      log_format: of these messages: lines of text, or a JSON object a line.
      others: leads the other processes that run the model; with them it does not return, but ends
        the process.
      apart: whether a process of its own answers clients, which is forked from this one, so that
        nothing but the model's steps runs Python here. For language models, and without `others`.

    Raises:
      ServingError: the port, or a file or library that `http` needs, cannot be used; or the model
        cannot be served.
      Exception: whatever `load` raised, after the port was closed.

    Example:
      >>> serve(lambda: load_bundle("llama-1b", mesh), port=8000)
    """
    logs.set_up(log_level, log_format)
    sys.setswitchinterval(SWITCH_SECONDS)
    http = at(host, http or HttpOptions())
    options = options or ServerOptions()

    def make_server() -> Server:
        heed = (lambda error: None) if others is None else others.heed
        return Server(Service(options, heed), log_level, http)

    if apart:
        assert others is None
        _serve_apart(load, options, make_server, listen(host, port))
        return
    server = make_server()
    if others is not None:
        others.attend(server.drain, server.lose)
    loader, failures = _run(server, listen(host, port), load)
    server.over.set()
    if failures:
        raise failures[0]
    service = server.service
    if others is not None:
        others.end(asked=server.signals > 0)
    if loader.is_alive() or not service.ended:
        _end_at_once()


def _run(
    server: Server, listener: socket.socket, load: Callable[[], Loaded]
) -> tuple[threading.Thread, list[BaseException]]:
    """Serves until the end; returns the thread that loads, and what went wrong in it."""
    service = server.service
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
    with heeding_signals(server.handle_exit):
        _LOG.info("listening on %s, loading the model", address(listener, server.config.is_ssl))
        loader.start()
        server.run(sockets=[listener])
        if service.lost is None:
            service.stop()
    if service.lost is None and not failures:
        _LOG.info("stopped")
    return loader, failures


def _end_at_once() -> NoReturn:
    """Ends the process while the model loads, or in a long call.

    A thread inside XLA crashes when the interpreter shuts down around it.
    """
    logging.shutdown()
    os._exit(0)


# A process of its own that answers clients.

GONE = "the process that runs the model has ended"


def _serve_apart(
    load: Callable[[], Loaded],
    options: ServerOptions,
    make_server: Callable[[], Server],
    listener: socket.socket,
) -> None:
    """Forks the process that answers clients, and runs here what it asks for."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        ours.close()
        status = 1
        try:
            status = _answer_clients(Line(theirs), make_server, listener)
        except BaseException:
            _LOG.exception("the process that answers clients failed")
        finally:  # what the other process has begun before is not for this one to end
            logging.shutdown()
            os._exit(status)
    theirs.close()
    listener.close()
    faulthandler.enable()  # a crash inside XLA or a driver says where it was
    line = Line(ours)
    signals: list[int] = []
    failures: list[BaseException] = []
    loaded: list[tuple[Loaded, Obedient]] = []

    def run_load() -> None:
        try:
            found = load()
            if found.backend is None:
                raise ServingError(f"{found.name}: no language model")
            core = Core(found.backend, token_budget=options.token_budget)
            obedient = Obedient(core, line, found.adapt)
            loaded.append((found, obedient))
            plain = dataclasses.replace(found, backend=None, background=None, adapt=None)
            line.send("loaded", plain, core.limits, core.info, obedient.pulse())
        except BaseException as error:
            failures.append(error)
            line.send("failed")

    def pass_on(sig: int, frame: FrameType | None) -> None:
        signals.append(sig)
        if len(signals) > 2:
            os.kill(child, signal.SIGKILL)
        line.send("drain" if len(signals) == 1 else "exit")

    loader = threading.Thread(target=run_load, name="load", daemon=True)
    with heeding_signals(pass_on):
        for kind, content in line:
            if kind == "failed":
                failures.extend(content)
            elif kind == "answers":  # nothing is loaded for a server that cannot be
                loader.start()
            else:
                loaded[0][1].obey(kind, *content)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if failures:
        raise failures[0]
    if status and not signals:
        raise ServingError(f"the process that answers clients has ended with status {status}")
    for found, obedient in loaded:
        obedient.core.stop()
        obedient.core.join(STOP_SECONDS)
        is_adding = found.background is not None and found.background.is_alive()
        if is_adding or not obedient.core.ended:
            _end_at_once()
    if loader.is_alive():
        _end_at_once()


def _answer_clients(line: Line, make_server: Callable[[], Server], listener: socket.socket) -> int:
    """What the other process does; returns its status."""
    os.setsid()  # a terminal's signals are for the one that forked it, which passes them on
    try:
        server = make_server()
    except ServingError as error:
        line.send("failed", error)
        return 1
    line.send("answers")
    made: queue.SimpleQueue[Loaded | None] = queue.SimpleQueue()

    def read() -> None:
        core: RemoteCore | None = None
        for kind, content in line:
            if kind == "loaded":
                found, *about = content
                core = RemoteCore(line, *about)
                made.put(dataclasses.replace(found, core=core, adapt=core.adapt))
            elif kind == "failed":
                made.put(None)
            elif kind == "drain":
                server.drain()
            elif kind == "exit":
                server.should_exit = server.force_exit = True
            elif core is not None:
                core.heard(kind, *content)
        server.is_orphan = True
        if core is None:
            made.put(None)
        else:
            server.lose(GONE)
            core.heard("over")

    def receive() -> Loaded:
        loaded = made.get()
        if loaded is None:
            raise ServingError("the model was not loaded")
        return loaded

    threading.Thread(target=read, name="line", daemon=True).start()
    _, failures = _run(server, listener, receive)
    server.over.set()
    if failures and not isinstance(failures[0], ServingError):
        raise failures[0]
    if failures:
        line.send("failed", failures[0])
    return 0


@contextlib.contextmanager
def heeding_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals while the model loads; uvicorn does so only once its loop runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.signal(sig, handle) for sig in SIGNALS}
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

"""The real app behind a real socket, in a thread of the test's process."""

import json
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import httpx

from spmd.models.training.data.tokenizer import ByteTokenizer
from spmd.serving.engine.backend import Backend
from spmd.serving.engine.core import Core
from spmd.serving.engine.remote import Line, Obedient, RemoteCore
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.server import Server, listen
from spmd.serving.http.service import Service
from tests.serving.engine.fake_backend import FakeBackend
from tests.waiting import PATIENCE, wait_until

MODEL = "fake-llama"
TEXT = ByteTokenizer().decode


class Live(NamedTuple):
    url: str
    port: int
    service: Service
    backend: FakeBackend
    server: Server

    def alone(self, prompt: str, tokens: int, seed: int = 0) -> str:
        """What a prompt is completed with if nobody else is there."""
        return TEXT(self.backend.alone(prompt.encode(), tokens, seed))

    def numbers(self) -> dict[str, float]:
        lines = get(f"{self.url}/metrics").text.splitlines()
        return {name: float(x) for name, x in (v.rsplit(" ", 1) for v in lines if v[0] != "#")}

    def wait_idle(self) -> None:
        """Until every slot is free, and every page."""
        wait_until(lambda: self.service.idle)
        engine = self.service.language().engine
        wait_until(lambda: (lambda s: s.waiting == s.running == s.held == 0)(engine.state()))
        assert not engine._entries


@contextmanager
def wired(
    backend: Backend, token_budget: int | None, adapt: Callable[[int, str], None] | None = None
) -> Iterator[RemoteCore]:
    """A core at the other end of a line, as in a server whose model has a process of its own."""
    ours, theirs = (Line(end) for end in multiprocessing.Pipe())
    obedient = Obedient(Core(backend, token_budget=token_budget), ours, adapt)
    core = RemoteCore(theirs, backend.limits, backend.info, obedient.pulse())
    for line, take in ((ours, obedient.obey), (theirs, core.heard)):

        def read(line: Line = line, take: Callable[..., None] = take) -> None:
            for kind, content in line:
                if kind == "bye":
                    return
                take(kind, *content)

        threading.Thread(target=read, daemon=True).start()
    yield core
    ours.send("bye")
    theirs.send("bye")


def get(url: str, **more: Any) -> httpx.Response:
    return httpx.get(url, timeout=PATIENCE, **more)


def post(url: str, **more: Any) -> httpx.Response:
    return httpx.post(url, timeout=PATIENCE, **more)


def begin(
    live: Live, path: str, body: Any, address: str = "127.0.0.1", key: str = ""
) -> socket.socket:
    """Sends a request, and waits for nothing: what is not read waits in the server."""
    content = json.dumps(body).encode()
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    made.settimeout(PATIENCE)
    made.bind((address, 0))
    made.connect(("127.0.0.1", live.port))
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines.append(f"Authorization: Bearer {key}")
    made.sendall("\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode())
    made.sendall(content)
    return made


@contextmanager
def serving(
    backend: FakeBackend | None = None,
    options: ServerOptions | None = None,
    load: bool = True,
    http: HttpOptions | None = None,
    **loaded: Any,
) -> Iterator[Live]:
    """A server with the fake backend; at the end all slots are free."""
    backend = backend or FakeBackend()
    service = Service(options)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = Server(service, "critical", http)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    scheme = "https" if server.config.is_ssl else "http"
    live = Live(f"{scheme}://127.0.0.1:{port}", port, service, backend, server)
    thread.start()
    stack = ExitStack()
    try:
        if load:
            tokenizer = loaded.pop("tokenizer", None) or ByteTokenizer()
            core = stack.enter_context(wired(backend, service.options.token_budget))
            service.become_ready(Loaded(MODEL, None, tokenizer, core=core, **loaded))
        yield live
        if load and service.status == "ready":
            live.wait_idle()
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        service.stop()
        stack.close()
        assert not thread.is_alive()

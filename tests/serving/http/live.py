"""The real app behind a real socket, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from models.training.data.tokenizer import ByteTokenizer
from serving.http.server import Server, listen
from serving.http.service import Loaded, Options, Service
from tests.serving.engine.fake_backend import FakeBackend

MODEL = "fake-llama"
TEXT = ByteTokenizer().decode


class Live(NamedTuple):
    """A server that runs."""

    url: str
    port: int
    service: Service
    backend: FakeBackend
    server: Server

    def alone(self, prompt: str, tokens: int, seed: int = 0) -> str:
        """What a prompt is completed with if nobody else is there."""
        return TEXT(self.backend.alone(prompt.encode(), tokens, seed))

    def wait_idle(self) -> None:
        """Until every slot is free."""
        wait_until(lambda: self.service.idle)
        engine = self.service.language().engine
        assert engine.state()[:3] == (0, 0, 0.0)
        assert not engine._entries


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@contextmanager
def serving(
    backend: FakeBackend | None = None,
    options: Options | None = None,
    load: bool = True,
    **loaded: Any,
) -> Iterator[Live]:
    """A server with the fake backend; at the end all slots are free."""
    backend = backend or FakeBackend()
    service = Service(options)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = Server(service, "critical")
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    live = Live(f"http://127.0.0.1:{port}", port, service, backend, server)
    thread.start()
    try:
        if load:
            tokenizer = loaded.pop("tokenizer", None) or ByteTokenizer()
            service.become_ready(Loaded(MODEL, backend, tokenizer, **loaded))
        yield live
    finally:
        server.should_exit = True
        thread.join(20)
        service.stop()
        assert not thread.is_alive()

"""The server in a process of its own, which loads and runs when a test says so."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.serving.http.live import get
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys
from pathlib import Path
from spmd.models.training.data.tokenizer import ByteTokenizer
import spmd.serving.http.service
from spmd.serving.http.server import serve
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import ServerOptions
from tests.serving.engine.fake_backend import FakeBackend
from tests.waiting import PATIENCE, wait_until

FOLDER = Path(sys.argv[1])
spmd.serving.http.service.STOP_SECONDS = 0.1  # not ten for a held result

def load():
    wait_until((FOLDER / "load").exists)
    {extra}
    backend = FakeBackend()
    backend.gate.wait = lambda: wait_until((FOLDER / "run").exists)
    return Loaded("fake", backend, ByteTokenizer())

try:
    serve(load, port=0, options=ServerOptions(drain_seconds=PATIENCE), {serve})
except (ValueError, RuntimeError) as error:
    sys.exit(f"error: {{error}}")
"""


class Process:
    """A server: it loads, and the model runs, when we say so.

    Args:
      folder: an empty one, by which we say so.
      extra: a statement before the model is loaded.
      serve: more arguments of `serve`.
    """

    def __init__(self, folder: Path, extra: str = "", serve: str = "") -> None:
        command = [sys.executable, "-c", PROGRAM.format(extra=extra, serve=serve), str(folder)]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.folder = folder
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        wait_until(lambda: self.lines != [])
        found = re.search(r"listening on (http://127.0.0.1:\d+), loading", self.lines[0])
        assert found, self.lines
        self.url = found[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def let(self, what: str) -> None:
        (self.folder / what).touch()

    def wait_health(self, status: int) -> None:
        wait_until(lambda: get(f"{self.url}/health").status_code == status)

    def end(self) -> str:
        self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        return "".join(self.lines)


Start = Callable[..., Process]

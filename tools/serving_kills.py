"""Kills the processes of a server, one by one and in every phase, and prints what clients see.

For each row a tiny model is served by several processes of this machine, which the launcher starts
again. Clients stream completions all the time. One process gets SIGKILL, or all SIGTERM and one
SIGKILL while they drain. Printed is a table; status 1 if a client was cut off that could have been
told, or nobody was answered again.

Examples:
    tools/run serving_kills
    tools/run serving_kills --processes 4 --phases streams,draining
    tools/run serving_kills --phases loading,idle,streams --kills 30
"""

import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import httpx

from benchmarks.served import ROOT, write_tiny
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, words
from spmd.cli.specs import mesh_axes
from spmd.scripts.jobs.local import free_port

PHASES = ("loading", "idle", "streams", "draining")
MESH = "data=2,model=2"
CLIENTS = 8
PATIENCE = 300.0

NOTE = 'echo $$ >"$0.$JAX_PROCESS_ID.$SPMD_RESTART"; exec "$@"'
"""Writes down which process has which id, and becomes the program."""


class Group:
    """A server of several processes of this machine, under the launcher.

    Args:
      folder: for the log and the processes' ids.
      bundle: what is served.
      cache: folder of compiled programs.
      flags: more of scripts/serve.
    """

    def __init__(
        self,
        folder: Path,
        bundle: Path,
        processes: int,
        mesh: str,
        cache: Path,
        max_restarts: int = 1,
        flags: Sequence[str] = (),
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._pids, self._log = folder / "pid", folder / "log"
        devices = math.prod(mesh_axes(mesh).values()) // processes
        command = [
            sys.executable, "-m", "spmd.scripts.launch_job", "local", "--platform=cpu",
            f"--processes={processes}", f"--devices_per_process={devices}",
            f"--max_restarts={max_restarts}", "--grace_s=60",
            "--", "sh", "-c", NOTE, str(self._pids), sys.executable, "-m",
            "spmd.scripts.serve_bundle", str(bundle), f"--mesh={mesh}", f"--port={port}",
            f"--cache_dir={cache}", *flags,
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        with self._log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=ROOT)

    @property
    def log(self) -> str:
        """What all processes have written."""
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until processes have said a text so many times; what the launcher says does not count.

        Raises:
          RuntimeError: it does not come, or the job ends before.
        """
        end = time.monotonic() + PATIENCE
        while sum(text in line for line in self.log.splitlines() if line[:1] == "[") < times:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it did not happen:\n{self.log}")
            time.sleep(0.01)

    def signal(self, process: int, number: int, restart: int = 0) -> None:
        """A signal to one process, of the first start or a later one."""
        os.kill(int(Path(f"{self._pids}.{process}.{restart}").read_text()), number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def end(self) -> int:
        """SIGTERM to all; the launcher's exit code."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()


class Seen(NamedTuple):
    """What became of a request: when it began and ended, and how."""

    began: float
    ended: float
    outcome: str


class Clients:
    """Clients that stream one completion after another until they are told to end."""

    def __init__(self, url: str) -> None:
        self.seen: list[Seen] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Waits for the requests that are under way."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            outcome = ask(self._url)
            self.seen.append(Seen(began, time.monotonic(), outcome))
            self._over.wait(0 if outcome == "whole" else 0.2)


def ask(url: str) -> str:
    """What happens to a request: `whole`, `503`, `error event`, `refused` or `cut off`."""
    body = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
    except httpx.ConnectError:
        return "refused"
    except httpx.TransportError:
        return "cut off"
    if answer.status_code == 503 and "Retry-After" in answer.headers:
        return "503"
    if answer.status_code != 200:
        return f"status {answer.status_code}"
    if '"type":"service_unavailable_error"' in answer.text:
        return "error event"
    if '"error":' in answer.text:
        return "another error"
    return "whole" if answer.text.endswith("data: [DONE]\n\n") else "cut off"


class Row(NamedTuple):
    """A row of the table; `again` is None where nobody is to be answered again."""

    phase: str
    victim: int
    under_way: Counter[str]
    later: Counter[str]
    again: float | None
    code: int


def run(folder: Path, bundle: Path, cache: Path, processes: int, phase: str, victim: int) -> Row:
    """Serves, kills, and looks on."""
    clients: Clients | None = None
    with Group(folder, bundle, processes, MESH, cache) as group:
        group.wait_for("compiling" if phase == "loading" else " ready: ")
        if phase != "idle":
            clients = Clients(group.url)
            while phase != "loading" and len(clients.seen) < CLIENTS:
                time.sleep(0.01)
        time.sleep(0.5)
        if phase == "draining":
            group.process.terminate()
            group.wait_for("draining: ")
        killed = time.monotonic()
        group.signal(victim, signal.SIGKILL)
        clients = clients or Clients(group.url)
        again = None
        while phase != "draining" and again is None:
            done = [s.ended for s in clients.seen if s.began > killed and s.outcome == "whole"]
            again = min(done) - killed if done else None
            if time.monotonic() > killed + PATIENCE:
                break
            time.sleep(0.02)
        clients.end()
        code = group.end()
    under_way = [s.outcome for s in clients.seen if s.began < killed < s.ended]
    until = killed + (again or PATIENCE)
    later = [s.outcome for s in clients.seen if killed < s.began and s.ended < until]
    return Row(phase, victim, Counter(under_way), Counter(later), again, code)


def is_wrong(row: Row) -> bool:
    """Whether a client was cut off that could have been told, or the server did not come back."""
    could_tell = row.victim != 0
    cut = row.under_way["cut off"] if could_tell else 0
    return bool(cut or row.under_way["another error"]) or (
        row.again is None and row.phase != "draining"
    )


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run serving_kills", __doc__)
    add = parser.add_argument
    add("--processes", type=int, default=2, help="of the server; 2 or 4")
    add("--phases", type=words, default=PHASES, help="when a process is killed")
    add("--kills", type=int, help="how many (default: each process once in each phase)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, and print."""
    given = make_parser().parse_args(arguments)
    wrong: list[bool] = []
    print_head(("phase", "killed", "requests under way", "later ones, until", "answered again, s"))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        bundle, cache = folder / "tiny", folder / "cache"
        write_tiny(bundle)
        with Group(folder, bundle, given.processes, MESH, cache) as group:
            group.wait_for(" ready: ")  # from here on the cache has all
        kinds = list(itertools.product(given.phases, (0, given.processes - 1)))
        for number in range(given.kills or len(kinds)):
            phase, victim = kinds[number % len(kinds)]
            (own := folder / str(number)).mkdir()
            row = run(own, bundle, cache, given.processes, phase, victim)
            told = [", ".join(f"{n} {what}" for what, n in seen.items()) for seen in row[2:4]]
            again = "-" if row.again is None else f"{row.again:.1f}"
            print_line([row.phase, str(row.victim), *(what or "-" for what in told), again])
            wrong.append(is_wrong(row))
            if wrong[-1]:
                print((own / "log").read_text(), file=sys.stderr)
    print(f"{wrong.count(False)} of {len(wrong)} ended as they should")
    sys.exit(1 if any(wrong) else 0)

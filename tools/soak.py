"""Puts a small model's server under a crowd for a while, of which a part is hostile.

Clients ask for texts, schemas and thoughts, of the model and of adapters that come and go, and
check what they get; they leave in the middle, send texts that are too long, bodies that
are too large and bytes that are no HTTP, and open streams that they never read. At the end the
server gets SIGTERM in the midst of it. Printed are answers that were lost or wrong, the server's
memory over time, and how long `/health` took; status 1 if something was lost or wrong.

Example:
    tools/run soak --minutes 20 --clients 300
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import httpx
import jax

from benchmarks.load_client import Ask, Load, ask_one
from spmd.cli.flags import Parser
from spmd.models.decode import ServingShape
from spmd.models.llama import lora
from spmd.models.llama.fresh import init
from spmd.models.llama.named import named_config
from spmd.models.llama.weights.sources import fresh_source
from spmd.serving.llama_bundle import write_llama_bundle

ROOT = Path(__file__).resolve().parents[1]
NAME = "tiny"
PATIENCE = 1800.0


class Server:
    """A process of scripts/serve; killed where the context ends.

    Args:
      bundle: what it serves.
      work: for its log and its cache.
      flags: more of them.
    """

    def __init__(self, bundle: Path, work: Path, *flags: str) -> None:
        self.log = work / "log"
        path = os.pathsep.join([str(ROOT), *sys.path[1:]])
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        command = [sys.executable, "-m", "spmd.scripts.serve_bundle", str(bundle), "--port", "0"]
        command += ["--cache_dir", str(work / "cache"), *flags]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, cwd=ROOT
            )

    def said(self, pattern: str) -> tuple[str, ...]:
        """Waits for a line of the log; exits where the server ends before."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            has_ended = self.process.poll() is not None
            if found := re.search(pattern, self.log.read_text()):
                return found.groups()
            if has_ended:
                break
            time.sleep(0.02)
        sys.exit(f"the server did not say {pattern!r}:\n{self.log.read_text()}")

    @cached_property
    def url(self) -> str:
        """Where it listens, once it does."""
        return self.said(r"listening on (http://[\d.]+:\d+)")[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()


def write_tiny(folder: Path) -> None:
    """A bundle of a tiny Llama with random weights that thinks: 8 slots of 256 tokens."""
    shape = ServingShape(8, 256, (8, 64), (256,), 16, 1, 5, "float32", adapters=4, adapter_rank=4)
    with tempfile.TemporaryDirectory() as made, fresh_source(named_config("tiny"), 0) as source:
        Path(made, "chat_template.jinja").write_text("{{ messages[0].content }}" + THINKS)
        source = source.with_tokenizer(Path(made))
        write_llama_bundle(source, folder, shape, dtype="float32", name=NAME, platforms=("cpu",))


MIB = 2**20

PROMPTS = ("def main(", "Once upon a time", "The mesh", "a", "x = [1, 2, 3]", "In the beginning")
MODELS = (NAME, "one", "two")
TOKENS = 24
THINKS = "<think>{# </think> #}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMS: tuple[dict[str, Any], ...] = ({}, {"structured_outputs": {"json": SCHEMA}})
CHAT = {
    "messages": [{"role": "user", "content": "?"}], "thinking_token_budget": 8,
    "max_tokens": TOKENS, "temperature": 0,
}  # fmt: skip

FLAGS = ("--write_seconds", "5", "--header_seconds", "5", "--body_seconds", "10")
"""Short, so that each of these limits is met many times."""

LONG = b'{"prompt":"' + b"a b " * (15 * MIB // 4) + b'"}'
LARGE = b'{"prompt":"' + b"a b " * (17 * MIB // 4) + b'"}'
JSON = {"Content-Type": "application/json"}

GRACE = 2.0
"""Whoever asks so many seconds before SIGTERM has to be answered; later ones may find the port
closed."""


def memory_of(process: int) -> float:
    """GB that a process has in memory; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


class Probe:
    """Asks for `/health` ten times a second, on a thread of its own; notes seconds and memory."""

    def __init__(self, server: Server) -> None:
        self.seconds: list[float] = []
        self.memory: list[tuple[float, float]] = []
        self.unwell = 0
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start = time.monotonic()
        while not self._over.wait(0.1):
            began = time.monotonic()
            try:
                answer = httpx.get(f"{self._server.url}/health", timeout=60, trust_env=False)
                self.unwell += answer.status_code != 200
            except httpx.HTTPError:
                self.unwell += 1
            self.seconds.append(time.monotonic() - began)
            self.memory.append((began - start, memory_of(self._server.process.pid)))

    def end(self) -> None:
        """Stops asking."""
        self._over.set()
        self._thread.join()


class Crowd:
    """Clients, and what became of what they asked.

    Args:
      expected: model, prompt and form -> the text; model -> its thought.

    Attributes:
      outcomes: what happened, how often.
      faults: what should not have happened; each is a line.
    """

    def __init__(self, server: Server, expected: dict[Any, str]) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.ending: float | None = None
        self._port = int(server.url.rpartition(":")[2])
        self._expected = expected
        self._http = httpx.AsyncClient(
            base_url=server.url,
            timeout=300,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._kinds: dict[Callable[[random.Random], Awaitable[str]], int] = {
            self._whole: 40, self._stream: 30, self._leave: 10, self._leave_stream: 8,
            self._long_text: 2, self._large_body: 1, self._garbage: 4, self._half_a_request: 2,
            self._never_read: 3, self._thought: 8, self._adapter: 4,
        }  # fmt: skip

    async def client(self, rng: random.Random) -> None:
        """Asks for one thing after another until the server ends."""
        while self.ending is None:
            kind = rng.choices([*self._kinds], [*self._kinds.values()])[0]
            began, name = time.monotonic(), kind.__name__[1:]
            try:
                outcome = await kind(rng)
            except (httpx.TransportError, OSError) as error:
                outcome = type(error).__name__
                ending = self.ending
                if ending is not None and began > ending - GRACE:
                    outcome = "after SIGTERM"
                else:
                    self.faults.append(f"lost: {name}: {outcome}: {error}")
            self.outcomes[f"{name}: {outcome}"] += 1
            await asyncio.sleep(rng.uniform(0, 1))

    async def _whole(self, rng: random.Random) -> str:
        return await self._complete(rng, model := rng.choice(MODELS), model)

    async def _complete(self, rng: random.Random, model: str, known: str) -> str:
        prompt, form = rng.choice(PROMPTS), rng.randrange(len(FORMS))
        answer = await self._http.post("/v1/completions", json=request(prompt, model) | FORMS[form])
        if answer.status_code == 200:
            self._check((known, prompt, form), answer.json()["choices"][0]["text"])
        return self._status(answer, 200, 429)

    async def _thought(self, rng: random.Random) -> str:
        body = CHAT | {"model": (model := rng.choice(MODELS))}
        answer = await self._http.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:
            self._check(model, answer.json()["choices"][0]["message"]["reasoning_content"])
        return self._status(answer, 200, 429)

    async def _adapter(self, rng: random.Random) -> str:
        """Loads one for itself, asks it, and unloads it; there is room for two at a time."""
        body = {"lora_name": f"of {rng.random()}", "lora_path": "two"}
        answer = await self._http.post("/v1/load_lora_adapter", json=body)
        if answer.status_code == 200:
            await self._complete(rng, body["lora_name"], "two")
            await self._http.post("/v1/unload_lora_adapter", json=body)
        return self._status(answer, 200, 400, 429)

    async def _stream(self, rng: random.Random) -> str:
        ask = Ask(0, rng.choice(PROMPTS), TOKENS, None, 0.0)
        return await self._read(ask, Load(1), rng.choice(MODELS))

    async def _leave_stream(self, rng: random.Random) -> str:
        ask = Ask(0, "leaving", 200, rng.randint(1, 20), 0.0)
        return await self._read(ask, Load(1, ignore_eos=True), NAME)

    async def _read(self, ask: Ask, load: Load, model: str) -> str:
        """Reads a stream, as the benchmark's clients do."""
        answer = await ask_one(self._http, load, model, ask)
        if answer.outcome == "failed" or (self.ending is None and "HTTP 503" in answer.problem):
            raise OSError(answer.problem)
        # Who reads slowly gets many tokens as one event, and may have all before it leaves.
        if answer.outcome == "done" and ask.max_tokens == TOKENS:
            self._check((model, ask.prompt, 0), answer.text)
        return answer.outcome

    async def _leave(self, rng: random.Random) -> str:
        body = LONG if rng.random() < 0.2 else json.dumps(request("leaving")).encode()
        _, writer = await self._send(body)
        await asyncio.sleep(rng.uniform(0, 1))
        writer.close()
        return "left"

    async def _long_text(self, rng: random.Random) -> str:
        answer = await self._http.post("/v1/completions", content=LONG, headers=JSON)
        return self._status(answer, 400, 429)

    async def _large_body(self, rng: random.Random) -> str:
        reader, writer = await self._send(LARGE[:MIB], len(LARGE))
        line = await reader.readline()
        writer.close()
        if b" 413 " not in line and self.ending is None:
            self.faults.append(f"wrong: a body that is too large got {line!r}")
        return line.decode().strip()

    async def _garbage(self, rng: random.Random) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(rng.randbytes(rng.randrange(1, 5000)))
        await asyncio.sleep(rng.uniform(0, 0.5))
        writer.close()
        return "left"

    async def _half_a_request(self, rng: random.Random) -> str:
        _, writer = await self._send(b'{"prompt":', 1000)
        await asyncio.sleep(rng.uniform(0, 15))
        writer.close()
        return "left"

    async def _never_read(self, rng: random.Random) -> str:
        """Many tokens with log-probabilities, more than buffers of the system hold."""
        body = {
            **request("never read"), "stream": True, "max_tokens": 200, "n": 8, "logprobs": 5,
            "ignore_eos": True,
        }  # fmt: skip
        _, writer = await self._send(json.dumps(body).encode())
        transport: Any = writer.transport
        transport.pause_reading()
        await asyncio.sleep(rng.uniform(5, 20))
        writer.close()
        return "left"

    async def _send(
        self, body: bytes, length: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1024)
        size = len(body) if length is None else length
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    def _check(self, asked: Any, text: str) -> None:
        if text != self._expected[asked]:
            self.faults.append(f"wrong: {asked!r}: {text!r}, not {self._expected[asked]!r}")

    def _status(self, answer: httpx.Response, *expected: int) -> str:
        status = answer.status_code
        is_ending = self.ending is not None and status == 503
        if status not in expected and not is_ending:
            self.faults.append(f"wrong: status {status}, not {expected}")
        return str(status)


def request(prompt: str, model: str = NAME) -> dict[str, Any]:
    """A request whose answer does not depend on chance."""
    return {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}


async def run(given: argparse.Namespace, server: Server, probe: Probe, crowd: Crowd) -> float:
    """Lets the crowd in, and ends the server; returns the seconds that its end took."""
    clients = [asyncio.create_task(crowd.client(random.Random(i))) for i in range(given.clients)]
    await asyncio.sleep(given.minutes * 60)
    await asyncio.to_thread(probe.end)
    crowd.ending = began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(server.process.wait)
    seconds = time.monotonic() - began
    await asyncio.gather(*clients)
    return seconds


def report(server: Server, probe: Probe, crowd: Crowd, ended: float) -> int:
    """Prints what happened; returns how much of it should not have."""
    for outcome, count in sorted(crowd.outcomes.items()):
        print(f"{count:8,}  {outcome}")
    step = max(1, len(probe.memory) // 10)
    print("memory, GB: " + ", ".join(f"{s:.0f} s {gb:.2f}" for s, gb in probe.memory[::step]))
    print(f"memory at most: {max(gb for _, gb in probe.memory):.2f} GB")
    cuts = statistics.quantiles(probe.seconds, n=100)
    print(
        f"/health: {len(probe.seconds)} times, median {cuts[49] * 1e3:.0f} ms, "
        f"p99 {cuts[98] * 1e3:.0f} ms, at most {max(probe.seconds) * 1e3:.0f} ms"
    )
    status = server.process.returncode
    print(f"SIGTERM: status {status} after {ended:.1f} s")
    problems = [*crowd.faults]
    if probe.unwell:
        problems.append(f"wrong: /health was not 200 {probe.unwell} times")
    if status != 0:
        problems.append(f"wrong: the server ended with status {status}")
    log = server.log.read_text()
    if "Traceback" in log:
        problems.append(f"wrong: the log has a traceback: {log[log.index('Traceback') :][:2000]}")
    kinds = Counter(problem.partition(":")[0] for problem in problems)
    print(f"lost: {kinds['lost']}, wrong: {kinds['wrong']}")
    for problem in problems[:20]:
        print(f"  {problem}")
    return len(problems)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and end with status 1 if something was lost or wrong."""
    parser = Parser("tools/run soak", __doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="until SIGTERM")
    parser.add_argument("--clients", type=int, default=300, help="at a time")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        write_tiny(bundle := Path(made, "tiny"))
        adapters, params = Path(made, "adapters"), init(jax.random.key(0), named_config("tiny"))
        for rank, name in zip((2, 4), MODELS[1:], strict=True):
            drawn = lora.init(jax.random.key(rank), params, config := lora.LoraConfig(rank))
            lora.save(jax.tree.map(lambda x: x + 0.1, drawn), config, adapters / name, None)
        flags = [*FLAGS, *(f"--adapter={name}={adapters / name}" for name in MODELS[1:])]
        flags.append(f"--adapters_from={adapters}")
        server = stack.enter_context(Server(bundle, Path(made), *flags))
        server.said(" (ready): ")
        expected = dict[Any, str]()

        def ask(path: str, body: dict[str, Any]) -> Any:
            answer = httpx.post(f"{server.url}{path}", json=body, timeout=300, trust_env=False)
            return answer.json()["choices"][0]

        for model in MODELS:
            chat = ask("/v1/chat/completions", CHAT | {"model": model})
            expected[model] = chat["message"]["reasoning_content"]
            for prompt, form in itertools.product(PROMPTS, range(len(FORMS))):
                body = request(prompt, model) | FORMS[form]
                expected[model, prompt, form] = ask("/v1/completions", body)["text"]

        async def go() -> int:
            crowd = Crowd(server, expected)
            probe = Probe(server)
            return report(server, probe, crowd, await run(given, server, probe, crowd))

        sys.exit(1 if asyncio.run(go()) else 0)

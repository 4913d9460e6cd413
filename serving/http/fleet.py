"""Several models behind one port: a process for each, and this one, which passes requests on.

A file says which there are, and how `scripts/serve` is to serve each:

    llama-1b: {bundle: bundles/llama-1b, memory_share: 0.3}
    qwen: {bundle: bundles/qwen, memory_share: 0.5, mesh: {data: 1, model: 2}}

Their processes listen on sockets in a folder that only this user can open. A request goes to the
model that its body names, or its path below `/v2/models`; what comes below `/models/NAME` goes to
that one. Models are loaded anew and unloaded by Triton's extension of KServe's protocol. A new
version is loaded beside the old one, and takes its place when it is ready; what runs on the old one
ends there.
"""

import asyncio
import contextlib
import logging
import math
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import orjson
import yaml
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import spmd
from spmd.serving.errors import ApiError, ServingError
from spmd.serving.http import app as single
from spmd.serving.http.adapters import no_model
from spmd.serving.http.admission import Admission, Allowance, Visit
from spmd.serving.http.keys import Keys
from spmd.serving.http.limits import ANY, HttpOptions, ServerOptions
from spmd.serving.http.metrics import CONTENT_TYPE
from spmd.serving.http.requests import ClosingStream, check_key, client_of, read_body, until_gone
from spmd.serving.http.server import Serving, server_config
from spmd.serving.http.traffic import Traffic

_LOG = logging.getLogger("serving.fleet")

SERVE = """
import ctypes, signal, sys
if sys.platform == "linux":  # it ends when the process does that started it: PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
from spmd.scripts.serve_bundle import main
main()
"""
COMMAND = (sys.executable, "-c", SERVE)

LONGEST_PAUSE = 60.0
"""Seconds between attempts to start a process that ends again and again."""

OF_THE_CONNECTION = b"connection keep-alive te transfer-encoding upgrade host expect".split()
"""Headers that are not passed on (RFC 9110, 7.6.1), and those that are written anew."""


def read_models(file: Path) -> dict[str, dict[str, Any]]:
    """The models of a file, and the flags of each.

    Raises:
      ServingError: the file cannot be read, or a model lacks what it needs.
    """
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ServingError(f"{file}: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not found:
        raise ServingError(f"{file}: write lines such as llama: {{bundle: FOLDER}}")
    for name, flags in found.items():
        if not re.fullmatch(r"[\w.:@-]+", str(name), re.ASCII):
            raise ServingError(f"{file}: {name!r}: names are of letters, digits and . : @ _ -")
        if not isinstance(flags, dict) or "bundle" not in flags:
            raise ServingError(f"{file}: {name} needs its folder, as in {name}: {{bundle: FOLDER}}")
        if len(found) > 1 and "memory_share" not in flags:
            raise ServingError(
                f"{file}: {name} needs memory_share, its part of each device's memory, as in "
                f"{name}: {{bundle: {flags['bundle']}, memory_share: {0.9 / len(found):.2f}}}"
            )
    return {str(name): flags for name, flags in found.items()}


class Member:
    """A process that serves one model.

    Attributes:
      busy: requests that are under way there.
      last: the last line that it wrote.
    """

    def __init__(self, name: str, flags: dict[str, Any], more: Sequence[str]) -> None:
        self.name, self.busy, self.last = name, 0, ""
        self._folder = tempfile.TemporaryDirectory(prefix="spmd-")
        settings = Path(self._folder.name) / "settings.yaml"
        rest = {key: value for key, value in flags.items() if key != "bundle"}
        settings.write_text(yaml.safe_dump(rest), encoding="utf-8")
        place = f"{self._folder.name}/socket"
        self._words = [
            *COMMAND, str(flags["bundle"]), f"--settings={settings}", f"--name={name}",
            f"--host=unix:{place}", f"--forwarded_allow_ips={ANY}", *more,
        ]  # fmt: skip
        # A connection on this machine is made as fast as an idle one is found.
        many = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=place, limits=many),
            base_url="http://localhost",
            timeout=httpx.Timeout(None, connect=10.0),
        )
        self.ended = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Starts the process, and waits until it serves.

        Raises:
          ServingError: it has ended.
        """
        # Not by the event loop, which would fork: of jax's threads nothing would be left.
        self._process = subprocess.Popen(
            self._words, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
        )
        threading.Thread(target=self._copy, args=(asyncio.get_running_loop(),)).start()
        while not self.ended.is_set():
            with contextlib.suppress(httpx.TransportError):
                if (await self.client.get("/health")).status_code == 200:
                    return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), 0.1)
        raise ServingError(f"{self.name}: {self.last or 'its process has ended'}")

    def _copy(self, loop: asyncio.AbstractEventLoop) -> None:
        """Passes on what it says, until it has ended."""
        assert self._process is not None and self._process.stderr is not None
        with self._process:
            for line in self._process.stderr:
                text = line.decode(errors="replace").rstrip()
                self.last = text or self.last
                is_text = not text.startswith("{")  # else an object, which has the model's name
                print(f"{self.name}: {text}" if is_text else text, file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):  # there is no loop any more
            loop.call_soon_threadsafe(self.ended.set)

    async def stop(self, seconds: float) -> None:
        """Lets what runs there end, for so long; then ends the process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.busy:
                    await asyncio.sleep(0.05)
        if self._process is not None:
            for sig in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(sig)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), 15.0)
                    break
        await self.client.aclose()
        self._folder.cleanup()


class Fleet:
    """The models of a file, as `spmd.serving.http.service.Service` to what is around all answers.

    Args:
      file: see `read_models`; it is read anew with each load.
      options: keys, and limits of connections and bodies.
      more: flags of all processes.
    """

    def __init__(self, file: Path, options: ServerOptions, more: Sequence[str] = ()) -> None:
        self.options = options
        self.keys = Keys(options.api_keys, options.api_key_file)
        self.admission = Admission(Allowance(0), Allowance(options.bodies_bytes))
        self.traffic = Traffic(self.admission)
        self.members: dict[str, Member] = {}  # those that requests go to
        self.lacking = dict.fromkeys(read_models(file), "it is being loaded")  # why
        self._file, self._more = file, more
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Loads all models behind; at the end their processes end."""
        for name in self.lacking:
            self.spawn(self._keep(name))
        yield
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.stop(0) for member in self.members.values()))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Does something behind; it is over or cancelled before the fleet ends."""
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, name: str) -> None:
        """Loads a model, again and again where its process ends."""
        pause = 1.0
        while name in self.lacking:
            try:
                await self.load(name)
            except (ServingError, OSError) as error:
                _LOG.error("%s; it is tried again in %g seconds", error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _attend(self, member: Member) -> None:
        await member.ended.wait()
        if self.members.get(member.name) is member:
            _LOG.error("%s has ended: %s", member.name, member.last)
            self.lacking[member.name] = f"its process has ended: {member.last}"
            del self.members[member.name]
            self.spawn(member.stop(0))
            await self._keep(member.name)

    async def load(self, name: str) -> None:
        """Starts a model as the file says now, and puts it in the place of what was there.

        Raises:
          ServingError: the file does not have it, or it cannot be served; what was there stays.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            models = read_models(self._file)
            if name not in models:
                raise ServingError(f"{self._file} has no {name}; it has {', '.join(models)}")
            member = Member(name, models[name], self._more)
            if name not in self.members:
                self.lacking[name] = "it is being loaded"
            try:
                await member.start()
            except BaseException as error:
                await member.stop(0)
                if name in self.lacking:
                    self.lacking[name] = str(error) or "it was not loaded"
                raise
            before, self.members[name] = self.members.get(name), member
            self.lacking.pop(name, None)
            self.spawn(self._attend(member))
            _LOG.info("%s is ready%s", name, ", in the place of the old one" if before else "")
            if before is not None:
                self.spawn(before.stop(self.options.drain_seconds))

    async def unload(self, name: str) -> None:
        """Ends a model's process, once what runs there has ended."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            self.lacking.pop(name, None)
            member = self.members.pop(name, None)
            if member is not None:
                await member.stop(self.options.drain_seconds)
                _LOG.info("%s is unloaded", name)

    async def find(self, name: str, request: Request) -> Member:
        """The process that serves a model, or an adapter of this name.

        Raises:
          ApiError: there is none.
        """
        if name in self.members:
            return self.members[name]
        if name in self.lacking:
            raise ApiError(503, f"{name}: {self.lacking[name]}", code="loading", retry_after=5)
        for member in [*self.members.values()]:
            with contextlib.suppress(httpx.TransportError):  # that one is just ending
                place = f"/v1/models/{quote(name, safe='')}"
                about = await member.client.get(place, headers=_key(request))
                if about.status_code == 200:
                    return member
        raise no_model(name, sorted(self.members))

    async def ask_all(self, request: Request) -> list[tuple[str, httpx.Response]]:
        """The facts that each model answers with; of one that refuses or is just ending, none."""
        there = sorted(self.members.items())
        asked = (m.client.get(request.url.path, headers=_key(request)) for _, m in there)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        pairs = ((name, x) for (name, _), x in zip(there, answers, strict=True))
        return [(n, x) for n, x in pairs if isinstance(x, httpx.Response) and x.status_code == 200]

    @property
    def problem(self) -> str | None:
        """Why it is not ready."""
        return "\n".join(f"{name}: {why}" for name, why in self.lacking.items()) or None


def _key(request: Request) -> dict[str, str]:
    """The headers that name who asks."""
    return {k: request.headers[k] for k in ("authorization", "x-api-key") if k in request.headers}


def _fleet(request: Request) -> Fleet:
    return request.app.state.service  # type: ignore[no-any-return]


async def _pass_on(request: Request, member: Member, path: str, body: Any) -> Response:
    """The answer of a model's process, piece by piece as it comes."""
    query = f"?{request.url.query}" if request.url.query else ""
    raw = ((k, v) for k, v in request.headers.raw if k not in OF_THE_CONNECTION)
    headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in raw}
    headers["x-forwarded-for"] = request.client.host if request.client else ""
    headers["x-request-id"] = request.state.exchange.request_id
    request.state.exchange.is_passed_on = True
    member.busy += 1
    answer = None
    try:
        sent = member.client.build_request(
            request.method, f"{path}{query}", headers=headers, content=body
        )
        is_read = isinstance(body, bytes)  # else it still comes from the client
        async with until_gone(request.receive) if is_read else contextlib.nullcontext():
            answer = await member.client.send(sent, stream=True)
    except ClientDisconnect:
        raise ApiError(499, "the client has left") from None
    except httpx.TransportError as error:
        why = f"{member.name}: its process does not answer: {type(error).__name__}"
        raise ApiError(503, why, code="process_lost", retry_after=5) from None
    finally:
        if answer is None:
            member.busy -= 1

    def close() -> None:  # by a task of its own: this one may be cancelled
        member.busy -= 1
        _fleet(request).spawn(answer.aclose())

    response = ClosingStream(answer.aiter_raw(), close, answer.status_code)
    passed = (*OF_THE_CONNECTION, b"date", b"x-request-id")
    response.raw_headers = [
        (k.lower(), v) for k, v in answer.headers.raw if k.lower() not in passed
    ]
    return response


async def by_body(request: Request) -> Response:
    """Passes on what names its model in its body, or goes to the only one."""
    fleet = _fleet(request)
    client = client_of(request, check_key(request), fleet.keys)
    visit = Visit(fleet.admission, client)
    try:
        body = await read_body(request, fleet.options, visit)
        try:
            asked = orjson.loads(body) if body else {}
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None
        key = "lora_name" if request.url.path.endswith("/unload_lora_adapter") else "model"
        name = asked.get(key) if isinstance(asked, dict) else None
        there = sorted({*fleet.members, *fleet.lacking})
        if not isinstance(name, str) and len(there) != 1:
            raise ApiError(400, f"{key}: name one of {', '.join(there)}", param=key)
        member = await fleet.find(name if isinstance(name, str) else there[0], request)
        return await _pass_on(request, member, request.url.path, body)
    finally:
        visit.drop_body()


async def by_path(request: Request) -> Response:
    """Passes on what names its model in its path."""
    check_key(request)
    names = request.path_params
    path = f"/{names['path']}" if "path" in names else request.url.path
    member = await _fleet(request).find(names["model"], request)
    body = request.stream() if request.method == "POST" else b""
    return await _pass_on(request, member, path, body)


async def listed(request: Request) -> Response:
    """`GET /v1/models` and `/v2/models/stats`: those of all."""
    check_key(request)
    key = "data" if request.url.path == "/v1/models" else "model_stats"
    answers = await _fleet(request).ask_all(request)
    found = {key: [one for _, answer in answers for one in answer.json()[key]]}
    return JSONResponse({"object": "list", **found} if key == "data" else found)


async def metrics(request: Request) -> Response:
    """`GET /metrics`: of all, each sample with the model whose process told it, and our own."""
    fleet = _fleet(request)
    texts = [(name, answer.text) for name, answer in await fleet.ask_all(request)]
    return Response(
        joined([*texts, ("", fleet.traffic.render().decode())]), media_type=CONTENT_TYPE
    )


def joined(texts: Sequence[tuple[str, str]]) -> str:
    """Metrics of several processes as one text: those of a family have to be together.

    Args:
      texts: a name, which each sample gets as its label `process`, and what Prometheus would read.
    """
    families: dict[str, list[str]] = {}
    for name, text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                lines = families.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
                continue
            sample, labels, value = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (.*)", line).groups()  # type: ignore[union-attr]
            known = ",".join(filter(None, (labels, f'process="{name}"' if name else "")))
            families.setdefault(family, []).append(f"{sample}{{{known}}} {value}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


async def index(request: Request) -> Response:
    """`POST /v2/repository/index`: the models, and whether they are ready."""
    check_key(request)
    fleet = _fleet(request)
    states = [(name, "READY", "") for name in fleet.members]
    states += [(name, "UNAVAILABLE", why) for name, why in fleet.lacking.items()]
    keys = ("name", "state", "reason")
    return JSONResponse([{**dict(zip(keys, x, strict=True)), "version": "1"} for x in states])


async def load(request: Request) -> Response:
    """`POST /v2/repository/models/{model}/load`: answers when the model is there."""
    check_key(request)
    try:
        await _fleet(request).load(request.path_params["model"])
    except ServingError as error:
        raise ApiError(400, str(error)) from None
    return JSONResponse({})


async def unload(request: Request) -> Response:
    """`POST /v2/repository/models/{model}/unload`: answers when its requests have ended."""
    check_key(request)
    await _fleet(request).unload(request.path_params["model"])
    return JSONResponse({})


async def server(request: Request) -> Response:
    """`GET /v2`."""
    about = {"name": "spmd", "version": spmd.__version__, "extensions": ["model_repository"]}
    return JSONResponse(about)


async def live(_: Request) -> Response:
    """`GET /livez`."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """`GET /readyz` and its like: 503 while a model of the file is not there."""
    problem = _fleet(request).problem
    if request.url.path.startswith("/v2"):
        return JSONResponse({"ready": problem is None}, 200 if problem is None else 503)
    return PlainTextResponse(f"{problem or 'ok'}\n", 200 if problem is None else 503)


BOTH = ["GET", "POST"]

ROUTES = [
    *(Route(path, live) for path in ("/livez", "/v2/health/live")),
    *(Route(path, ready) for path in ("/startupz", "/readyz", "/health", "/v2/health/ready")),
    Route("/metrics", metrics),
    *(Route(path, single.page) for path in single.PAGE),
    Route("/v1/models", listed),
    Route("/v1/models/{model:path}", by_path),
    Route("/v2", server),
    Route("/v2/repository/index", index, methods=["POST"]),
    Route("/v2/repository/models/{model}/load", load, methods=["POST"]),
    Route("/v2/repository/models/{model}/unload", unload, methods=["POST"]),
    Route("/v2/models/stats", listed),
    Route("/v2/models/{model}", by_path),
    Route("/v2/models/{model}/{rest:path}", by_path, methods=BOTH),
    Route("/models/{model}/{path:path}", by_path, methods=BOTH),
    Route("/{rest:path}", by_body, methods=["POST"]),
]


class FleetServer(Serving):
    """uvicorn's server, with the models of a fleet while it runs.

    Raises:
      ServingError: the certificate cannot be used.
    """

    def __init__(self, fleet: Fleet, http: HttpOptions, log_level: str) -> None:
        app = single.make_app(fleet, http, routes=ROUTES)
        config = server_config(app, fleet.traffic, fleet.options, http, log_level)
        config.timeout_graceful_shutdown = math.ceil(fleet.options.drain_seconds)
        super().__init__(app, config, http, fleet.options)
        self._fleet = fleet
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of each request

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal comes, and what is under way has ended."""
        async with self._fleet.running():
            await super().serve(sockets)

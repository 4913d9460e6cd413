"""The ASGI application: routes, how errors are answered, and what is around all answers.

Each request gets an id, a line in the log and, if asked for, a trace; answers are counted and timed
by route. Load balancers and Kubernetes ask whether the process is well, has started, and serves.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spmd.serving.errors import ApiError
from spmd.serving.http import anthropic_messages, embeddings, openai_responses, openai_routes
from spmd.serving.http.connections import Refusing
from spmd.serving.http.kserve import routes as kserve_routes
from spmd.serving.http.limits import ANY, HttpOptions
from spmd.serving.http.logs import FIELDS, REQUEST_ID, HttpExchange
from spmd.serving.http.metrics import CONTENT_TYPE
from spmd.serving.http.requests import PAGE_HEADERS, error_response, route_path, service_of
from spmd.serving.http.traffic import Traffic

if TYPE_CHECKING:
    from spmd.serving.http.tracing import Tracing


async def live(request: Request) -> Response:
    """`GET /livez`: 503 if only a new process can help; one that loads or drains is well."""
    return _answer(service_of(request).broken())


async def started(request: Request) -> Response:
    """`GET /startupz`: 200 as soon as the model is loaded, and from then on."""
    service = service_of(request)
    return _answer(service.problem() if service.loaded is None else None)


async def ready(request: Request) -> Response:
    """`GET /readyz` and `GET /health`: 200 if requests are served, else 503 with the reason."""
    return _answer(service_of(request).problem())


def _answer(problem: str | None) -> Response:
    if problem is None:
        return PlainTextResponse("ok\n")
    return PlainTextResponse(f"{problem}\n", 503, headers={"Retry-After": "5"})


PROBES = [
    Route("/livez", live),
    Route("/startupz", started),
    Route("/readyz", ready),
    Route("/health", ready),
]

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
"""Strangers may make up others; those count as one."""

_LOG = logging.getLogger("serving.access")

HEADER = "X-Request-Id"

QUIET = ("/health", "/livez", "/readyz", "/startupz", "/metrics", "/v2/health/")
"""Beginnings of paths that machines ask every few seconds: they are no news, and have no trace."""

LONGEST_PATH = 512
"""Of a path in the log, in characters."""

_REQUEST_ID = re.compile(r"[\w.:/+=@~-]{1,128}", re.ASCII)


class Access:
    """ASGI middleware around everything else, so that errors have an id and are counted, too.

    Args:
      app: the app; what it routes to is in the scope once it has answered.
      traffic: counts and times answers.
      routes: of the app. All paths beside them count as one, or strangers could make up as many as
        they like.
      tracing: makes spans of requests; None makes none.
    """

    def __init__(
        self, app: ASGIApp, traffic: Traffic, routes: Sequence[Route], tracing: Tracing | None
    ) -> None:
        self._app, self._traffic, self._tracing = app, traffic, tracing
        self._paths = {route.path for route in routes}
        self._by_endpoint: dict[object, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers."""
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        # As it was sent it has no spaces and no line breaks, which could forge lines of the log.
        path = scope["raw_path"].decode("ascii")[:LONGEST_PATH]
        client = (scope.get("client") or [""])[0]
        exchange = HttpExchange(request_id, scope["method"], path, client)
        scope.setdefault("state", {})["exchange"] = exchange
        # It stays set: uvicorn runs each request in a task of its own, and what it logs of an
        # exception after this should have the id.
        REQUEST_ID.set(exchange.request_id)
        is_probe = route_path(scope).startswith(QUIET)
        span = None
        if self._tracing is not None and not is_probe:
            span = self._tracing.begin(exchange, headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = exchange.request_id
            await send(message)
            if not exchange.first_sent and message.get("body"):
                exchange.first_sent = time.monotonic()

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            exchange.ended = time.monotonic()
            exchange.leave(exchange.prompt_tokens + exchange.completion_tokens)
            method = exchange.method if exchange.method in METHODS else "other"
            path = route_path(scope)
            if path not in self._paths:
                path = self._by_endpoint.get(scope.get("endpoint"), "other")
            self._traffic.answered(exchange, method, path)
            fields = exchange.fields()
            if self._tracing is not None and span is not None:
                fields["trace_id"] = self._tracing.end(span, exchange)
            level = logging.DEBUG if is_probe or exchange.is_passed_on else logging.INFO
            if _LOG.isEnabledFor(level):
                text = '{client} "{method} {path}" {status}, {seconds:.3f} s'.format_map(fields)
                if "completion_tokens" in fields:
                    text += ", {prompt_tokens} + {completion_tokens} tokens".format_map(fields)
                _LOG.log(level, "%s", text, extra={FIELDS: fields})


STATIC = Path(__file__).parent / "static"
PAGE = {"/": "chat.html", "/static/chat.css": "chat.css", "/static/chat.js": "chat.js"}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


async def metrics(request: Request) -> Response:
    """`GET /metrics`, for Prometheus."""
    return Response(service_of(request).traffic.render(), headers={"Content-Type": CONTENT_TYPE})


async def requests(request: Request) -> Response:
    """`GET /requests`: see `spmd.serving.http.requests_page`."""
    # It draws as reports do, and with them comes jax, which the model has imported by now.
    from spmd.serving.http import requests_page

    return await requests_page.requests(request)


async def page(request: Request) -> Response:
    """The chat page and its two files."""
    path = STATIC / PAGE[route_path(request.scope)]
    return FileResponse(path, media_type=TYPES[path.suffix], headers=PAGE_HEADERS)


async def _answer_error(request: Request, error: Any) -> JSONResponse:
    """Answers; of a mistake of our own the log gets the traceback, and the client does not."""
    if isinstance(error, ApiError):
        return error_response(request, error)
    if not isinstance(error, HTTPException):
        mistake = ApiError(500, "the server made a mistake; its log says which")
        return error_response(request, mistake)
    messages = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"{request.method} is not what {request.url.path[:200]} takes",
    }
    message = messages.get(error.status_code, str(error.detail))
    response = error_response(request, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


ERRORS: dict[Any, Any] = dict.fromkeys((ApiError, HTTPException, Exception), _answer_error)

ROUTES = [
    *PROBES,
    Route("/metrics", metrics),
    Route("/requests", requests),
    *(Route(path, page) for path in PAGE),
    *openai_routes.ROUTES,
    *openai_responses.ROUTES,
    *anthropic_messages.ROUTES,
    *embeddings.ROUTES,
    *kserve_routes.ROUTES,
]


def make_app(
    service: Any,
    http: HttpOptions,
    tracing: Tracing | None = None,
    routes: Sequence[Route] = ROUTES,
) -> ASGIApp:
    """Makes the ASGI application, behind what lets pages of other sites in, and behind `Access`.

    Args:
      service: what is served, which may still be loading; or a fleet, with routes of its own.
      http: has the sites whose pages may use it.
      tracing: makes spans of requests; None makes none.
    """
    hosts = (ANY,) if http.allowed_hosts is None else http.allowed_hosts
    refusing = Middleware(Refusing, service.options.address_connections, hosts)
    app: Any = Starlette(routes=routes, middleware=[refusing], exception_handlers=ERRORS)
    app.state.service = service
    if http.allow_origins:
        # Pages of other sites may use the server; browsers ask it before they send JSON.
        app = CORSMiddleware(
            app,
            allow_origins=http.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients in JavaScript send many of their own
            expose_headers=[HEADER, "Retry-After"],
        )
    return Access(app, service.traffic, routes, tracing)

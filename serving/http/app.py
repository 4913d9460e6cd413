"""The ASGI application: routes, and how errors are answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.errors import ApiError
from serving.http import kserve, openai_routes, probes
from serving.http.access import HEADER, Access
from serving.http.connections import Refusing
from serving.http.measured import Measured
from serving.http.metrics import CONTENT_TYPE
from serving.http.options import HttpOptions
from serving.http.requests import error_response, route_path, service_of
from serving.http.service import Service

if TYPE_CHECKING:
    from serving.http.tracing import Tracing

STATIC = Path(__file__).parent / "static"
PAGE = {"/": "chat.html", "/static/chat.css": "chat.css", "/static/chat.js": "chat.js"}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

PAGE_HEADERS = {
    # The page shows text that a model wrote. With this policy a script in it cannot run.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app(
    service: Service, http: HttpOptions | None = None, tracing: Tracing | None = None
) -> ASGIApp:
    """Makes the ASGI application.

    Args:
      service: what is served; it may still be loading.
      http: has the sites whose pages may use it.
      tracing: makes spans of requests; None makes none.
    """
    routes = [
        *probes.ROUTES,
        Route("/metrics", metrics),
        *(Route(path, page) for path in PAGE),
        *openai_routes.ROUTES,
        *kserve.ROUTES,
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Measured, service.traffic, routes),
            Middleware(Refusing, service.options.address_connections),
        ],
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            Exception: _answer_mistake,
        },
    )
    app.state.service = service
    return Access(_with_cors(app, http.allow_origins if http else ()), tracing)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of other sites use the server; browsers ask it before they send JSON."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # clients in JavaScript send many of their own
        expose_headers=[HEADER, "Retry-After"],
    )


async def metrics(request: Request) -> Response:
    """`GET /metrics`, for Prometheus."""
    text = service_of(request).traffic.render()
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


async def page(request: Request) -> Response:
    """The chat page and its two files."""
    path = STATIC / PAGE[route_path(request.scope)]
    return FileResponse(path, media_type=TYPES[path.suffix], headers=PAGE_HEADERS)


async def _answer_api_error(request: Request, error: Any) -> JSONResponse:
    return error_response(request, error)


async def _answer_http_error(request: Request, error: Any) -> JSONResponse:
    messages = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"{request.method} is not what {request.url.path[:200]} takes",
    }
    message = messages.get(error.status_code, str(error.detail))
    response = error_response(request, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _answer_mistake(request: Request, error: Exception) -> JSONResponse:
    """Answers when our own code failed: the log gets the traceback, the client does not."""
    return error_response(request, ApiError(500, "the server made a mistake; its log says which"))

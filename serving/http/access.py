"""Around the application: each request gets an id, a line in the log and, if asked for, a trace."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http.exchange import Exchange
from serving.http.logs import FIELDS, REQUEST_ID
from serving.http.requests import route_path

if TYPE_CHECKING:
    from serving.http.tracing import Tracing

_LOG = logging.getLogger("serving.access")

HEADER = "X-Request-Id"

PROBES = ("/health", "/livez", "/readyz", "/startupz", "/metrics", "/v2/health/")
"""Beginnings of paths that machines ask every few seconds: they are no news, and have no trace."""

LONGEST_PATH = 512
"""Of a path in the log, in characters."""

_REQUEST_ID = re.compile(r"[\w.:/+=@~-]{1,128}", re.ASCII)


class Access:
    """ASGI middleware around everything else, so that answers to errors have an id, too.

    Args:
      app: what answers.
      tracing: makes spans of requests; None makes none.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing | None = None) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers."""
        started = time.monotonic()
        headers = Headers(scope=scope)
        exchange = _exchange(scope, headers)
        scope.setdefault("state", {})["exchange"] = exchange
        # It stays set: uvicorn runs each request in a task of its own, and what it logs of an
        # exception after this should have the id.
        REQUEST_ID.set(exchange.request_id)
        is_probe = route_path(scope).startswith(PROBES)
        span = None
        if self._tracing is not None and not is_probe:
            span = self._tracing.begin(exchange, headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = exchange.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            fields = exchange.fields(time.monotonic() - started)
            if span is not None:
                fields["trace_id"] = span.trace_id
                span.end(exchange)
            _log(fields, logging.DEBUG if is_probe else logging.INFO)


def _exchange(scope: Scope, headers: Headers) -> Exchange:
    given = headers.get(HEADER, "")
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    # The path as it was sent has no spaces and no line breaks, which could forge lines of the log.
    path = scope["raw_path"].decode("ascii")[:LONGEST_PATH]
    client = scope.get("client")
    return Exchange(request_id, scope["method"], path, client[0] if client else "")


def _log(fields: dict[str, Any], level: int) -> None:
    if not _LOG.isEnabledFor(level):
        return
    tokens = ""
    if "completion_tokens" in fields:
        tokens = ", {prompt_tokens} + {completion_tokens} tokens".format_map(fields)
    text = '{client} "{method} {path}" {status}, {seconds:.3f} s'.format_map(fields) + tokens
    _LOG.log(level, "%s", text, extra={FIELDS: fields})

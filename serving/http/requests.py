"""What all handlers need of HTTP: bounded bodies, API keys, clients that hang up, event streams."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serving.errors import ApiError
from serving.http.fields import parse_object
from serving.http.service import Options, Service

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

SMALL_BODY = 2**16
"""In bytes: larger bodies are parsed in a thread, so that other requests do not wait."""


def service_of(request: Request) -> Service:
    """The service behind the app."""
    service: Service = request.app.state.service
    return service


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix under which a proxy offers the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def read_object(request: Request, options: Options) -> dict[str, Any]:
    """Reads and parses the body of a request.

    Raises:
      ApiError: it is not a JSON object, too large, or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page may send other types to any server without a CORS preflight: so with them any
        # site that the user visits could use a server on their machine.
        raise ApiError(
            415, f"Content-Type: application/json is needed, not {kind[:40] or 'nothing'}"
        )
    try:
        async with asyncio.timeout(options.body_seconds):
            body = await _read(request, options.body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body was not here within {options.body_seconds:g} seconds"
        ) from None
    if len(body) <= SMALL_BODY:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body)


async def _read(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise _too_large(most)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is too large: {most:,} bytes are the most")


def check_key(request: Request, options: Options) -> str:
    """Checks the API key of a request.

    Returns:
      The number of the key in `options.api_keys`, as a string; empty if the server has no keys.

    Raises:
      ApiError: keys are needed, and the request has none of them.
    """
    if not options.api_keys:
        return ""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Starlette decodes headers as latin-1; encoding gives the bytes that were sent.
    said = given.strip().encode("latin-1")
    # All keys are compared, each in constant time: how long it takes tells nothing about them.
    found = [hmac.compare_digest(said, key.encode()) for key in options.api_keys]
    if scheme.lower() != "bearer" or not any(found):
        raise ApiError(
            401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
        )
    return str(found.index(True))


def client_of(request: Request, key: str, user: str, options: Options) -> str:
    """Names the client for fair queueing: by its key if there are several keys, or user or address.

    Anybody can claim any user name, so it divides only what clients with the same key get. Were it
    to count between keys, one client could get more by using many names.
    """
    if len(options.api_keys) > 1:
        return f"key {key}"
    host = request.client.host if request.client else ""
    return f"user {user}" if user else f"address {host}"


@contextlib.asynccontextmanager
async def closing_when_gone(receive: Receive, close: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `close` at the end of the block, or as soon as the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        close()


class EventStream(Response):
    """An answer of server-sent events, one for each text.

    Args:
      events: batches of texts; those of a batch are sent in one message, which costs less.
      close: is called at the end, however that comes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[list[str]], close: Callable[[], None]) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        async with closing_when_gone(receive, self._close):
            start = {"status": self.status_code, "headers": self.raw_headers}
            with contextlib.suppress(OSError, ClientDisconnect):
                await send({"type": "http.response.start", **start})
                async for texts in self._events:
                    body = "".join(f"data: {text}\n\n" for text in texts).encode()
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b""})


def dump(value: Any) -> str:
    """JSON on one line, without spaces."""
    return _ENCODER.encode(value)


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """An error in the form that the path's protocol has for errors: OpenAI's or KServe's."""
    is_kserve = route_path(request.scope).startswith("/v2")
    body = {"error": error.message} if is_kserve else error.body()
    return JSONResponse(body, error.status, headers=error.headers)

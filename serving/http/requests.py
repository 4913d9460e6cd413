"""What all handlers need of HTTP: bounded bodies, API keys, clients that hang up, event streams."""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from spmd.serving.engine.stream import Failed, Lost, Misguided, Stopped
from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.admission import Visit, address_of
from spmd.serving.http.keys import Keys
from spmd.serving.http.limits import ServerOptions
from spmd.serving.http.service import PROCESS_LOST, Service

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


def service_of(request: Request) -> Service:
    """The service behind the app."""
    service: Service = request.app.state.service
    return service


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix under which a proxy offers the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


@contextlib.asynccontextmanager
async def visiting(
    request: Request, types: Sequence[str] = ("application/json",)
) -> AsyncIterator[Visit]:
    """The way in for every request that costs more than a look: key, body, and a place.

    In the block, whatever is awaited is cancelled when the client leaves.

    Args:
      types: Content-Types that its body may have; an empty one stands for none.

    Raises:
      ApiError: the key, the body or the time is wrong, there is no place, the client has left, or
        the block raised `Failed`.
    """
    service = service_of(request)
    exchange = request.state.exchange
    exchange.key = check_key(request)
    client = client_of(request, exchange.key, service.keys)
    service.require()
    exchange.leave = service.keys.enter(exchange.key)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in types or (not kind and "origin" in request.headers):
        # A web page may send some types, and none, to any server without a CORS preflight: so with
        # them any site that the user visits could use a server on their machine. Browsers say that
        # a page asks: `Origin`.
        named = kind[:40] or "nothing"
        raise ApiError(415, f"Content-Type: application/json is needed, not {named}")
    visit = Visit(service.admission, client)
    try:
        visit.body = await read_body(request, service.options, visit)
        exchange.read = time.monotonic()
        service.require()  # it may be draining by now
        visit.hold_places(1)
        async with until_gone(request.receive):
            yield visit
    except Failed as error:
        raise failure(error) from error
    finally:
        visit.drop_body()
        visit.leave_places()


async def read_body(request: Request, options: ServerOptions, visit: Visit) -> bytes:
    """The body of a request, of any type.

    Raises:
      ApiError: it is too large or too slow, or the client has left.
    """
    most, body = options.body_bytes, bytearray()
    too_large = ApiError(413, f"the body is too large: {most:,} bytes are the most")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise too_large
    try:
        async with asyncio.timeout(options.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise too_large
                visit.hold_bytes(len(piece))
            return bytes(body)
    except TimeoutError:
        raise ApiError(
            408, f"the body was not here within {options.body_seconds:g} seconds"
        ) from None
    except ClientDisconnect:
        raise _left() from None


def _left() -> ApiError:
    """Nobody gets it: the status is for logs and metrics."""
    return ApiError(499, "the client has left")


def check_key(request: Request, *, basic: bool = False) -> str:
    """Checks the API key of a request; with `basic` a browser may send it as the password.

    Returns:
      The name of the key; empty if the server has no keys.

    Raises:
      ApiError: keys are needed, and the request has none of them.
    """
    keys = service_of(request).keys
    if not keys:
        return ""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if not scheme:  # Anthropic's clients have a header of their own
        scheme, given = "bearer", request.headers.get("x-api-key", "")
    # Starlette decodes headers as latin-1; encoding gives the bytes that were sent.
    said = given.strip().encode("latin-1")
    if basic and scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # it is no base64, and so no key
            scheme, said = "bearer", base64.b64decode(said).partition(b":")[2]
    name = keys.find(said)
    if scheme.lower() != "bearer" or name is None:
        raise ApiError(
            401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
        )
    return name


def client_of(request: Request, key: str, keys: Keys) -> str:
    """Names the client among which the server's time is shared: its key if there are several keys.

    Else it is the address. User names do not count here, since anybody can claim any number of
    them.
    """
    if len(keys) > 1:
        return f"key {key}"
    return f"address {address_of(request.client.host if request.client else '')}"


@contextlib.asynccontextmanager
async def until_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancels what the block awaits as soon as the client hangs up.

    Raises:
      ApiError: it has hung up; status 499.
    """
    task = asyncio.current_task()
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        # The block awaits something: it ends without giving this task a turn.
        if task is not None:
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task is not None and not task.uncancel():
            raise _left() from None
        raise
    finally:
        watcher.cancel()


class ClosingStream(StreamingResponse):
    """An answer that is sent as it comes, until the client leaves.

    Args:
      close: is called at the end, however that comes.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        close: Callable[[], None],
        status: int = 200,
        **more: Any,
    ) -> None:
        super().__init__(content, status, **more)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            with contextlib.suppress(OSError, ApiError):  # the client has left
                async with until_gone(receive):
                    await self.stream_response(send)
        finally:
            self._close()


def event(value: Any) -> bytes:
    """A server-sent event of a value as JSON."""
    return b"data: %b\n\n" % orjson.dumps(value)


def failure(error: Failed) -> ApiError:
    """The answer to a failure: 500 if the model failed, 503 if the server ends.

    With 503, clients and load balancers try another server; with 400 they do not try again.
    """
    if isinstance(error, Misguided):
        return invalid(f"the text cannot go on: {error}", code="grammar_failed")
    if isinstance(error, Stopped):
        code = PROCESS_LOST if isinstance(error, Lost) else "draining"
        return ApiError(503, str(error), code=code, retry_after=5)
    return ApiError(500, str(error), code="model_failed")


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """An error in the form that the path's protocol has: OpenAI's, Anthropic's or KServe's."""
    service_of(request).traffic.refused(error)
    path = route_path(request.scope)
    body = {"error": error.message} if path.startswith("/v2") else error.body()
    if path.startswith("/v1/messages"):
        body = {**message_error(error), "request_id": request.state.exchange.request_id}
    return JSONResponse(body, error.status, headers=error.headers)


def message_error(error: ApiError) -> dict[str, Any]:
    """An error in the form of Anthropic's."""
    kind = _MESSAGE_ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


_MESSAGE_ERRORS = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip

"""OpenAI's endpoints: `/v1/models`, `/v1/completions`, `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.engine.actions import QueueFull
from serving.engine.choice import Delta
from serving.engine.stream import Failed, Stopped, Stream, Unavailable
from serving.errors import ApiError
from serving.http.jobs import Work, chat_work, completion_work
from serving.http.protocol import Ask, Bounds, parse_chat, parse_completion
from serving.http.requests import (
    EventStream,
    check_key,
    client_of,
    closing_when_gone,
    dump,
    read_object,
    service_of,
)
from serving.http.responses import Answer
from serving.http.service import Language, Loaded, Service

RETRY_SECONDS = 1
"""What `Retry-After` says when the queue is full."""

Parse = Callable[[Mapping[str, Any], Bounds], Ask]
MakeWork = Callable[[Any, Language], Work]


async def models(request: Request) -> Response:
    """`GET /v1/models`: the one model that there is."""
    service = service_of(request)
    check_key(request, service.options)
    data = [_model(service, service.require())]
    return JSONResponse({"object": "list", "data": data})


async def model(request: Request) -> Response:
    """`GET /v1/models/{model}`: the model, if that is its name."""
    service = service_of(request)
    check_key(request, service.options)
    return JSONResponse(_model(service, service.require(request.path_params["model"])))


def _model(service: Service, loaded: Loaded) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": loaded.name,
        "object": "model",
        "created": service.created,
        "owned_by": "spmd",
    }
    if loaded.backend is not None:
        card["max_model_len"] = loaded.backend.limits.longest
    return card


async def completions(request: Request) -> Response:
    """`POST /v1/completions`: continues prompts."""
    return await _complete(request, parse_completion, completion_work)


async def chat_completions(request: Request) -> Response:
    """`POST /v1/chat/completions`: answers a conversation."""
    return await _complete(request, parse_chat, chat_work)


async def _complete(request: Request, parse: Parse, make_work: MakeWork) -> Response:
    service = service_of(request)
    key = check_key(request, service.options)
    language = service.language()
    body = await read_object(request, service.options)
    ask = parse(body, language.bounds)
    loaded = service.require(ask.model)
    # Tokenizing a long text takes a while, in which the event loop must serve other requests.
    work = await asyncio.to_thread(make_work, ask, language)
    client = client_of(request, key, ask.user, service.options)
    stream = _submit(language, work, client)
    prompt_tokens = sum(len(prompt.ids) for prompt in work.prompts)
    request.state.exchange.generates(loaded.name, prompt_tokens, stream)
    answer = Answer(loaded.name, ask, work, language.engine.read_scores)
    if ask.stream:
        return EventStream(_events(stream, answer), stream.close)
    async with closing_when_gone(request.receive, stream.close):
        try:
            deltas = [delta async for delta in stream]
        except Failed as error:
            raise _failure(error) from error
    if stream.abandoned:  # the client has gone: the status is for the log only
        return Response(status_code=499)
    # Writing log-probabilities of many tokens takes a while, too.
    text = await asyncio.to_thread(lambda: dump(answer.whole(deltas)))
    return Response(text, media_type="application/json")


def _submit(language: Language, work: Work, client: str) -> Stream:
    try:
        return language.engine.submit(work.jobs, client)
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full", retry_after=RETRY_SECONDS) from error
    except Unavailable as error:
        raise ApiError(503, str(error), code="draining", retry_after=5) from error
    except Failed as error:
        raise _failure(error) from error


def _failure(error: Failed) -> ApiError:
    """The answer to a failure: 500 if the model failed, 503 if the server is shutting down.

    With 503, clients and load balancers try another server.
    """
    if isinstance(error, Stopped):
        return ApiError(503, str(error), code="draining", retry_after=5)
    return ApiError(500, str(error), code="model_failed")


async def _events(stream: Stream, answer: Answer) -> AsyncIterator[list[str]]:
    """The events of a stream, in batches; a failure is the last event before `[DONE]`."""
    try:
        async for batch in stream.batches():
            if any(delta.scores is not None for delta in batch):
                yield await asyncio.to_thread(_write, batch, answer)
            else:
                yield _write(batch, answer)
    except Failed as error:
        yield [dump(_failure(error).body())]
    else:
        last = answer.last_chunk()
        yield [] if last is None else [dump(last)]
    yield ["[DONE]"]


def _write(batch: Sequence[Delta], answer: Answer) -> list[str]:
    return [dump(chunk) for delta in batch for chunk in answer.chunks(delta)]


ROUTES = [
    Route("/v1/models", models),
    Route("/v1/models/{model:path}", model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
]

"""OpenAI's endpoints: `/v1/models`, `/v1/completions`, `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.engine.choice import Delta
from serving.engine.stream import Failed, Stream
from serving.grammar.compiler import Grammar, Grammars
from serving.grammar.guide import GrammarError, TooHard
from serving.grammar.place import find_problem
from serving.http.admission import Visit
from serving.http.fields import parse_object
from serving.http.jobs import Work, chat_work, completion_work
from serving.http.language import Language, Loaded
from serving.http.limits import Bounds
from serving.http.protocol import Ask, ChatAsk, parse_chat, parse_completion
from serving.http.requests import (
    EventStream,
    check_key,
    dump,
    failure,
    service_of,
    visiting,
)
from serving.http.responses import Answer
from serving.http.service import Service
from serving.http.structure import compile_structure, refusal
from serving.http.tools.ask import Tools
from serving.http.tools.grammar import calls_grammar


def asks_for_grammar(ask: Ask) -> bool:
    """Whether the texts of a request have to fit a grammar."""
    return ask.structure is not None or _are_bound(_tools(ask))


def compile_grammar(ask: Ask, language: Language) -> Grammar:
    """Compiles the grammar of a request that asks for one; that may take seconds.

    Raises:
      ApiError: it is wrong, too large, or cannot be enforced; the error has the place.
    """
    tools, structure = _tools(ask), ask.structure
    # Who has to call a tool has no content that could have a form.
    if structure is not None and not (tools and tools.must):
        alone = compile_structure(structure, language.grammars)
        if tools is None:
            return alone
    assert tools is not None
    content = None if structure is None else structure.value
    try:
        return calls_grammar(language.grammars, language.template.tool_format, tools, content)
    except GrammarError as error:
        raise refusal(*_blamed(tools, language.grammars, error)) from error


def _tools(ask: Ask) -> Tools | None:
    return ask.tools if isinstance(ask, ChatAsk) else None


def _are_bound(tools: Tools | None) -> bool:
    """Whether calls have to fit their tools."""
    return tools is not None and (tools.must or any(tool.strict for tool in tools.callable))


def _blamed(tools: Tools, grammars: Grammars, error: GrammarError) -> tuple[str, str]:
    """(the place in the request, what is wrong there)."""
    for i, tool in enumerate(() if isinstance(error, TooHard) else tools.all):
        problem = functools.partial(grammars.schema_problem, lenient=not tool.strict)
        found = find_problem(tool.schema, problem)
        if found is not None:
            return f"tools[{i}].function.parameters{found[0]}", found[1]
    return "tools", str(error)


NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""What a header shows of names that strangers chose."""

MOST_NAMES = 8

NOT_IN_HEADERS = re.compile(r"[^A-Za-z0-9_.,:$ -]")

Parse = Callable[[Mapping[str, Any], Bounds], Ask]
MakeWork = Callable[[Any, Language, Grammar | None], Work]


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
    async with visiting(request) as visit:
        loaded, language = service.require(), service.language()
        read = functools.partial(_read, service, loaded, visit.body, parse, make_work)
        try:
            texts = service.texts(len(visit.body))
            ask, work = await texts.run(read, visit.client)
            del read  # and with it the body
            visit.drop_body()
            if work is None:
                compile = functools.partial(compile_grammar, ask, language)
                grammar = await service.grammars.run(compile, visit.client)
                make = functools.partial(make_work, ask, language, grammar)
                work = await texts.run(make, visit.client)
            stream = _submit(language, ask, work, visit)
            prompt_tokens = sum(len(prompt.ids) for prompt in work.prompts)
            request.state.exchange.generates(loaded.name, prompt_tokens, stream)
            answer = Answer(loaded.name, ask, work, language.engine)
            if ask.stream:
                response: Response = EventStream(_events(stream, answer), stream.close)
            else:
                response = await _whole(stream, answer)
        except Failed as error:
            raise failure(error) from error
    for text in warnings(ask.ignored, work.notes):
        response.headers.append("Warning", text)
    return response


def warnings(ignored: Sequence[str], notes: Sequence[str]) -> list[str]:
    """`Warning` headers (RFC 7234, section 5.5) that say what was not heeded.

    Args:
      notes: what of a schema is not enforced.

    Example:
      >>> warnings(["min_tokns", "a b"], ())
      ['299 spmd "ignored: min_tokns, ?"']
    """
    made = [_warning(ignored)] if ignored else []
    for note in notes[:MOST_NAMES]:
        words = NOT_IN_HEADERS.sub("", note)[:200]
        made.append(f'299 spmd "not enforced: {words}"')
    return made


def _warning(ignored: Sequence[str]) -> str:
    shown = [name if NAME.fullmatch(name) else "?" for name in ignored[:MOST_NAMES]]
    more = f", and {len(ignored) - MOST_NAMES} more" if len(ignored) > MOST_NAMES else ""
    return f'299 spmd "ignored: {", ".join(shown)}{more}"'


def _read(
    service: Service, loaded: Loaded, body: bytes, parse: Parse, make_work: MakeWork
) -> tuple[Ask, Work | None]:
    """Reads a request, which takes seconds if it is long; with a grammar there is no work yet."""
    language = service.language()
    ask = parse(parse_object(body), language.bounds)
    service.check_name(loaded, ask.model)
    return ask, None if asks_for_grammar(ask) else make_work(ask, language, None)


def _submit(language: Language, ask: Ask, work: Work, visit: Visit) -> Stream:
    """Hands the jobs to the engine, with a place for each."""
    visit.hold_places(len(work.jobs))
    # A stream gives its places back when the engine is done with it, however slowly it is read.
    ended = visit.hand_over() if ask.stream else None
    try:
        return language.engine.submit(work.jobs, visit.client, ask.user, ended)
    except Failed:
        if ended is not None:
            ended()
        raise


async def _whole(stream: Stream, answer: Answer) -> Response:
    try:
        deltas = [delta async for delta in stream]
    finally:
        stream.close()
    # Writing log-probabilities of many tokens takes a while, too.
    text = await asyncio.to_thread(lambda: dump(answer.whole(deltas)))
    return Response(text, media_type="application/json")


async def _events(stream: Stream, answer: Answer) -> AsyncIterator[list[str]]:
    """The events of a stream, in batches; a failure is the last event before `[DONE]`."""
    try:
        async for batch in stream.batches():
            if any(delta.scores is not None for delta in batch):
                yield await asyncio.to_thread(_write, batch, answer)
            else:
                yield _write(batch, answer)
    except Failed as error:
        yield [dump(failure(error).body())]
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

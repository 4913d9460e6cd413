"""OpenAI's endpoints: `/v1/models`, `/v1/completions`, `/v1/chat/completions`; vLLM's adapters."""

import asyncio
import contextlib
import functools
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from spmd.serving.engine.actions import Finish
from spmd.serving.engine.backend import Tokens
from spmd.serving.engine.choice import Delta, Token
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.stream import Failed, Stream
from spmd.serving.errors import ApiError
from spmd.serving.grammar.compiler import Grammar, Grammars
from spmd.serving.grammar.guide import GrammarError, TooHard
from spmd.serving.grammar.place import find_problem
from spmd.serving.http.admission import Visit
from spmd.serving.http.fields import Fields, check_text, parse_object
from spmd.serving.http.jobs import Work, chat_work, completion_work
from spmd.serving.http.language import Language, Loaded
from spmd.serving.http.limits import Bounds
from spmd.serving.http.protocol import (
    DEFAULTS,
    Ask,
    ChatAsk,
    CompletionAsk,
    parse_chat,
    parse_completion,
    refuse,
    token_ids,
)
from spmd.serving.http.requests import (
    ClosingStream,
    check_key,
    event,
    failure,
    service_of,
    visiting,
)
from spmd.serving.http.service import Service
from spmd.serving.http.structure import compile_structure, refusal
from spmd.serving.http.tools.ask import Tools
from spmd.serving.http.tools.grammar import calls_grammar
from spmd.serving.http.tools.reader import MessageReader

# Turns deltas into the JSON of OpenAI's answers: one object, or the chunks of a stream.
#
# Log-probabilities are written as OpenAI does for completions and chats, as vLLM does for prompts.

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""

Json = dict[str, Any]


def completion_logprobs(tokens: Sequence[Token], asked: int | None) -> Json | None:
    """Those of a completion's tokens.

    Args:
      asked: for how many alternatives; None for no log-probabilities.
    """
    if asked is None:
        return None
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_top(token) for token in tokens] if asked else None,
    }


def chat_logprobs(tokens: Sequence[Token], asked: int | None) -> Json | None:
    """Those of a chat's tokens; the arguments are those of `completion_logprobs`."""
    if asked is None:
        return None
    content = [
        {**_said(token.text, token.logprob), "top_logprobs": [_said(*one) for one in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    prompt: Sequence[int], scores: Tokens, asked: int, piece: Callable[[int], str]
) -> list[Json | None]:
    """Those of a prompt's tokens, in vLLM's form: by token id.

    Args:
      scores: row i is what the model says of the token behind token i.
      asked: for how many alternatives.
      piece: the text of a token.
    """
    rows: list[Json | None] = [None]  # nothing comes before the first token
    for i, token in enumerate(prompt[1:]):
        top: list[int] = scores.top_ids[i].tolist()
        own = (token, float(scores.logprobs[i]), top.index(token) + 1 if token in top else None)
        likeliest: list[float] = scores.top_logprobs[i].tolist()
        others = [(one, likeliest[at], at + 1) for at, one in enumerate(top[:asked])]
        row: Json = {}
        for one, logprob, rank in (own, *others):
            row[str(one)] = {
                "logprob": _number(logprob), "rank": rank, "decoded_token": piece(one),
            }  # fmt: skip
        rows.append(row)
    return rows


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def _top(token: Token) -> dict[str, float] | None:
    """The alternatives by text, and the token itself; of equal texts the likelier one counts."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for text, logprob in token.top:
        top.setdefault(text, max(logprob, LEAST_LOGPROB))
    top.setdefault(token.text, max(token.logprob, LEAST_LOGPROB))
    return top


def _said(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": _number(logprob), "bytes": list(text.encode())}


class Answer:
    """The answer to one request: either the `events` of each delta, or the `whole` of all deltas.

    Args:
      work: its prompts and jobs.
      engine: reads the scores of prompts, and knows the texts of tokens.
      cached: as of `Stream`.
    """

    def __init__(
        self, model: str, ask: Ask, work: Work, engine: Engine, cached: Mapping[int, int]
    ) -> None:
        self._ask = ask
        self._cached = cached
        self._work = work
        self._engine = engine
        self._is_chat = isinstance(ask, ChatAsk)
        name, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", KIND)
        self._chunk_kind = "chat.completion.chunk" if self._is_chat else KIND
        self._id = uuid.uuid4().hex
        self._head: Json = {
            "id": f"{name}-{self._id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._generated = [0] * len(work.jobs)
        self._started = [False] * len(work.jobs)
        self._told = set[int]()  # choices that had the ids of their prompt
        # What reads the thought and the calls in each text; None where there may be neither.
        self._readers: list[MessageReader | None] = [None for _ in work.jobs]
        if isinstance(ask, ChatAsk) and (work.format is not None or work.thought is not None):
            self._readers = [
                MessageReader(ask.tools, work.format, work.thought, ask.thoughts) for _ in work.jobs
            ]

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The chunks of a stream for one delta; none if the delta shows nothing."""
        self._generated[delta.choice] = delta.generated
        delta = self._with_echo(delta)
        if self._is_chat:
            yield from map(self._chunk, self._chat_chunks(delta))
        elif delta.text or delta.tokens or delta.ids or delta.finish:
            logprobs = completion_logprobs(delta.tokens, self._ask.logprobs)
            choice = {"index": delta.choice, "text": delta.text, "logprobs": logprobs}
            choice |= self._ids(delta.choice, delta.ids)
            yield self._chunk({**choice, "finish_reason": delta.finish})

    def events(self, delta: Delta) -> Iterator[bytes]:
        """What a stream has of one delta."""
        yield from map(event, self.chunks(delta))

    def last(self) -> Iterator[bytes]:
        """The end of a stream, with the token counts if they were asked for."""
        if self._ask.include_usage:
            yield event(
                {**self._head, "object": self._chunk_kind, "choices": [], "usage": self.usage()}
            )
        yield DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """The end of a stream that goes no further."""
        yield from (event(error.body()), DONE)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer in one object."""
        by_choice: list[list[Delta]] = [[] for _ in self._work.jobs]
        for delta in deltas:
            self._generated[delta.choice] = delta.generated
            by_choice[delta.choice].append(self._with_echo(delta))
        choices = []
        for index, mine in enumerate(by_choice):
            text = "".join(delta.text for delta in mine)
            tokens = [token for delta in mine for token in delta.tokens]
            made = self._choice(index, text, tokens, mine[-1].finish)
            choices.append(made | self._ids(index, [one for delta in mine for one in delta.ids]))
        answer = {**self._head, "choices": choices, "usage": self.usage()}
        answer |= self._prompt_ids(0) if self._is_chat else {}
        return answer if self._ask.prompt_logprobs is None else self._with_prompts(answer, deltas)

    def _ids(self, index: int, drawn: Sequence[int]) -> Json:
        """The ids of tokens where they are asked for; a completion's first ones with its prompt."""
        if not self._ask.token_ids:
            return {}
        is_first = not self._is_chat and index not in self._told
        self._told.add(index)
        return {"token_ids": list(drawn), **(self._prompt_ids(index) if is_first else {})}

    def _prompt_ids(self, index: int) -> Json:
        prompt = self._work.prompts[index // self._ask.n]
        return {"prompt_token_ids": list(prompt.ids)} if self._ask.token_ids else {}

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head, "object": self._chunk_kind, "choices": [choice]}
        if self._is_chat and "prompt_token_ids" in choice:  # as vLLM has it
            chunk["prompt_token_ids"] = choice.pop("prompt_token_ids")
        if not self._ask.include_usage:
            return chunk
        return {**chunk, "usage": self.usage() if self._ask.usage_always else None}

    def _chat_chunks(self, delta: Delta) -> Iterator[Json]:
        """The role in a chunk of its own, then the text, then the reason of the end."""
        if not self._started[delta.choice]:
            self._started[delta.choice] = True
            role = _chat_choice(delta.choice, {"role": "assistant", "content": ""})
            yield role | self._prompt_ids(delta.choice)
        reader, finish = self._readers[delta.choice], delta.finish
        logprobs = chat_logprobs(delta.tokens, self._ask.logprobs)
        # Tokens of which nothing is to be shown have their log-probabilities and ids all the same.
        told = delta.tokens or delta.ids
        parts: list[Json] = [{"content": delta.text}] if delta.text or told else []
        if reader is not None:
            parts = [*reader.deltas(delta.text, finish)] or ([{}] if told else [])
        for i, part in enumerate(parts):
            ids = self._ids(delta.choice, () if i else delta.ids)
            yield _chat_choice(delta.choice, part, None if i else logprobs) | ids
        if finish:
            reason = finish if reader is None else reader.finish(finish)
            yield {**_chat_choice(delta.choice, {}), "finish_reason": reason}

    def _choice(
        self, index: int, text: str, tokens: Sequence[Token], finish: Finish | None
    ) -> Json:
        asked = self._ask.logprobs
        if not self._is_chat:
            logprobs = completion_logprobs(tokens, asked)
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        reader = self._readers[index]
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if reader is not None:
            message = reader.message(text, finish)
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(tokens, asked),
            "finish_reason": finish if reader is None else reader.finish(finish),
        }

    def _with_prompts(self, answer: Json, deltas: Sequence[Delta]) -> Json:
        """The answer with log-probabilities of its prompts; that of a chat is beside `choices`."""
        made: dict[int, Any] = {}
        for delta in deltas:
            if delta.scores is not None:
                number = delta.choice // self._ask.n
                prompt, asked = self._work.prompts[number], self._ask.prompt_logprobs or 0
                made[number] = prompt_logprobs(prompt.ids, delta.scores, asked, self._engine.piece)
        if self._is_chat:
            return {**answer, "prompt_logprobs": made[0]}
        for index, choice in enumerate(answer["choices"]):
            choice["prompt_logprobs"] = made[index // self._ask.n]
        return answer

    def _with_echo(self, delta: Delta) -> Delta:
        """If the request has `echo`: puts the prompt before the first delta, and moves offsets."""
        if not isinstance(self._ask, CompletionAsk) or not self._ask.echo:
            return delta
        prompt = self._work.prompts[delta.choice // self._ask.n]
        tokens: tuple[Token, ...] = ()
        if delta.scores is not None:
            tokens = self._engine.read_scores(self._work.jobs[delta.choice], delta.scores)
        # The prompt's text begins behind the tokens that were added to it, such as <s>.
        added = sum(len(token.text) for token in tokens[: prompt.added])
        before = [token._replace(offset=token.offset - added) for token in tokens[prompt.added :]]
        behind = [t._replace(offset=t.offset + len(prompt.text)) for t in delta.tokens]
        text = delta.text if self._started[delta.choice] else prompt.text + delta.text
        self._started[delta.choice] = True
        return delta._replace(text=text, tokens=(*before, *behind))

    def usage(self) -> Json:
        """The counts of tokens so far."""
        prompt = sum(len(prompt.ids) for prompt in self._work.prompts)
        generated = sum(self._generated)
        firsts = range(0, len(self._work.jobs), self._ask.n)  # of choices of the same prompt
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.get(i, 0) for i in firsts)},
        }


KIND = "text_completion"
DONE = b"data: [DONE]\n\n"


def _chat_choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


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

Names = tuple[tuple[str, str], ...]
"""What chats call a part of a request, and what another API calls it."""


class Dialect(NamedTuple):
    """How an API asks for texts, and how it tells them."""

    parse: Callable[[Mapping[str, Any], Bounds], Ask]
    make_work: Callable[[Any, Language, Grammar | None], Work]
    answer: Callable[[str, Any, Work, Engine, Mapping[int, int]], Answer] = Answer
    names: Names = ()  # for errors; the first that is found counts

    @contextlib.asynccontextmanager
    async def naming(self) -> AsyncIterator[None]:
        """Errors that are raised in the block have the places of this API's requests."""
        try:
            yield
        except ApiError as error:
            place, colon, rest = error.message.partition(": ")
            if " " not in place:
                error.message = f"{self._named(place)}{colon}{rest}"
            error.param = error.param and self._named(error.param)
            raise

    async def complete(self, request: Request) -> Response:
        """Answers a request for texts, as a whole or as a stream."""
        service = service_of(request)
        async with self.naming(), visiting(request) as visit:
            loaded, language = service.require(), service.language()
            read = functools.partial(self._read, service, visit.body)
            texts = service.texts(len(visit.body))
            ask, work = await texts.run(read, visit.client)
            del read  # and with it the body
            visit.drop_body()
            if work is None:
                compile = functools.partial(compile_grammar, ask, language)
                grammar = await service.grammars.run(compile, visit.client)
                make = functools.partial(self.make_work, ask, language, grammar)
                work = await texts.run(make, visit.client)
            stream = _submit(service, language, ask, work, visit)
            prompt_tokens = sum(len(prompt.ids) for prompt in work.prompts)
            name = ask.model or loaded.name
            request.state.exchange.generates(name, prompt_tokens, stream, ask.stream)
            answer = self.answer(name, ask, work, language.engine, stream.cached)
            if ask.stream:
                response: Response = ClosingStream(
                    _events(stream, answer), stream.close, headers=EVENTS,
                    media_type="text/event-stream",
                )  # fmt: skip
            else:
                try:
                    deltas = [delta async for delta in stream]
                finally:
                    stream.close()
                # Writing log-probabilities of many tokens takes a while, too.
                text = await asyncio.to_thread(lambda: orjson.dumps(answer.whole(deltas)))
                response = Response(text, media_type="application/json")
        for warning in warnings(ask.ignored, work.notes):
            response.headers.append("Warning", warning)
        return response

    def _read(self, service: Service, body: bytes) -> tuple[Ask, Work | None]:
        """Reads a request, in seconds if it is long; with a grammar there is no work yet."""
        language = service.language()
        ask = self.parse(parse_object(body), language.bounds)
        service.check_name(ask.model)
        tools = _tools(ask)
        calls = tools is not None and (tools.must or any(tool.strict for tool in tools.callable))
        has_grammar = ask.structure is not None or calls
        return ask, None if has_grammar else self.make_work(ask, language, None)

    def _named(self, place: str) -> str:
        tried = (
            re.subn(rf"(?<![a-z_]){re.escape(theirs)}(?![a-z_])", ours, place, count=1)
            for theirs, ours in self.names
        )
        return next((named for named, found in tried if found), place)


async def models(request: Request) -> Response:
    """`GET /v1/models`: the one model that there is, and its adapters."""
    service = service_of(request)
    check_key(request)
    loaded = service.require()
    data = [_model(service, loaded, name) for name in service.adapters.names]
    return JSONResponse({"object": "list", "data": data})


async def model(request: Request) -> Response:
    """`GET /v1/models/{model}`: the model, if that is its name."""
    service = service_of(request)
    check_key(request)
    name = request.path_params["model"]
    return JSONResponse(_model(service, service.require(name), name))


def _model(service: Service, loaded: Loaded, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "spmd",
    }
    if name != loaded.name:
        card["parent"] = loaded.name
    if loaded.language is not None:
        card["max_model_len"] = loaded.language.limits.longest
        sampling = service.language().sampling
        card["generation_config"] = {name: getattr(sampling, name) for name in DEFAULTS}
    return card


async def change_adapters(request: Request) -> Response:
    """`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters come and go."""
    service, loads = service_of(request), "unload" not in request.url.path
    async with visiting(request) as visit:
        service.language()
        fields = Fields(parse_object(visit.body))
        name, path = fields.text("lora_name"), fields.text("lora_path")
        if loads:
            refuse(fields, {"load_inplace": (False,)})
            loading = asyncio.create_task(service.adapters.load(name, path))
            await asyncio.shield(loading)  # the client may leave
        else:
            service.adapters.unload(name)
    done = "added" if loads else "removed"
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: the ids that a prompt, or a chat, becomes."""

    def work(body: Mapping[str, Any], language: Language) -> Json:
        if "messages" in body:
            made = chat_work(parse_chat(body, language.bounds), language)
        else:
            check_text(body.get("prompt"), "prompt")
            asked = parse_completion({**body, "max_tokens": 0}, language.bounds)
            made = completion_work(asked, language)
        ids, longest = made.prompts[0].ids, language.bounds.max_length
        return {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None}

    return await run_on_text(request, work)


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: the text of some ids."""

    def work(body: Mapping[str, Any], language: Language) -> Json:
        return {"prompt": language.decode(token_ids(body.get("tokens"), "tokens", language.bounds))}

    return await run_on_text(request, work)


async def run_on_text(
    request: Request, work: Callable[[Mapping[str, Any], Language], Json]
) -> Response:
    """What is answered to a body on a thread for texts."""
    service = service_of(request)
    async with visiting(request) as visit:
        language, texts = service.language(), service.texts(len(visit.body))
        made = await texts.run(lambda: work(service.parse(visit.body), language), visit.client)
        return JSONResponse(made)


def warnings(ignored: Sequence[str], notes: Sequence[str]) -> list[str]:
    """`Warning` headers (RFC 7234, section 5.5) that say what was not heeded.

    Args:
      notes: what of a schema is not enforced.

    Example:
      >>> warnings(["min_tokns", "a b"], ())
      ['299 spmd "ignored: min_tokns, ?"']
    """
    shown = [name if NAME.fullmatch(name) else "?" for name in ignored[:MOST_NAMES]]
    more = f", and {len(ignored) - MOST_NAMES} more" if len(ignored) > MOST_NAMES else ""
    made = [f'299 spmd "ignored: {", ".join(shown)}{more}"'] if ignored else []
    for note in notes[:MOST_NAMES]:
        words = NOT_IN_HEADERS.sub("", note)[:200]
        made.append(f'299 spmd "not enforced: {words}"')
    return made


def _submit(service: Service, language: Language, ask: Ask, work: Work, visit: Visit) -> Stream:
    """Hands the jobs to the engine, with a place for each."""
    visit.hold_places(len(work.jobs))
    adapter = service.adapters.enter(ask.model)
    # A stream gives its places back when the engine is done with it, however slowly it is read.
    leaving = contextlib.ExitStack()
    leaving.callback(service.adapters.leave, adapter)
    if ask.stream:
        leaving.callback(visit.hand_over())
    jobs = [adapter.adapted(job) for job in work.jobs]
    try:
        return language.engine.submit(jobs, visit.client, ask.user, leaving.close)
    except BaseException:
        leaving.close()
        raise


EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _events(stream: Stream, answer: Answer) -> AsyncIterator[bytes]:
    """The events of a stream, in batches, which cost less; a failure is the last of them."""
    try:
        async for batch in stream.batches():
            if any(delta.scores is not None for delta in batch):
                yield await asyncio.to_thread(_write, batch, answer)
            else:
                yield _write(batch, answer)
    except Failed as error:
        yield b"".join(answer.failed(failure(error)))
    else:
        yield b"".join(answer.last())


def _write(batch: Sequence[Delta], answer: Answer) -> bytes:
    return b"".join(event for delta in batch for event in answer.events(delta))


COMPLETIONS, CHATS = Dialect(parse_completion, completion_work), Dialect(parse_chat, chat_work)

ROUTES = [
    Route("/v1/models", models),
    Route("/v1/models/{model:path}", model),
    Route("/v1/load_lora_adapter", change_adapters, methods=["POST"]),
    Route("/v1/unload_lora_adapter", change_adapters, methods=["POST"]),
    Route("/v1/completions", COMPLETIONS.complete, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/chat/completions", CHATS.complete, methods=["POST"]),
]

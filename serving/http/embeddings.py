"""Vectors of texts, and texts in the order of how near they are to a query.

They are for a model of tensors whose inputs are `input_ids` and `attention_mask` (B, L), integers,
and that has an output `embeddings` (B, H); its bundle has the tokenizer. Texts get the tokenizer's
own marks, and padding behind them.
"""

import asyncio
import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spmd.models.training.data.tokenizer import Tokenizer
from spmd.serving.engine.batches import sizes_of
from spmd.serving.engine.infer import Array, Infer
from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.fields import Fields, check_text, is_integer, show
from spmd.serving.http.language import Loaded
from spmd.serving.http.requests import service_of, visiting

IDS, MASK, VECTORS = "input_ids", "attention_mask", "embeddings"

MOST_TEXTS = 2048
"""In one request, as OpenAI has it."""


class TextModel(NamedTuple):
    """What makes vectors of texts."""

    infer: Infer
    tokenizer: Tokenizer
    rows: int  # of a call at most
    longest: int  # tokens of a text at most

    @classmethod
    def of(cls, loaded: Loaded) -> "TextModel":
        """The model that is served; `ApiError` if it is another one."""
        infer, inputs = loaded.infer, {}
        if infer is not None and VECTORS in [spec.name for spec in infer.outputs]:
            inputs = {spec.name: spec for spec in infer.inputs}
        if infer is None or loaded.tokenizer is None or inputs.keys() != {IDS, MASK}:
            raise ApiError(404, f"{loaded.name} makes no embeddings: {IDS}, {MASK} -> {VECTORS}")
        rows, longest = inputs[IDS].shape
        return cls(infer, loaded.tokenizer, max(rows, *sizes_of(infer), 1), longest)

    def ids(self, text: Any, param: str) -> Sequence[int]:
        """Token ids of a text, or those that were given; `ApiError` if there are too many."""
        found = text
        if not isinstance(text, list):
            found = _encode(self.tokenizer, check_text(text, param))
        elif not all(is_integer(i) and 0 <= i < self.tokenizer.vocab_size for i in text):
            raise invalid(f"{param}: ids are integers below {self.tokenizer.vocab_size}")
        if not 1 <= len(found) <= self.longest:
            raise invalid(
                f"{param}: {len(found)} tokens; 1 to {self.longest} fit",
                code="context_length_exceeded",
            )  # fmt: skip
        return list(found)

    def calls(self, rows: Sequence[Sequence[int]]) -> Sequence[Mapping[str, Array]]:
        """The tensors of as many calls as it takes, each with all rows that it may have."""
        dtypes = {spec.name: spec.dtype for spec in self.infer.inputs}
        made = []
        for begin in range(0, len(rows), self.rows):
            some = [*rows[begin : begin + self.rows]]
            if not sizes_of(self.infer):  # then a call has just so many
                some += [some[-1]] * (self.rows - len(some))
            ids = np.zeros((len(some), self.longest), dtypes[IDS])
            mask = np.zeros(ids.shape, dtypes[MASK])
            for row, tokens in enumerate(some):
                ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
            made.append({IDS: ids, MASK: mask})
        return made


@functools.lru_cache(maxsize=1)
def _library(spec: str) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer.from_str(spec)
    found.no_truncation()
    found.no_padding()
    return found


def _encode(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """The ids with all marks: `Tokenizer` knows those before a text, here those behind it count."""
    if tokenizer.spec is None:
        return [int(i) for i in tokenizer.encode_batch([text])[0]]
    ids: list[int] = _library(tokenizer.spec).encode(text).ids
    return ids


async def _answer(
    request: Request,
    read: Callable[[Mapping[str, Any], TextModel], tuple[list[Sequence[int]], Any]],
    write: Callable[[Any, Array, int], Mapping[str, Any]],
) -> Response:
    """Reads a body into rows of ids, makes their vectors, and writes them, each on its thread."""
    service = service_of(request)
    async with visiting(request) as visit:
        loaded = service.require()
        model, texts = TextModel.of(loaded), service.texts(len(visit.body))
        rows, ask = await texts.run(lambda: read(service.parse(visit.body), model), visit.client)
        workers, batches = service.tensors()
        calls = (workers.run(batches.call(one), visit.client) for one in model.calls(rows))
        found = [one[VECTORS] for one in await asyncio.gather(*calls)]
        vectors = np.concatenate(found)[: len(rows)].astype(np.float32)
        total = request.state.exchange.prompt_tokens = sum(map(len, rows))
        written = await texts.run(lambda: write(ask, vectors, total), visit.client)
        return JSONResponse({"model": loaded.name, **written})


def _unit(vectors: Array) -> Array:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))


async def embeddings(request: Request) -> Response:
    """`POST /v1/embeddings`: a vector of each text, or list of ids."""

    def read(body: Mapping[str, Any], model: TextModel) -> tuple[list[Sequence[int]], Any]:
        fields = Fields(body)
        given, form = fields.get("input"), fields.text("encoding_format", "float")
        is_one = not isinstance(given, list) or (given and all(map(is_integer, given)))
        several = [given] if is_one else given
        if not 1 <= len(several) <= MOST_TEXTS:
            raise invalid(f"input: 1 to {MOST_TEXTS} texts, not {len(several)}")
        if form not in ("float", "base64"):
            raise invalid(f"encoding_format: float or base64, not {show(form)}")
        rows = [model.ids(one, f"input[{i}]") for i, one in enumerate(several)]
        return rows, (form, fields.integer("dimensions", 1, 2**16))

    def write(ask: Any, vectors: Array, total: int) -> Mapping[str, Any]:
        form, size = ask
        if size is not None:
            if size > vectors.shape[1]:
                raise invalid(f"dimensions: {vectors.shape[1]} are the most")
            vectors = _unit(vectors[:, :size])
        values = [
            base64.b64encode(v.astype("<f4").tobytes()).decode() if form == "base64" else v.tolist()
            for v in vectors
        ]
        data = [
            {"object": "embedding", "index": i, "embedding": value}
            for i, value in enumerate(values)
        ]
        return {
            "object": "list",
            "data": data,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }

    return await _answer(request, read, write)


async def rerank(request: Request) -> Response:
    """`POST /v1/rerank`: documents by the cosine of their vectors and the query's."""

    def read(body: Mapping[str, Any], model: TextModel) -> tuple[list[Sequence[int]], Any]:
        fields = Fields(body)
        given = fields.get("documents")
        if not isinstance(given, list) or not 1 <= len(given) < MOST_TEXTS:
            raise invalid(f"documents: a list of 1 to {MOST_TEXTS - 1} texts")
        texts = [one.get("text") if isinstance(one, dict) else one for one in given]
        rows = [model.ids(fields.text("query"), "query")]
        for i, text in enumerate(texts):
            rows.append(model.ids(check_text(text, f"documents[{i}]"), f"documents[{i}]"))
        return rows, (texts, fields.integer("top_n", 0, MOST_TEXTS))

    def write(ask: Any, vectors: Array, total: int) -> Mapping[str, Any]:
        texts, most = ask
        unit = _unit(vectors)
        scores = unit[1:] @ unit[0]
        best = np.argsort(-scores, kind="stable")[: most or None]
        results = [
            {"index": int(i), "document": {"text": texts[i]}, "relevance_score": float(scores[i])}
            for i in best
        ]
        return {"results": results, "usage": {"prompt_tokens": total, "total_tokens": total}}

    return await _answer(request, read, write)


ROUTES = [
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/rerank", rerank, methods=["POST"]),
    Route("/rerank", rerank, methods=["POST"]),
]

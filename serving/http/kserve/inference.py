"""`POST /v2/models/{model}/infer`: a request is read, its tensors run, and its answer written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from serving.engine.batches import Tensors
from serving.engine.infer import Array, Infer, TensorSpec
from serving.engine.stream import Stopped
from serving.errors import ApiError, invalid
from serving.http.fields import Fields, parse_object, show
from serving.http.kserve.encodings import check_encoding, pack, unpack, wanted_encoding
from serving.http.kserve.models import VERSION, asked_model
from serving.http.kserve.tensors import Binary, Output, parameters_of, read_tensor, write_tensor
from serving.http.requests import dump, failure, service_of, visiting
from serving.http.service import Service

LENGTH = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are JSON: binary tensors are behind them."""

TYPES = ("application/json", "application/octet-stream", "")

_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


async def infer(request: Request) -> Response:
    """`POST /v2/models/{model}/infer`: runs the model on tensors."""
    service = service_of(request)
    packed = request.headers.get("content-encoding", "").strip().lower().replace("identity", "")
    check_encoding(packed)
    async with visiting(request, TYPES) as visit:
        loaded = asked_model(request)
        function = loaded.infer
        if function is None:
            raise ApiError(404, f"{loaded.name} is no model of tensors: use /v1/completions")
        texts, client = service.texts(len(visit.body)), visit.client
        try:
            if packed:
                body, most = visit.body, service.options.body_bytes
                visit.body = await texts.run(lambda: unpack(body, most), client)
                visit.hold_bytes(max(0, len(visit.body) - len(body)))
                texts = service.texts(len(visit.body))
            whole, length = visit.body, request.headers.get(LENGTH)
            asked = await texts.run(lambda: read_request(whole, length, function), client)
            results = await _run(service, asked.tensors, client)
            encoding = wanted_encoding(request.headers.get("accept-encoding", ""))
            return await texts.run(lambda: _answer(loaded.name, asked, results, encoding), client)
        except Stopped as error:
            raise failure(error) from error


async def _run(service: Service, tensors: Tensors, client: str) -> Tensors:
    """The function's results, from a call that other requests may share."""
    if service.batches is None:
        raise ApiError(404, "this is no model of tensors: use /v1/completions")
    try:
        return await service.tensors().run(service.batches.call(tensors), client)
    except ValueError as error:
        raise invalid(f"inputs: {error}", "inputs") from error


class InferenceAsk(NamedTuple):
    """A request for tensors: its inputs, the outputs that it wants, and its id."""

    tensors: dict[str, Array]
    outputs: list[Output]
    id: str | None


def read_request(body: bytes, length: str | None, function: Infer) -> InferenceAsk:
    """Reads the body of a request.

    Args:
      body: JSON, and binary tensors behind it.
      length: how many bytes are JSON, as the header says; None: all.
      function: what is to run.

    Raises:
      ApiError: it is not one, or does not fit the function.
    """
    size = len(body) if length is None else _length(length, len(body))
    content = parse_object(body[:size])
    parameters = parameters_of(content, "the request")
    for name in _SEQUENCES:
        if parameters.get(name):
            raise invalid(f"{name} is not supported: each request stands for itself", "parameters")
    binary = Binary(memoryview(body)[size:])
    tensors = read_inputs(content.get("inputs"), function.inputs, binary)
    binary.check_end()
    by_default = Fields(parameters).flag("binary_data_output")
    outputs = _wanted(content.get("outputs"), function.outputs, by_default)
    id_ = None if content.get("id") is None else Fields(content).text("id")
    return InferenceAsk(tensors, outputs, id_)


def _length(text: str, most: int) -> int:
    if not (text.isdecimal() and len(text) < 18 and 0 < int(text) <= most):
        raise invalid(
            f"{LENGTH}: the number of bytes of JSON at the beginning of the body is needed, 1 to "
            f"{most}, not {text[:40]!r}"
        )
    return int(text)


def read_inputs(value: Any, specs: Sequence[TensorSpec], binary: Binary) -> dict[str, Array]:
    """Reads the inputs of a request.

    Args:
      value: the request's `inputs`.
      specs: the model's inputs.
      binary: what is behind the JSON.

    Returns:
      Arrays by name.

    Raises:
      ApiError: an input is missing, unknown, given twice, or does not fit.
    """
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise invalid("inputs: a list of tensors is needed", "inputs")
    known = {spec.name: spec for spec in specs}
    tensors: dict[str, Array] = {}
    for one in value:
        name = one.get("name")
        if not isinstance(name, str) or name not in known or name in tensors:
            raise invalid(
                f"inputs: {show(name)} is unknown or there twice; the model takes "
                f"{', '.join(known)}",
                "inputs",
            )
        tensors[name] = read_tensor(one, known[name], binary)
    missing = [name for name in known if name not in tensors]
    if missing:
        raise invalid(f"inputs: {', '.join(missing)} missing", "inputs")
    return tensors


def _wanted(value: Any, specs: Sequence[TensorSpec], by_default: bool) -> list[Output]:
    """The outputs that the request asks for; all of them unless it names some."""
    names = [spec.name for spec in specs]
    if value is None or value == []:
        return [Output(name, by_default) for name in names]
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise invalid(f"outputs: a list of objects is needed, not {show(value)}", "outputs")
    wanted = []
    for one in value:
        name = one.get("name")
        if name not in names:
            raise invalid(f"outputs: there is no {show(name)} among {', '.join(names)}", "outputs")
        parameters = Fields(parameters_of(one, f"outputs.{name}"))
        wanted.append(Output(str(name), parameters.flag("binary_data", by_default)))
    return wanted


def _answer(name: str, asked: InferenceAsk, results: Tensors, encoding: str) -> Response:
    head: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if asked.id is not None:
        head["id"] = asked.id
    written = [write_tensor(output, np.asarray(results[output.name])) for output in asked.outputs]
    text = dump({**head, "outputs": [about for about, _ in written]}).encode()
    headers = {}
    kind = "application/json"
    if any(output.binary for output in asked.outputs):
        headers[LENGTH] = str(len(text))
        kind = "application/octet-stream"
    body = b"".join((text, *(data for _, data in written)))
    if encoding:
        headers["Content-Encoding"] = encoding
        body = pack(body, encoding)
    return Response(body, media_type=kind, headers=headers)

"""KServe's open inference protocol, version 2, with tensors as JSON.

POST /v2/models/NAME/infer
{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.engine.infer import Array, Infer, TensorSpec
from serving.engine.stream import Stopped
from serving.errors import ApiError, invalid
from serving.http.datatypes import DATATYPES, NAMES
from serving.http.fields import Fields, is_integer, parse_object, show
from serving.http.requests import check_key, dump, service_of, visiting


async def live(request: Request) -> Response:
    """`GET /v2/health/live`: always true, as long as the process answers."""
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    """`GET /v2/health/ready`: whether requests are served."""
    problem = service_of(request).problem()
    return JSONResponse({"ready": problem is None}, 200 if problem is None else 503)


async def model_ready(request: Request) -> Response:
    """`GET /v2/models/{model}/ready`: whether requests for this model are served."""
    service = service_of(request)
    problem = service.problem()
    if problem is None:
        service.require(request.path_params["model"])
    body = {"name": request.path_params["model"], "ready": problem is None}
    return JSONResponse(body, 200 if problem is None else 503)


async def metadata(request: Request) -> Response:
    """`GET /v2/models/{model}`: the model's inputs and outputs."""
    service = service_of(request)
    check_key(request, service.options)
    loaded = service.require(request.path_params["model"])
    infer = loaded.infer
    return JSONResponse(
        {
            "name": loaded.name,
            "versions": ["1"],
            "platform": "spmd",
            "inputs": [_describe(spec) for spec in infer.inputs] if infer else [],
            "outputs": [_describe(spec) for spec in infer.outputs] if infer else [],
        }
    )


async def infer(request: Request) -> Response:
    """`POST /v2/models/{model}/infer`: runs the model on tensors."""
    service = service_of(request)
    async with visiting(request) as visit:
        loaded = service.require(request.path_params["model"])
        model, function = service.tensors(), loaded.infer
        if function is None:
            raise ApiError(404, f"{loaded.name} is no model of tensors: use /v1/completions")
        texts, body = service.texts(len(visit.body)), visit.body
        try:
            asked = await texts.run(lambda: read_request(body, function), visit.client)
            results = await model.run(lambda: _run(function, asked.tensors), visit.client)
            answer = await texts.run(lambda: _write(loaded.name, asked, results), visit.client)
        except Stopped as error:
            raise ApiError(503, str(error), code="draining", retry_after=5) from error
        return Response(answer, media_type="application/json")


class Asked(NamedTuple):
    """A request for tensors: its inputs, the names of the outputs that it wants, and its id."""

    tensors: dict[str, Array]
    outputs: list[str]
    id: str | None


def read_request(content: bytes, function: Infer) -> Asked:
    """Reads the body of a request.

    Raises:
      ApiError: it is not one, or does not fit the function.
    """
    body = parse_object(content)
    tensors = read_tensors(body.get("inputs"), function.inputs)
    outputs = _wanted(body.get("outputs"), function.outputs)
    return Asked(tensors, outputs, None if body.get("id") is None else Fields(body).text("id"))


def _run(function: Infer, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
    try:
        return function.infer(tensors)
    except ValueError as error:
        raise invalid(f"inputs: {error}", "inputs") from error


def _write(name: str, asked: Asked, results: Mapping[str, Array]) -> str:
    head = {"model_name": name, "model_version": "1"}
    if asked.id is not None:
        head["id"] = asked.id
    outputs = [write_tensor(output, np.asarray(results[output])) for output in asked.outputs]
    return dump({**head, "outputs": outputs})


def _describe(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": NAMES[spec.dtype], "shape": list(spec.shape)}


def _wanted(value: Any, specs: Sequence[TensorSpec]) -> list[str]:
    """The names of the outputs that the request asks for; all of them unless it names some."""
    names = [spec.name for spec in specs]
    if value is None or value == []:
        return names
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise invalid(f"outputs: a list of objects is needed, not {show(value)}", "outputs")
    wanted = [one.get("name") for one in value]
    for name in wanted:
        if name not in names:
            raise invalid(f"outputs: there is no {show(name)} among {', '.join(names)}", "outputs")
    return [str(name) for name in wanted]


def read_tensors(value: Any, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Reads the inputs of a request, with the dtypes and shapes that the model takes.

    Args:
      value: the request's `inputs`.
      specs: the model's inputs.

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
        tensors[name] = _read_tensor(one, known[name])
    missing = [name for name in known if name not in tensors]
    if missing:
        raise invalid(f"inputs: {', '.join(missing)} missing", "inputs")
    return tensors


def _read_tensor(value: Mapping[str, Any], spec: TensorSpec) -> Array:
    place = f"inputs.{spec.name}"
    expected = NAMES[spec.dtype]
    if value.get("datatype") != expected:
        raise invalid(
            f"{place}: datatype {expected} is needed, not {show(value.get('datatype'))}", "inputs"
        )
    shape = _shape(value.get("shape"), spec, place)
    array = _array(value.get("data"), DATATYPES[expected], place)
    if array.size != math.prod(shape):
        raise invalid(
            f"{place}: {array.size} numbers do not make the shape {list(shape)}", "inputs"
        )
    return array.reshape(shape)


def _shape(value: Any, spec: TensorSpec, place: str) -> tuple[int, ...]:
    is_shape = isinstance(value, list) and all(is_integer(size) and size >= 0 for size in value)
    fits = (
        is_shape
        and len(value) == len(spec.shape)
        and all(want in (-1, size) for want, size in zip(spec.shape, value, strict=True))
    )
    if not fits:
        raise invalid(
            f"{place}: shape {list(spec.shape)} is needed (-1 is any), not {_show_shape(value)}",
            "inputs",
        )
    return tuple(value)


def _show_shape(value: Any) -> str:
    return str(value)[:60] if isinstance(value, list) else show(value)


def _array(data: Any, dtype: np.dtype[Any], place: str) -> Array:
    """Numbers as JSON has them -> an array; none is rounded to an integer or cut to its range."""
    if not isinstance(data, list):
        raise invalid(f"{place}: data has to be a list, not {show(data)}", "inputs")
    try:
        array = np.asarray(data)
    except (ValueError, OverflowError) as error:  # ragged lists, huge integers
        raise invalid(f"{place}: data is no array: {error}", "inputs") from error
    allowed = "b" if dtype.kind == "b" else "iu" if dtype.kind in "iu" else "iuf"
    if array.size and array.dtype.kind not in allowed:
        raise invalid(f"{place}: data has to be numbers of {NAMES[dtype.name]}", "inputs")
    if dtype.kind in "iu" and array.size:
        bounds = np.iinfo(dtype)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise invalid(f"{place}: a number is beyond {NAMES[dtype.name]}", "inputs")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def write_tensor(name: str, array: Array) -> dict[str, Any]:
    """Writes an output as JSON.

    Raises:
      ApiError: it holds NaN or infinities, which JSON cannot express.
    """
    if array.dtype.kind not in "biu" and not np.isfinite(array.astype(np.float64)).all():
        raise ApiError(500, f"output {name} holds NaN or infinities, which JSON cannot say")
    return {
        "name": name,
        "datatype": NAMES[array.dtype.name],
        "shape": list(array.shape),
        "data": array.ravel().tolist(),
    }


ROUTES = [
    Route("/v2/health/live", live),
    Route("/v2/health/ready", ready),
    Route("/v2/models/{model}", metadata),
    Route("/v2/models/{model}/ready", model_ready),
    Route("/v2/models/{model}/infer", infer, methods=["POST"]),
]

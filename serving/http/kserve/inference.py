"""`POST /v2/models/{model}/infer`: a request is read, its tensors run, and its answer written."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from spmd.serving.engine.batches import Tensors
from spmd.serving.engine.infer import DATATYPES, NAMES, Array, Infer, TensorSpec
from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.fields import Fields, is_integer, parse_object, show
from spmd.serving.http.kserve.models import VERSION, asked_model
from spmd.serving.http.requests import service_of, visiting

# Tensors of requests and answers: as JSON, or as bytes behind the JSON.

NOT_HERE = ("shared_memory_region", "classification")
"""Parameters of tensors that would change what is read or written."""


class Binary:
    """The bytes behind the JSON of a request: its binary inputs, in their order there."""

    def __init__(self, data: memoryview) -> None:
        self.left = data  # what no input has taken

    def take(self, size: int, place: str) -> memoryview:
        """The next so many bytes.

        Raises:
          ApiError: there are fewer.
        """
        if size > len(self.left):
            raise invalid(
                f"{place}: binary_data_size is {size}, and {len(self.left)} bytes are left of the "
                "body"
            )
        taken, self.left = self.left[:size], self.left[size:]
        return taken


class Output(NamedTuple):
    """An output that a request asks for."""

    name: str
    binary: bool  # whether its numbers go behind the JSON


def parameters_of(value: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The `parameters` of a request, an input or an output.

    Raises:
      ApiError: they are no object, or have what this server does not do.
    """
    found = value.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise invalid(f"{place}: parameters have to be an object, not {show(found)}")
    for name in NOT_HERE:
        if name in found:
            raise invalid(f"{place}: {name} is not supported here")
    return found


def read_tensor(value: Mapping[str, Any], spec: TensorSpec, binary: Binary) -> Array:
    """An input, with the dtype and shape that the model takes; binary ones share the body's memory.

    Raises:
      ApiError: it does not fit.
    """
    place = f"inputs.{spec.name}"
    expected = NAMES[spec.dtype]
    if value.get("datatype") != expected:
        raise invalid(f"{place}: datatype {expected} is needed, not {show(value.get('datatype'))}")
    shape, dtype = _shape(value.get("shape"), spec, place), DATATYPES[expected]
    size = parameters_of(value, place).get("binary_data_size")
    if size is None:
        array = _array(value.get("data"), dtype, place)
        if array.size != math.prod(shape):
            raise invalid(f"{place}: {array.size} numbers do not make the shape {list(shape)}")
        return array.reshape(shape)
    if "data" in value:
        raise invalid(f"{place}: it has both data and binary_data_size")
    wanted = math.prod(shape) * dtype.itemsize
    if not is_integer(size) or size != wanted:
        raise invalid(
            f"{place}: binary_data_size has to be {wanted} for the shape {list(shape)} of "
            f"{expected}, not {show(size)}"
        )
    data = binary.take(wanted, place)
    if dtype.kind == "b":  # any other byte would be a bool that is neither true nor false
        return np.not_equal(np.frombuffer(data, np.uint8).reshape(shape), 0)
    # What is before it in the body decides where it lies in memory.
    return np.require(np.frombuffer(data, dtype).reshape(shape), requirements="A")


def _shape(value: Any, spec: TensorSpec, place: str) -> tuple[int, ...]:
    is_shape = isinstance(value, list) and all(is_integer(size) and size >= 0 for size in value)
    fits = (
        is_shape
        and len(value) == len(spec.shape)
        and all(want in (-1, size) for want, size in zip(spec.shape, value, strict=True))
    )
    if not fits:
        raise invalid(
            f"{place}: shape {list(spec.shape)} is needed (-1 is any), not "
            f"{str(value)[:60] if isinstance(value, list) else show(value)}"
        )
    return tuple(value)


def _array(data: Any, dtype: np.dtype[Any], place: str) -> Array:
    """Numbers as JSON has them -> an array; none is rounded to an integer or cut to its range."""
    if not isinstance(data, list):
        raise invalid(f"{place}: data has to be a list, not {show(data)}")
    try:
        array = np.asarray(data)
    except (ValueError, OverflowError) as error:  # ragged lists, huge integers
        raise invalid(f"{place}: data is no array: {error}") from error
    allowed = "b" if dtype.kind == "b" else "iu" if dtype.kind in "iu" else "iuf"
    if array.size and array.dtype.kind not in allowed:
        raise invalid(f"{place}: data has to be numbers of {NAMES[dtype.name]}")
    if dtype.kind in "iu" and array.size:
        bounds = np.iinfo(dtype)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise invalid(f"{place}: a number is beyond {NAMES[dtype.name]}")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def write_tensor(output: Output, array: Array) -> tuple[dict[str, Any], bytes]:
    """An output as JSON, and its bytes where it is binary.

    Raises:
      ApiError: JSON cannot say it: it holds NaN or infinities.
    """
    about = {"name": output.name, "datatype": NAMES[array.dtype.name], "shape": list(array.shape)}
    if output.binary:
        data = array.tobytes()
        return {**about, "parameters": {"binary_data_size": len(data)}}, data
    if array.dtype.kind not in "biu" and not np.isfinite(array.astype(np.float64)).all():
        raise ApiError(
            500,
            f"output {output.name} holds NaN or infinities, which JSON cannot say: ask for it with "
            'parameters {"binary_data": true}',
        )
    return {**about, "data": array.ravel().tolist()}, b""


# Compressed bodies: gzip, and deflate with zlib's header.

_GZIP, _EITHER = 16 + zlib.MAX_WBITS, 32 + zlib.MAX_WBITS
_FORMATS = {"gzip": _GZIP, "deflate": zlib.MAX_WBITS}


def unpack(body: bytes, most: int) -> bytes:
    """A body as it was before it was compressed.

    Args:
      most: bytes that it may have then.

    Raises:
      ApiError: it is damaged, or larger.
    """
    stream = zlib.decompressobj(_EITHER)
    try:
        plain = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise invalid(f"the body cannot be unpacked: {error}") from error
    if len(plain) > most:
        raise ApiError(413, f"the body is too large unpacked: {most:,} bytes are the most")
    if not stream.eof or stream.unused_data:
        raise invalid("the body cannot be unpacked: it ends too soon, or too late")
    return plain


def pack(body: bytes, encoding: str) -> bytes:
    """A body, compressed."""
    stream = zlib.compressobj(1, wbits=_FORMATS[encoding])
    return stream.compress(body) + stream.flush()


LENGTH = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are JSON: binary tensors are behind them."""

TYPES = ("application/json", "application/octet-stream", "")

_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


async def infer(request: Request) -> Response:
    """`POST /v2/models/{model}/infer`: runs the model on tensors."""
    service = service_of(request)
    packed = request.headers.get("content-encoding", "").strip().lower().replace("identity", "")
    if packed and packed not in _FORMATS:
        raise ApiError(
            415, f"Content-Encoding: gzip or deflate is needed, or none, not {packed[:40]}"
        )
    async with visiting(request, TYPES) as visit:
        loaded = asked_model(request)
        function = loaded.infer
        if function is None:
            raise ApiError(404, f"{loaded.name} is no model of tensors: use /v1/completions")
        texts, client = service.texts(len(visit.body)), visit.client
        if packed:
            body, most = visit.body, service.options.body_bytes
            visit.body = await texts.run(lambda: unpack(body, most), client)
            visit.hold_bytes(max(0, len(visit.body) - len(body)))
            texts = service.texts(len(visit.body))
        whole, length = visit.body, request.headers.get(LENGTH)
        asked = await texts.run(lambda: read_request(whole, length, function), client)
        workers, batches = service.tensors()
        try:  # a call that other requests may share
            results = await workers.run(batches.call(asked.tensors), client)
        except ValueError as error:
            raise invalid(f"inputs: {error}") from error
        # Many programs send a list of all that they know, whatever they ask for. Numbers
        # compress badly and slowly, so that is for those who name one encoding and mean it.
        accepted = request.headers.get("accept-encoding", "").strip().lower()
        encoding = accepted if accepted in _FORMATS else ""
        return await texts.run(lambda: _answer(loaded.name, asked, results, encoding), client)


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
    size = len(body)
    if length is not None:
        if not (length.isdecimal() and len(length) < 18 and 0 < int(length) <= size):
            raise invalid(
                f"{LENGTH}: the number of bytes of JSON at the beginning of the body is needed, 1 "
                f"to {size}, not {length[:40]!r}"
            )
        size = int(length)
    content = parse_object(body[:size])
    parameters = parameters_of(content, "the request")
    for name in _SEQUENCES:
        if parameters.get(name):
            raise invalid(f"{name} is not supported: each request stands for itself")
    binary = Binary(memoryview(body)[size:])
    tensors = read_inputs(content.get("inputs"), function.inputs, binary)
    if len(binary.left):
        raise invalid(
            f"inputs: {len(binary.left)} bytes at the end of the body belong to no input: each "
            "that is binary says so by parameters.binary_data_size"
        )
    by_default = Fields(parameters).flag("binary_data_output")
    outputs = _wanted(content.get("outputs"), function.outputs, by_default)
    id_ = None if content.get("id") is None else Fields(content).text("id")
    return InferenceAsk(tensors, outputs, id_)


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
        raise invalid("inputs: a list of tensors is needed")
    known = {spec.name: spec for spec in specs}
    tensors: dict[str, Array] = {}
    for one in value:
        name = one.get("name")
        if not isinstance(name, str) or name not in known or name in tensors:
            raise invalid(
                f"inputs: {show(name)} is unknown or there twice; the model takes "
                f"{', '.join(known)}"
            )
        tensors[name] = read_tensor(one, known[name], binary)
    missing = [name for name in known if name not in tensors]
    if missing:
        raise invalid(f"inputs: {', '.join(missing)} missing")
    return tensors


def _wanted(value: Any, specs: Sequence[TensorSpec], by_default: bool) -> list[Output]:
    """The outputs that the request asks for; all of them unless it names some."""
    names = [spec.name for spec in specs]
    if value is None or value == []:
        return [Output(name, by_default) for name in names]
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise invalid(f"outputs: a list of objects is needed, not {show(value)}")
    wanted = []
    for one in value:
        name = one.get("name")
        if name not in names:
            raise invalid(f"outputs: there is no {show(name)} among {', '.join(names)}")
        parameters = Fields(parameters_of(one, f"outputs.{name}"))
        wanted.append(Output(str(name), parameters.flag("binary_data", by_default)))
    return wanted


def _answer(name: str, asked: InferenceAsk, results: Tensors, encoding: str) -> Response:
    head: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if asked.id is not None:
        head["id"] = asked.id
    written = [write_tensor(output, np.asarray(results[output.name])) for output in asked.outputs]
    text = orjson.dumps({**head, "outputs": [about for about, _ in written]})
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

"""Tensors of requests and answers: as JSON, or as bytes behind the JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from serving.engine.infer import DATATYPES, NAMES, Array, TensorSpec
from serving.errors import ApiError, invalid
from serving.http.fields import is_integer, show

NOT_HERE = ("shared_memory_region", "classification")
"""Parameters of tensors that would change what is read or written."""


class Binary:
    """The bytes behind the JSON of a request: its binary inputs, in their order there."""

    def __init__(self, data: memoryview) -> None:
        self._left = data

    def take(self, size: int, place: str) -> memoryview:
        """The next so many bytes.

        Raises:
          ApiError: there are fewer.
        """
        if size > len(self._left):
            raise invalid(
                f"{place}: binary_data_size is {size}, and {len(self._left)} bytes are left of the "
                "body",
                "inputs",
            )
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def check_end(self) -> None:
        """Raises an `ApiError` if bytes are left that belong to no input."""
        if len(self._left):
            raise invalid(
                f"inputs: {len(self._left)} bytes at the end of the body belong to no input: each "
                "that is binary says so by parameters.binary_data_size",
                "inputs",
            )


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
        raise invalid(f"{place}: parameters have to be an object, not {show(found)}", "parameters")
    for name in NOT_HERE:
        if name in found:
            raise invalid(f"{place}: {name} is not supported here", "parameters")
    return found


def read_tensor(value: Mapping[str, Any], spec: TensorSpec, binary: Binary) -> Array:
    """An input, with the dtype and shape that the model takes; binary ones share the body's memory.

    Raises:
      ApiError: it does not fit.
    """
    place = f"inputs.{spec.name}"
    expected = NAMES[spec.dtype]
    if value.get("datatype") != expected:
        raise invalid(
            f"{place}: datatype {expected} is needed, not {show(value.get('datatype'))}", "inputs"
        )
    shape, dtype = _shape(value.get("shape"), spec, place), DATATYPES[expected]
    size = parameters_of(value, place).get("binary_data_size")
    if size is None:
        array = _array(value.get("data"), dtype, place)
        if array.size != math.prod(shape):
            raise invalid(
                f"{place}: {array.size} numbers do not make the shape {list(shape)}", "inputs"
            )
        return array.reshape(shape)
    if "data" in value:
        raise invalid(f"{place}: it has both data and binary_data_size", "inputs")
    wanted = math.prod(shape) * dtype.itemsize
    if not is_integer(size) or size != wanted:
        raise invalid(
            f"{place}: binary_data_size has to be {wanted} for the shape {list(shape)} of "
            f"{expected}, not {show(size)}",
            "inputs",
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


def write_tensor(output: Output, array: Array) -> tuple[dict[str, Any], bytes]:
    """An output as JSON, and its bytes where it is binary.

    Raises:
      ApiError: JSON cannot say it: it holds NaN or infinities.
    """
    about = {
        "name": output.name,
        "datatype": NAMES[array.dtype.name],
        "shape": list(array.shape),
    }
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

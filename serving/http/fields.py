"""Reads JSON that strangers sent, and takes typed fields out of it one by one."""

import gc
import json
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from spmd.serving.errors import invalid

SHORT = 2**16
"""In bytes: bodies up to here are parsed and tokenized beside longer ones, not behind them."""

_PARSING = threading.Lock()


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses a request's body.

    Raises:
      ApiError: the body is not a JSON object.
    """
    if len(body) <= SHORT:
        return _parse(body)
    # No other thread of Python runs while JSON is parsed, for 16 MiB of small values almost a
    # second. So that many such bodies do not stop all others, these get as much time in between.
    with _PARSING:
        started = time.monotonic()
        gc.disable()  # it would look at millions of new lists again and again
        try:
            return _parse(body)
        finally:
            gc.enable()
            time.sleep(time.monotonic() - started)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start} is wrong") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise invalid(f"the body is not JSON: {error.msg} at {place}") from error
    except RecursionError as error:
        raise invalid(
            "the body is not usable: its lists or objects are nested too deeply"
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise invalid(f"the body is not usable: {error}") from error
    if not isinstance(value, dict):
        raise invalid(f"the body has to be a JSON object, not {show(value)}")
    return value


def _refuse_constant(name: str) -> None:
    raise invalid(f"the body is not JSON: {name} is no number there")


def show(value: Any) -> str:
    """A value as error messages show it: at most 60 characters."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a huge integer"
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:56]}..."


def is_integer(value: Any) -> bool:
    """Whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_text(value: Any, param: str) -> str:
    """Returns `value` if it is a string that UTF-8 can encode.

    Raises:
      ApiError: it is something else, or has half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise invalid(f"{param}: a string is needed, not {show(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(f"{param}: character {error.start} is half of a surrogate pair") from None
    return value


class Fields:
    """A JSON object whose fields are taken out with their types; null counts as absent.

    All methods raise `ApiError` with status 400 and the field's name if the value does not fit.

    Example:
      >>> fields = Fields({"n": 2, "stream": None})
      >>> fields.integer("n", 1, 32), fields.flag("stream"), fields.text("user")
      (2, False, '')
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._asked: set[str] = set()

    def get(self, name: str) -> Any:
        """A field of any type; None if it is absent."""
        self._asked.add(name)
        return self._values.get(name)

    def left(self) -> tuple[str, ...]:
        """Names of the fields that nobody has asked for, in their order."""
        return tuple(name for name in self._values if name not in self._asked)

    def flag(self, name: str, default: bool = False) -> bool:
        """A field that is true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"{name}: true or false is needed, not {show(value)}")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A field that is an integer from `low` to `high`; None if it is absent."""
        value = self.get(name)
        if value is None:
            return None
        # JavaScript and some JSON libraries write 16 as 16.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_integer(value) or not low <= value <= high:
            raise invalid(f"{name}: an integer from {low} to {high} is needed, not {show(value)}")
        return int(value)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A field that is a number from `low` to `high`; above `low` if that is -0.0."""
        value = self.get(name)
        if value is None:
            return default
        is_number = is_integer(value) or isinstance(value, float)
        is_open = low == 0 and math.copysign(1, low) < 0
        if not is_number or not low <= value <= high or (is_open and value == 0):
            bounds = f"above 0 and up to {high:g}" if is_open else f"from {low:g} to {high:g}"
            raise invalid(f"{name}: a number {bounds} is needed, not {show(value)}")
        return float(value)

    def object(self, name: str) -> "Fields":
        """A field that is an object; empty if it is absent."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise invalid(f"{name}: an object is needed, not {show(value)}")
        return Fields(value)

    def text(self, name: str, default: str = "") -> str:
        """A field that is a string."""
        value = self.get(name)
        return default if value is None else check_text(value, name)

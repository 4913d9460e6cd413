"""What the server writes to stderr: lines for people, or one JSON object a line for machines."""

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from spmd.serving.engine.stream import Stream

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that this task, or this thread on behalf of one, works for."""

FIELDS = "fields"
"""The attribute of a record that holds more fields: `log.info(text, extra={FIELDS: {...}})`."""


def set_up(level: str, form: LogFormat = "text", replaces: bool = False) -> None:
    """Sets the process's logging up, on stderr.

    Args:
      level: least important lines to write.
      replaces: also where it is set up already, as a library may do when it is imported.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=replaces)
    if form == "json":
        logging.captureWarnings(True)
    if level != "debug":  # what libraries tell of themselves; the server says it in its own words
        logging.getLogger("jax").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.error").addFilter(lambda r: r.levelno >= logging.WARNING)


def last_line(text: str) -> str:
    """The JSON line for `error: ...`, with which a program ends."""
    text = text.removeprefix("error: ")
    return JsonFormatter().format(
        logging.LogRecord("serving", logging.CRITICAL, "", 0, text, None, None)
    )


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,000 INFO serving: text [request id]`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows it."""
        request_id = REQUEST_ID.get()
        line = super().formatMessage(record).rstrip("\n")
        return line if request_id is None else f"{line} [{request_id}]"


class JsonFormatter(logging.Formatter):
    """`{"time": "2026-01-31T12:00:00.000+00:00", "level": "INFO", ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """The object, on one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage().rstrip("\n"),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


@dataclasses.dataclass
class HttpExchange:
    """A request and what becomes of it; handlers find it as `request.state.exchange`."""

    request_id: str  # the client's, or our own
    method: str  # of HTTP
    path: str  # as the client sent it
    client: str  # its address, or that which a trusted proxy says
    status: int = 499  # of the answer; 499 if the client went away before there was one
    model: str | None = None  # whose tokens are counted; None where none are
    prompt_tokens: int = 0  # tokens of the prompts, each counted once
    stream: Stream | None = None  # where the completions come from
    streams: bool = False  # whether they are sent as they come
    key: str = ""  # the name of its API key; empty if the server has none
    leave: Callable[[int], None] = lambda tokens: None  # tells the key's limits of its end
    is_passed_on: bool = False  # to another process, which says more of it in the log
    # By `time.monotonic`: when its headers were here, its body, when the first bytes of the
    # answer's body were handed to the connection, and the last; 0 if that was not.
    started: float = dataclasses.field(default_factory=time.monotonic)
    read: float = 0.0
    first_sent: float = 0.0
    ended: float = 0.0

    def generates(self, model: str, prompt_tokens: int, stream: Stream, streams: bool) -> None:
        """Notes that the answer is made of completions; `streams`: they are sent as they come."""
        self.model, self.prompt_tokens = model, prompt_tokens
        self.stream, self.streams = stream, streams

    @property
    def completion_tokens(self) -> int:
        """Tokens drawn for completions that have ended; all have when the answer has."""
        return sum(record.generated for record in self.stream.records) if self.stream else 0

    def fields(self) -> dict[str, Any]:
        """What the log says of it, when it has ended."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(self.ended - self.started, 6),
            "client": self.client,
        }
        if self.key:
            fields["key"] = self.key
        if self.stream is not None:
            reasons = sorted({record.reason for record in self.stream.records})
            fields["prompt_tokens"] = self.prompt_tokens
            fields["completion_tokens"] = self.completion_tokens
            fields["finish_reason"] = ",".join(reasons)
        return fields

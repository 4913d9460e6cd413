"""The server's limits and keys."""

from __future__ import annotations

import dataclasses

from serving.errors import ServingError
from serving.http.tools.formats import BY_NAME


@dataclasses.dataclass(frozen=True)
class Options:
    """The server's limits and keys.

    Attributes:
      api_keys: a request needs one of them; if there are none, anybody may use the model.
      max_waiting: how many requests there may be beyond those that have slots. Those whose text is
        being tokenized count as well.
      token_budget: rows of a group in a step that has both rows that draw and chunks of prompts;
        None takes what the model's backend finds best.
      choices: the most completions that one request may ask for.
      stops: the most stop strings that one request may have.
      grammar_bytes: the largest grammar, schemas and tools included.
      tool_format: how the model writes calls of tools; None takes what its chat template tells.
      body_bytes: the largest body of a request.
      body_seconds: a body has to arrive within this time.
      bodies_bytes: how much memory all bodies together may take.
      text_threads: how many texts are tokenized at a time, of short ones and of long ones each.
      header_seconds: a client that connects has to send a request's headers within this time.
      write_seconds: an answer of which nothing is read for so long is cut off.
      connections: how many there may be.
      address_connections: how many of them may come from one address.
      stall_seconds: a call of the model that takes longer counts as hung: `/health` says 503.
      drain_seconds: how long requests may go on when the server is told to end.

    Raises:
      ServingError: a number is too small.
    """

    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    token_budget: int | None = None
    choices: int = 32
    stops: int = 16
    grammar_bytes: int = 64 * 2**10
    tool_format: str | None = None
    body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    bodies_bytes: int = 256 * 2**20
    text_threads: int = 2
    header_seconds: float = 20.0
    write_seconds: float = 120.0
    connections: int = 4096
    address_connections: int = 1024
    stall_seconds: float = 300.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        least = {
            "max_waiting": 0, "token_budget": 1, "choices": 1, "stops": 0, "grammar_bytes": 1,
            "body_bytes": 1, "body_seconds": 0, "bodies_bytes": 1, "text_threads": 1,
            "header_seconds": 0, "write_seconds": 0, "connections": 1, "address_connections": 1,
            "stall_seconds": 0, "drain_seconds": 0,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:  # nor NaN
                raise ServingError(f"{name} is {value}; it has to be at least {low}")
        if self.tool_format is not None and self.tool_format not in BY_NAME:
            raise ServingError(
                f"tool_format is {self.tool_format!r}; it has to be one of {', '.join(BY_NAME)}"
            )

"""A request and its answer, as the log and traces tell of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from serving.engine.stream import Stream


@dataclasses.dataclass
class Exchange:
    """A request and what becomes of it; handlers find it as `request.state.exchange`.

    Attributes:
      request_id: the client's, or our own.
      method: of HTTP.
      path: as the client sent it.
      client: its address, or that which a trusted proxy says.
      status: of the answer; 499 if the client went away before there was one.
      model: whose tokens are counted; None where none are.
      prompt_tokens: tokens of the prompts, each counted once.
      stream: where the completions come from.
    """

    request_id: str
    method: str
    path: str
    client: str
    status: int = 499
    model: str | None = None
    prompt_tokens: int = 0
    stream: Stream | None = None

    def generates(self, model: str, prompt_tokens: int, stream: Stream) -> None:
        """Notes that the answer is made of completions."""
        self.model, self.prompt_tokens, self.stream = model, prompt_tokens, stream

    @property
    def completion_tokens(self) -> int:
        """Tokens drawn for completions that have ended; all have when the answer has."""
        return sum(record.generated for record in self.stream.records) if self.stream else 0

    def fields(self, seconds: float) -> dict[str, Any]:
        """What the log says of it."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(seconds, 6),
            "client": self.client,
        }
        if self.stream is not None:
            reasons = sorted({record.reason for record in self.stream.records})
            fields["prompt_tokens"] = self.prompt_tokens
            fields["completion_tokens"] = self.completion_tokens
            fields["finish_reason"] = ",".join(reasons)
        return fields

"""The most that a request may ask for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The most that a request may ask for.

    Attributes:
      max_length: tokens of prompt and completion together.
      vocab_size: number of token ids.
      top_logprobs: alternatives reported for each token.
      choices: completions of one request, over all of its prompts.
      stops: number of stop strings.
      stop_length: characters of one stop string.
    """

    max_length: int
    vocab_size: int
    top_logprobs: int
    choices: int = 32
    stops: int = 16
    stop_length: int = 256

"""Automata that say which token may come next, and the threads on which they think.

A mask depends on the token before it, so it is made between two steps of its request. That takes
tens of microseconds mostly, at times milliseconds, in which the engine's thread goes on with steps
for all others. A request has one token under way at most, so each is with one thread at a time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from serving.engine.backend import Words

_LOG = logging.getLogger("serving")


class GuideError(ValueError):
    """What a request asks for is at fault: no token may come next, or finding it out is too hard.

    The message is one line for the client.
    """


class Guide(Protocol):
    """The automaton of one completion; it belongs to nobody else."""

    def allowed(self) -> Words:
        """The tokens that may be drawn next: at least one.

        Raises:
          GuideError: there is none.
          Exception: it is broken. In both cases its request fails, and no other.
        """

    def take(self, token: int) -> None:
        """Goes on behind a token that was drawn; raises what `allowed` does."""


class Guides:
    """Threads that make masks.

    Args:
      made: is called on one of the threads with a request's key and its next mask, or with the
        reason why there is none.
      threads: how many masks are made at a time.
    """

    def __init__(self, made: Callable[[int, Words | Exception], None], threads: int = 2) -> None:
        self._made = made
        self._asked: queue.SimpleQueue[tuple[int, Guide, int] | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._think, name=f"masks-{i}", daemon=True)
            for i in range(threads)
        ]

    def ask(self, key: int, guide: Guide, token: int) -> None:
        """Begins to make the mask behind a request's latest token."""
        self._asked.put((key, guide, token))

    def stop(self) -> None:
        """Ends the threads behind what was asked before."""
        for _ in self.threads:
            self._asked.put(None)

    def _think(self) -> None:
        while (item := self._asked.get()) is not None:
            key, guide, token = item
            try:
                guide.take(token)
                self._made(key, guide.allowed())
            except GuideError as error:
                _LOG.info("request %d: %s", key, error)
                self._made(key, error)
            except Exception as error:  # of a thread that ends nobody would get a mask any more
                _LOG.exception("request %d: no mask could be made", key)
                self._made(key, error)

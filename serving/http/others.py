"""What the server asks of the other processes that run its model, where there are some."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol


class Others(Protocol):
    """The other processes that run the model, where there are some: what ends one ends all."""

    def heed(self, error: Exception) -> None:
        """Is told what the model raised; does not return if that ends the processes."""

    def attend(self, drain: Callable[[], None], lose: Callable[[str], None]) -> None:
        """Takes what to do if another process is asked to end, and what before a sudden end.

        Args:
          drain: begins to drain.
          lose: tells clients why, and returns when they have been told.
        """

    def end(self, asked: bool) -> NoReturn:
        """Ends all processes.

        Args:
          asked: whether this one was asked to end; else they are to be started again.
        """

"""Chooses the client whose request is next: the one that was served the fewest tokens.

This is a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024).
Each client has a counter of the tokens that it was served, and the client with the lowest goes
next. A new client's counter begins at the *virtual time*: the tokens that a client would have been
served by now if all had got equal shares. So idling saves nothing up, and since the virtual time
grows with every token, a stream of new clients keeps nobody waiting forever.

A client that leaves with a counter above the virtual time is remembered until the time has caught
up: leaving and coming back gains nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What waits in the queue: it has a key, and belongs to a client."""

    @property
    def key(self) -> int:
        """A number that no other item has."""

    @property
    def client(self) -> str:
        """The client's name."""


Item = TypeVar("Item", bound=Queued)


class FairQueue(Generic[Item]):
    """A queue with one line for each client; within a line, first come, first served.

    A client is *present* from `push` until each of its items was handed to `leave`, so while one of
    its requests waits or runs.

    Example:
      >>> queue = FairQueue()
      >>> for request in (a1, a2, b1):  # of the clients a, a and b
      ...     queue.push(request)
      >>> queue.first(), queue.remove(a1), queue.charge("a", 100), queue.first()
      (a1, None, None, b1)
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[Item]] = {}
        self._present: dict[str, int] = {}
        self._served: dict[str, float] = {}
        self._now = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, item: Item) -> None:
        """Adds an item at the end of its client's line."""
        client = item.client
        if client not in self._present:
            # A new client starts at the virtual time; one that left above it keeps its counter.
            self._served[client] = max(self._served.get(client, 0.0), self._now)
        self._present[client] = self._present.get(client, 0) + 1
        self._lines.setdefault(client, deque()).append(item)
        self._length += 1

    def first(self) -> Item | None:
        """The first item of the client that was served least; None if nothing waits.

        Of clients that were served equally, the one whose line has been there longest goes first.
        """
        if not self._lines:
            return None
        return self._lines[min(self._lines, key=self._served.__getitem__)][0]

    def remove(self, item: Item) -> None:
        """Removes an item from anywhere in its line; `leave` has still to be called for it."""
        line = self._lines[item.client]
        line.remove(item)
        self._length -= 1
        if not line:
            del self._lines[item.client]

    def charge(self, client: str, tokens: int) -> None:
        """Adds tokens to a client's counter; a client that is not present is not charged."""
        if client not in self._present:
            return
        self._served[client] += tokens
        self._now += tokens / len(self._present)

    def leave(self, client: str) -> None:
        """Notes that one of the client's items is done with."""
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client]
            self._forget()

    def _forget(self) -> None:
        """Drops counters of absent clients that are not above the virtual time.

        Clients choose their names, so the table would grow without a bound.
        """
        if not self._present:
            self._served, self._now = {}, 0.0
            return
        self._served = {
            client: count
            for client, count in self._served.items()
            if client in self._present or count > self._now
        }

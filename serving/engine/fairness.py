"""Which client is next: the one that was served the fewest tokens.

A virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024): each
client has a count of the tokens that it was served, and the client with the least goes next. Who
comes anew starts at the *virtual time*, the tokens an evenly treated client would have been served
by now: idling saves nothing up, and since that time goes on with every token, no flow of newcomers
keeps anybody waiting for ever. Who leaves above it is remembered until it has caught up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What waits: it has a key, and belongs to a client."""

    @property
    def key(self) -> int:
        """Unique."""

    @property
    def client(self) -> str:
        """Whose it is."""


Item = TypeVar("Item", bound=Queued)


class FairQueue(Generic[Item]):
    """A queue with as many lines as clients; first come first served within a client.

    A client is *present* from `push` until each of its items was handed to `leave`.
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[Item]] = {}
        self._present: dict[str, int] = {}
        self._served: dict[str, float] = {}
        self._now = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        for line in self._lines.values():
            yield from line

    def push(self, item: Item) -> None:
        """Add at the end of its client's line."""
        client = item.client
        if client not in self._present:
            self._served[client] = max(self._served.get(client, 0.0), self._now)
        self._present[client] = self._present.get(client, 0) + 1
        self._lines.setdefault(client, deque()).append(item)
        self._length += 1

    def pop(self) -> Item | None:
        """The first one of the client that was served least; the longest present of equal ones."""
        if not self._lines:
            return None
        client = min(self._lines, key=lambda name: self._served[name])
        item = self._lines[client].popleft()
        self._shorten(client)
        return item

    def remove(self, item: Item) -> None:
        """Take one out of the middle; `leave` is still to be called."""
        self._lines[item.client].remove(item)
        self._shorten(item.client)

    def charge(self, client: str, tokens: int) -> None:
        """Note that a client was served so many tokens; one that is gone is not charged."""
        if client not in self._present:
            return
        self._served[client] += tokens
        self._now += tokens / len(self._present)

    def leave(self, client: str) -> None:
        """One of the client's items is done with."""
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client]
            self._forget()

    def _shorten(self, client: str) -> None:
        self._length -= 1
        if not self._lines[client]:
            del self._lines[client]

    def _forget(self) -> None:
        """Drop the counts of absent clients that owe nothing: names are the clients' own choice."""
        if not self._present:
            self._served, self._now = {}, 0.0
            return
        self._served = {
            client: count
            for client, count in self._served.items()
            if client in self._present or count > self._now
        }

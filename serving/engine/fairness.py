"""Chooses the client whose request is next: the one that was served the fewest tokens.

This is a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024).
Each client has a counter of the tokens that it was served, and the client with the lowest goes
next. A new client's counter begins at the *virtual time*: the tokens that a client would have been
served by now if all had got equal shares. So idling saves nothing up, and since the virtual time
grows with every token, a stream of new clients keeps nobody waiting forever.

A client that leaves with a counter above the virtual time is remembered until the time has caught
up: leaving and coming back gains nothing.

It is done twice: clients share what there is, and the users of a client share what it gets. A
client may say which of its requests matter most: those with the lowest priority number are first.
It gains nothing over other clients by that. A
client is who can be told apart from others, by an API key or an address. Users are names that it
claims, as many as it likes, so they must not gain it anything.
"""

import bisect
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What waits in the queue belongs to a user of a client."""

    priority: int  # what of a client has the lowest is first
    client: str  # the client's name
    user: str  # the user's name; two clients may have users of the same name


Item = TypeVar("Item", bound=Queued)


class Shares:
    """Counters of what each name was served, and the virtual time.

    A name is *present* from `enter` until `leave` was called as often.
    """

    def __init__(self) -> None:
        self._present: dict[str, int] = {}
        self._served: dict[str, float] = {}
        self._now = 0.0

    def __bool__(self) -> bool:
        return bool(self._present)

    def served(self, name: str) -> float:
        """The counter of a name that is present."""
        return self._served[name]

    def enter(self, name: str) -> None:
        """Notes that one more item of a name is there."""
        if name not in self._present:
            # A new name starts at the virtual time; one that left above it keeps its counter.
            self._served[name] = max(self._served.get(name, 0.0), self._now)
        self._present[name] = self._present.get(name, 0) + 1

    def charge(self, name: str, amount: float) -> None:
        """Adds to a counter; a name that is not present is not charged."""
        if name in self._present:
            self._served[name] += amount
            self._now += amount / len(self._present)

    def leave(self, name: str) -> None:
        """Notes that one of the name's items is done with."""
        self._present[name] -= 1
        if self._present[name]:
            return
        del self._present[name]
        if not self._present:
            self._served, self._now = {}, 0.0
        # Counters that are not above the virtual time are dropped: names are free to choose, so the
        # table would grow without a bound.
        self._served = {
            name: count
            for name, count in self._served.items()
            if name in self._present or count > self._now
        }


class FairQueue(Generic[Item]):
    """A queue with one line for each user: by priority, then first come, first served.

    An item counts as present from `push` until it was handed to `leave`, so while it waits or runs.

    Example:
      >>> queue = FairQueue()
      >>> for request in (a1, a2, b1):  # of the clients a, a and b
      ...     queue.push(request)
      >>> queue.first(), queue.remove(a1), queue.charge(a1, 100), queue.first()
      (a1, None, None, b1)
    """

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, deque[Item]]] = {}
        self._clients = Shares()
        self._users: dict[str, Shares] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        """All that wait, in no order."""
        for lines in self._lines.values():
            for line in lines.values():
                yield from line

    def push(self, item: Item) -> None:
        """Adds an item behind those of its user's line that have its priority, or a lower one."""
        client, user = item.client, item.user
        self._clients.enter(client)
        self._users.setdefault(client, Shares()).enter(user)
        line = self._lines.setdefault(client, {}).setdefault(user, deque())
        line.insert(bisect.bisect(line, item.priority, key=lambda waiting: waiting.priority), item)
        self._length += 1

    def first(self) -> Item | None:
        """The first item of the least served client; None if none waits.

        Of its users it is that whose first item has the lowest priority, and of those the least
        served one. Of those served equally, the one whose line has been there longest goes first.
        """
        if not self._lines:
            return None
        client = min(self._lines, key=self._clients.served)
        lines, served = self._lines[client], self._users[client].served
        return lines[min(lines, key=lambda user: (lines[user][0].priority, served(user)))][0]

    def remove(self, item: Item) -> None:
        """Removes an item from anywhere in its line; `leave` has still to be called for it."""
        lines = self._lines[item.client]
        lines[item.user].remove(item)
        self._length -= 1
        if not lines[item.user]:
            del lines[item.user]
        if not lines:
            del self._lines[item.client]

    def charge(self, item: Queued, amount: float) -> None:
        """Adds to the counters of an item's client and user, if they are present."""
        if item.client in self._users:
            self._clients.charge(item.client, amount)
            self._users[item.client].charge(item.user, amount)

    def leave(self, item: Queued) -> None:
        """Notes that an item is done with."""
        self._clients.leave(item.client)
        users = self._users[item.client]
        users.leave(item.user)
        if not users:
            del self._users[item.client]

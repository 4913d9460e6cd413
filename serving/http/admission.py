"""What the server has in hand, and for whom: one book for requests of all kinds.

A request holds bytes of its body while it is read and looked at, and *places* from then on: one
while its text is tokenized or its tensors wait, and one for each completion that the engine has.
When all are taken the next request gets 429. No client can take them all.
"""

import contextlib
import dataclasses
import ipaddress
from collections import Counter
from collections.abc import Callable

from spmd.serving.errors import busy

SPARE = 16
"""One in so many is left to others, whatever one client asks for."""


def address_of(host: str) -> str:
    """Who comes from a host: its address; of IPv6 the first half, of which one may have all."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return host


@dataclasses.dataclass
class Allowance:
    """So much of something, which clients take and give back."""

    limit: int
    taken: int = 0  # how much of it clients have
    _held: Counter[str] = dataclasses.field(default_factory=Counter)

    def take(self, client: str, amount: int) -> bool:
        """Gives a client more, if it is there and leaves something to others; says whether."""
        own = self._held[client] + amount
        if self.taken + amount > self.limit or own > self.limit - self.limit // SPARE:
            return False
        self._add(client, amount)
        return True

    def give_back(self, client: str, amount: int) -> None:
        """Takes something back from a client."""
        self._add(client, -amount)

    def _add(self, client: str, amount: int) -> None:
        self.taken += amount
        self._held[client] += amount
        if not self._held[client]:
            del self._held[client]


@dataclasses.dataclass
class Admission:
    """The one book."""

    places: Allowance  # of requests; there are none until the model is loaded
    bytes: Allowance  # of bodies that are in memory


@dataclasses.dataclass
class Visit:
    """A request, and what it holds."""

    admission: Admission  # the book
    client: str  # who can be told apart from others: by API key, or by address
    body: bytes = b""  # the request's body, once it is here
    places: int = 0  # how many it holds
    bytes: int = 0  # how many it holds

    def hold_bytes(self, count: int) -> None:
        """Notes that so many more bytes of the body have come.

        Raises:
          ApiError: other bodies need the memory.
        """
        if not self.admission.bytes.take(self.client, count):
            raise busy(
                "the bodies of requests need all the memory that they may have", "memory_full"
            )
        self.bytes += count

    def hold_places(self, count: int) -> None:
        """Holds so many places from now on, instead of those that it holds.

        Raises:
          ApiError: there are not so many.
        """
        self.leave_places()
        book = self.admission.places
        if not book.take(self.client, count):
            taken = f"{book.taken} of {book.limit} places are taken"
            raise busy(f"{taken}, and this request needs {count}", "queue_full")
        self.places = count

    def drop_body(self) -> None:
        """Gives the body's memory back: what it asked for has been read."""
        self.admission.bytes.give_back(self.client, self.bytes)
        self.body, self.bytes = b"", 0

    def hand_over(self) -> Callable[[], None]:
        """Makes somebody else give the places back; returns what to call for that."""
        places, self.places = self.places, 0
        return lambda: self.admission.places.give_back(self.client, places)

    def leave_places(self) -> None:
        """Gives its places back."""
        self.admission.places.give_back(self.client, self.places)
        self.places = 0

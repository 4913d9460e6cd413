"""Messages between the processes that serve one bundle: a line of JSON, and bytes of arrays.

    size of the JSON, 4 bytes | size of the arrays, 8 bytes | JSON | arrays, one behind the other

Nothing is pickled: what arrives are texts and numbers.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import numpy as np

_SIZES = struct.Struct("!IQ")

IDLE_SECONDS, PROBE_SECONDS = 10, 5
LOST_SECONDS = 30
"""After so long without an answer from the other host the connection counts as closed."""


class Message(NamedTuple):
    """What one process tells another.

    Attributes:
      kind: what to do.
      names: what to do it with.
      arrays: the inputs; their memory is read-only.
    """

    kind: str
    names: Sequence[str] = ()
    arrays: Sequence[Any] = ()


def encode(message: Message) -> bytes:
    """A message as bytes."""
    arrays = [np.asarray(x) for x in message.arrays]
    about = [(x.dtype.name, x.shape) for x in arrays]
    head = json.dumps([message.kind, list(message.names), about]).encode()
    body = [x.tobytes() for x in arrays]
    return b"".join((_SIZES.pack(len(head), sum(map(len, body))), head, *body))


def read(file: IO[bytes]) -> Message | None:
    """The next message; None at the end of the connection.

    Raises:
      OSError: the connection broke.
    """
    sizes = file.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    head_size, body_size = _SIZES.unpack(sizes)
    head, body = file.read(head_size), file.read(body_size)
    if len(head) + len(body) < head_size + body_size:
        return None
    kind, names, about = json.loads(head)
    arrays, at = [], 0
    for name, shape in about:
        dtype, count = np.dtype(name), math.prod(shape)
        arrays.append(np.frombuffer(body, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    return Message(kind, names, arrays)


def set_up(line: socket.socket) -> None:
    """Small messages leave at once, and a host that vanished is noticed."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)

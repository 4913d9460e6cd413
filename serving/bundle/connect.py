"""How the processes that serve one bundle connect to process 0.

Process 0 listens at any free port and leaves that, with a secret, in the job's store. Whoever says
the secret is a member of the job.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from serving.bundle.wire import set_up
from spmd.errors import LaunchError
from spmd.launch.meet import listen
from spmd.launch.store import Store, connected_to

KEY = "serving/leader"

_HELLO_SECONDS = 10.0
_HELLO_BYTES = 100


def welcome(store: Store, processes: int, timeout_s: float) -> dict[int, socket.socket]:
    """Process 0's connections to all others.

    Args:
      store: the job's store; members read there how to connect, and with which secret.
      processes: how many there are.
      timeout_s: seconds to wait for them.

    Raises:
      LaunchError: one did not come.
    """
    lines: dict[int, socket.socket] = {}
    secret = secrets.token_hex(16)
    deadline = time.monotonic() + timeout_s
    with listen(0, processes) as server:
        store.put(KEY, f"{server.getsockname()[1]} {secret}")
        while len(lines) < processes - 1:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                line, _ = server.accept()
            except TimeoutError:
                missing = sorted({*range(1, processes)} - lines.keys())
                raise LaunchError(
                    f"process {missing[0]} did not connect to process 0 within {timeout_s:g} s",
                    fix="see its output, and whether a firewall is between the two",
                ) from None
            process = _hello(line, secret)
            if process is None:
                line.close()
                continue
            set_up(line)
            lines[process] = line
    return lines


def _hello(line: socket.socket, secret: str) -> int | None:
    """Which process connects; None for strangers."""
    line.settimeout(_HELLO_SECONDS)
    try:
        said, _, process = _line(line).partition(" ")
        return int(process) if hmac.compare_digest(said, secret) else None
    except (OSError, ValueError, TypeError):
        return None


def _line(line: socket.socket) -> str:
    """Text up to the end of a line; what is behind it stays to be read."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _HELLO_BYTES:
        piece = line.recv(1)
        if not piece:
            raise ConnectionError("the connection was closed")
        text += piece
    return text[:-1].decode("ascii")


def connect(store: Store, process: int, timeout_s: float) -> socket.socket:
    """A process's connection to process 0; for the rest see `welcome`."""
    told = store.get(KEY, timeout_s)
    host = str(connected_to()).rpartition(":")[0].strip("[]")
    try:
        if told is None:
            raise TimeoutError(f"it said nothing for {timeout_s:g} s")
        port, _, secret = told.partition(" ")
        line = socket.create_connection((host, int(port)), timeout=timeout_s)
        line.sendall(f"{secret} {process}\n".encode())
    except OSError as error:
        raise LaunchError(
            f"process {process} cannot reach process 0 at {host}",
            actual=str(error),
            fix="see process 0's output, and whether a firewall is between the two",
        ) from None
    set_up(line)
    return line

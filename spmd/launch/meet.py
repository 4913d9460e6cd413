"""Meeting: before jax connects the processes, they find out whether they belong together.

jax's own client aborts, in C++, when a process does not come, when two have the same number or when
one expects another number of processes. So they first meet at the coordinator's port: everyone says
who it is and what it runs, process 0 answers all of them at once, and whoever is told no raises.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from spmd.errors import LaunchError
from spmd.launch.agree import as_json, differences, from_json

_SLOW_S = 10.0
"""Seconds that process 0 may be late with its answer."""

_LONGEST = 1 << 16
"""Bytes of a message."""


class Seat(NamedTuple):
    """A process in its job: `host:port` of process 0, how many there are, and which one this is."""

    coordinator: str
    processes: int
    process: int

    @property
    def host(self) -> str:
        """The host of process 0."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of process 0."""
        return int(self.coordinator.rpartition(":")[2])


def meet(seat: Seat, about: Mapping[str, str], timeout_s: float) -> None:
    """Waits until all processes of a job are there, and compares what they say of themselves.

    Args:
      seat: this process.
      about: names and values that should be the same everywhere.
      timeout_s: seconds to wait.

    Raises:
      LaunchError: process 0 cannot be reached, a process did not come, came twice or expects
        another number of processes, or something in `about` differs.
    """
    if seat.processes < 2:
        return
    hello = {"process": seat.process, "processes": seat.processes, "about": dict(about)}
    if seat.process == 0:
        outcome = _Host(seat, hello).run(timeout_s)
    else:
        outcome = _ask(seat, hello, timeout_s)
    if outcome:
        raise from_json(outcome)


# Process 0.


class _Host:
    """Collects who comes, and answers all when the last one is there or it is too late."""

    def __init__(self, seat: Seat, hello: dict[str, Any]) -> None:
        self.seat = seat
        self.came: dict[int, dict[str, Any]] = {0: hello}
        self.lines: list[socket.socket] = []

    def run(self, timeout_s: float) -> str:
        # A job of 3:  1 -> 0 {"process": 1, "processes": 3, "about": {versions}}
        #              2 -> 0 {"process": 2, ...}          connections stay open meanwhile
        #              0 -> 1, 2  an empty line: all agree; else the error as JSON
        # All are answered at once and alike, so that either all go on to jax's own connection or
        # all raise. The socket is closed by then: jax's coordinator listens at the same port.
        deadline = time.monotonic() + timeout_s
        outcome = ""
        with _listen(self.seat.port, self.seat.processes) as server:
            while not outcome and len(self.came) < self.seat.processes:
                left = deadline - time.monotonic()
                if left <= 0:
                    outcome = as_json(self._missing(timeout_s))
                    break
                server.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    outcome = self._seat(server.accept()[0])
            outcome = outcome or differences({p: h["about"] for p, h in self.came.items()})
            for line in self.lines:
                with contextlib.suppress(OSError):
                    line.sendall(f"{outcome}\n".encode())
                    line.close()
        return outcome

    def _seat(self, line: socket.socket) -> str:
        """Reads who is at a connection; returns an error for all if it cannot belong here."""
        try:
            line.settimeout(_SLOW_S)
            hello = json.loads(_read_line(line))
            process, processes = int(hello["process"]), int(hello["processes"])
            hello["about"] = {str(k): str(v) for k, v in hello["about"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            line.close()  # somebody else's connection
            return ""
        self.lines.append(line)
        if processes != self.seat.processes:
            return as_json(
                LaunchError(
                    f"process {process} expects {processes} processes, process 0 expects "
                    f"{self.seat.processes}",
                    fix="give all processes the same number of processes",
                )
            )
        if process in self.came or not 0 < process < processes:
            return as_json(
                LaunchError(
                    f"two processes of this job have process_id {process}",
                    fix="number the processes from 0, each its own number",
                )
            )
        self.came[process] = hello
        return ""

    def _missing(self, timeout_s: float) -> LaunchError:
        missing = [str(p) for p in range(self.seat.processes) if p not in self.came]
        names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        many = len(missing) > 1
        return LaunchError(
            f"process{'es' if many else ''} {names} did not come to {self.seat.coordinator} within "
            f"{timeout_s:g} s",
            actual=f"{len(self.came)} of {self.seat.processes} processes came",
            fix="see why it did not start, or whether a firewall closes the port",
        )


def _listen(port: int, backlog: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
            backlog=backlog,
        )
    except OSError as error:
        raise LaunchError(
            f"process 0 cannot listen at port {port} for the other processes",
            actual=str(error),
            fix="give a free port in the coordinator's address, or end what runs there",
        ) from None


# The others.


def _ask(seat: Seat, hello: dict[str, Any], timeout_s: float) -> str:
    """Connects until process 0 is there, and waits for its answer."""
    deadline = time.monotonic() + timeout_s
    text = f"{json.dumps(hello)}\n".encode()
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            with socket.create_connection((seat.host, seat.port), timeout=left) as line:
                line.sendall(text)
                line.settimeout(timeout_s + _SLOW_S)
                return _read_line(line)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"process {seat.process} cannot reach process 0 at {seat.coordinator} within "
                    f"{timeout_s:g} s",
                    actual=str(error),
                    fix="see whether process 0 runs and why it ended, whether this machine knows "
                    "its name, and whether a firewall closes the port",
                ) from None
        time.sleep(0.2)


def _read_line(line: socket.socket) -> str:
    """One line without its end.

    Raises:
      OSError: the other side ended before it was whole.
    """
    data = b""
    while not data.endswith(b"\n"):
        part = line.recv(4096)
        if not part or len(data) > _LONGEST:
            raise ConnectionError("the connection was closed")
        data += part
    return data[:-1].decode()

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
from typing import IO, NamedTuple

from spmd.errors import LaunchError
from spmd.launch.agree import as_json, differences, raise_json

_SLOW_S = 10.0  # seconds that process 0 may be late with its answer

_HELLO_S = 2.0
"""Seconds that a connection may take to say who it is, before process 0 turns to the next."""

_GREETING = b"spmd process 0\n"
_GREETING_S = 8.0
"""Who is connected for so long and was not greeted is connected to another program."""

_LONGEST = 1 << 16  # bytes of a message

_COUNT = "number of processes"


class Seat(NamedTuple):
    """A process's place in its job: `host:port` of process 0, how many there are, its number."""

    coordinator: str
    processes: int
    process: int

    @property
    def host(self) -> str:
        """The host at which process 0 listens."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port at which process 0 listens."""
        return int(self.coordinator.rpartition(":")[2])


def meet(seat: Seat, about: Mapping[str, str], timeout_s: float) -> None:
    """Waits until all processes of a job are there, and compares what they say of themselves.

    LaunchError if process 0 cannot be reached, a process did not come, came twice or expects
    another number of processes, or something in `about` differs.
    """
    if seat.processes < 2:
        return
    hello = {_COUNT: str(seat.processes), **about}
    raise_json((_ask if seat.process else _host)(seat, hello, timeout_s))


# Process 0.


def _host(seat: Seat, about: dict[str, str], timeout_s: float) -> str:
    """Collects who comes, as process 0, and answers all once the last is there or time is up."""
    # A job of 3:  0 -> 1 the greeting, as soon as 1 is connected
    #              1 -> 0 {"process": 1, "about": {number of processes, versions}}
    #              2 -> 0 {"process": 2, ...}          connections stay open meanwhile
    #              0 -> 1, 2  an empty line: all agree; else the error as JSON
    # All are answered at once and alike, so that either all go on to jax's own connection or
    # all raise. The socket is closed by then: jax's coordinator listens at the same port.
    deadline = time.monotonic() + timeout_s
    came = {0: about}
    lines: list[socket.socket] = []
    outcome = ""
    with listen(seat.port, seat.processes) as server:
        while not outcome and len(came) < seat.processes:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                line, _ = server.accept()
            except TimeoutError:
                missing = [str(p) for p in range(seat.processes) if p not in came]
                names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                outcome = as_json(
                    f"process{'es' if len(missing) > 1 else ''} {names} did not come to "
                    f"{seat.coordinator} within {timeout_s:g} s",
                    actual=f"{len(came)} of {seat.processes} processes came",
                    fix="see why it did not start, or whether a firewall closes the port",
                )
                break
            try:
                line.settimeout(_HELLO_S)
                line.sendall(_GREETING)
                with line.makefile("rb") as file:
                    hello = json.loads(_read_line(file))
                its_own = {str(name): str(value) for name, value in hello["about"].items()}
                process, its_own = int(hello["process"]), {_COUNT: "", **its_own}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                line.close()  # somebody else's connection
                continue
            lines.append(line)
            if process in came:
                outcome = as_json(
                    f"two processes of this job have process_id {process}",
                    fix="number the processes from 0, each its own number",
                )
            came.setdefault(process, its_own)
            if its_own[_COUNT] != about[_COUNT]:
                break  # nobody knows for whom to wait
        outcome = outcome or differences(came)
        for line in lines:
            with contextlib.suppress(OSError), line:
                line.sendall(f"{outcome}\n".encode())
    return outcome


def listen(port: int, backlog: int) -> socket.socket:
    """Opens a socket that listens on all interfaces; port 0 takes any free one."""
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


def _ask(seat: Seat, about: dict[str, str], timeout_s: float) -> str:
    """Connects to process 0, waiting until it is there, and returns its answer."""
    start = time.monotonic()
    hello = json.dumps({"process": seat.process, "about": about})
    strange: float | None = None  # since when somebody listens there who is not process 0
    while True:
        left = max(0.1, start + timeout_s - time.monotonic())
        try:
            with socket.create_connection((seat.host, seat.port), timeout=left) as line:
                strange = strange or time.monotonic()
                line.settimeout(min(left, _GREETING_S))
                with line.makefile("rb") as file:
                    if file.readline(len(_GREETING)) != _GREETING:
                        raise ConnectionError("what listens there is not process 0")
                    strange = None
                    line.sendall(f"{hello}\n".encode())
                    line.settimeout(timeout_s + _SLOW_S)
                    return _read_line(file)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                strange = None
            now = time.monotonic()
            if strange is not None and now - strange >= min(timeout_s, _GREETING_S):
                raise LaunchError(
                    f"process {seat.process} found another program at {seat.coordinator}, where "
                    "process 0 should listen",
                    fix="give a free port in the coordinator's address, or end what runs there",
                ) from None
            if now - start >= timeout_s:
                raise LaunchError(
                    f"process {seat.process} cannot reach process 0 at {seat.coordinator} within "
                    f"{timeout_s:g} s",
                    actual=str(error),
                    fix="see whether process 0 runs and why it ended, whether this machine knows "
                    "its name, and whether a firewall closes the port",
                ) from None
        time.sleep(0.2)


def _read_line(file: IO[bytes]) -> str:
    """Reads one line, without its end; OSError if the other side ended before it was whole."""
    data = file.readline(_LONGEST)
    if not data.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return data[:-1].decode()

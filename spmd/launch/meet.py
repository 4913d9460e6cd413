"""Meeting: before jax connects the processes, they find out whether they belong together.

jax's own client aborts, in C++, when a process does not come, when two have the same number or when
one expects another number of processes. So they first connect to the coordinator's port: each sends
its number and its versions, process 0 answers all of them at once, and all raise if not all agree.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import IO

from spmd.errors import LaunchError
from spmd.launch.agree import heard, refuse_differences, written

_SLOW_S = 10.0  # seconds that process 0 may be late with its answer

_HELLO_S = 2.0
"""Seconds that process 0 waits for a connection's first message before it goes to the next one."""

_GREETING = b"spmd process 0\n"
_GREETING_S = 8.0
"""A program that accepts connections for so many seconds but never greets is not process 0."""

_LONGEST = 1 << 16  # bytes of a message

_COUNT = "number of processes"


def meet(
    coordinator: str, processes: int, process: int, about: Mapping[str, str], timeout_s: float
) -> None:
    """Waits until all processes of a job have connected, and compares their `about`: name -> value.

    `coordinator` is `host:port` of process 0. LaunchError if it cannot be reached, a process did
    not come, came twice or expects another number of processes, or something in `about` differs.
    """
    if processes < 2:
        return
    about = {_COUNT: str(processes), **about}
    if process:
        heard(_ask(coordinator, process, about, timeout_s))
    else:
        heard(_host(coordinator, processes, about, timeout_s))


# Process 0.


def _host(coordinator: str, processes: int, about: dict[str, str], timeout_s: float) -> str:
    """As process 0: waits for all others, sends them the outcome (see `written`), returns it."""
    # A job of 3:  0 -> 1 the greeting, as soon as 1 is connected
    #              1 -> 0 {"process": 1, "about": {number of processes, versions}}
    #              2 -> 0 {"process": 2, ...}          connections stay open meanwhile
    #              0 -> 1, 2  null: all agree; else the error as JSON
    # All are answered at once and alike, so that either all go on to jax's own connection or
    # all raise. The socket is closed by then: jax's coordinator listens at the same port.
    deadline = time.monotonic() + timeout_s
    came = {0: about}
    lines: list[socket.socket] = []

    def collect() -> None:
        while len(came) < processes:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                line, _ = server.accept()
            except TimeoutError:
                missing = [str(p) for p in range(processes) if p not in came]
                names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                raise LaunchError(
                    f"process{'es' if len(missing) > 1 else ''} {names} did not come to "
                    f"{coordinator} within {timeout_s:g} s",
                    actual=f"{len(came)} of {processes} processes came",
                    fix="see why it did not start, or whether a firewall closes the port",
                ) from None
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
                raise LaunchError(
                    f"two processes of this job have process_id {process}",
                    fix="number the processes from 0, each its own number",
                )
            came[process] = its_own
            if its_own[_COUNT] != about[_COUNT]:
                break  # nobody knows for whom to wait
        refuse_differences(came)

    with listen(int(coordinator.rpartition(":")[2]), processes) as server:
        outcome = written(collect)
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


def _ask(coordinator: str, process: int, about: dict[str, str], timeout_s: float) -> str:
    """Connects to process 0, waiting until it is there, sends `about`, and returns its answer."""
    start = time.monotonic()
    host, _, port = coordinator.rpartition(":")
    hello = json.dumps({"process": process, "about": about})
    strange: float | None = None  # since when somebody listens there who is not process 0
    while True:
        left = max(0.1, start + timeout_s - time.monotonic())
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as line:
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
                    f"process {process} found another program at {coordinator}, where "
                    "process 0 should listen",
                    fix="give a free port in the coordinator's address, or end what runs there",
                ) from None
            if now - start >= timeout_s:
                raise LaunchError(
                    f"process {process} cannot reach process 0 at {coordinator} within "
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

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

from spmd.errors import LaunchError
from spmd.launch.agree import deciding, heard, refuse_differences
from spmd.launch.store import listed

_SLOW_S = 10.0  # seconds that process 0 may be late with its answer
_HELLO_S = 2.0  # seconds that process 0 waits for a connection's first message before the next one
_GREETING = "spmd process 0"
_GREETING_S = 8.0  # who accepts a connection but does not greet for so long is not process 0
_LONGEST = 1 << 20  # bytes of a message
_COUNT = "number of processes"


def meet(
    coordinator: str, processes: int, process: int, about: Mapping[str, str], timeout_s: float
) -> None:
    """Waits until all processes of a job have connected, and compares their `about`: name -> value.

    `coordinator` is `host:port` of process 0. LaunchError on all if a process does not come in
    `timeout_s` seconds, two have one number, or `processes` or a value in `about` differs.
    """
    about = {_COUNT: str(processes), **about}
    if process:
        heard(_ask(coordinator, process, about, timeout_s))
        return
    # Process 0 waits for all others, and tells them what it raises, or that all agree:
    #              0 -> 1 the greeting, as soon as 1 is connected
    #              1 -> 0 [1, {number of processes, versions}]
    #              2 -> 0 [2, {...}]          connections stay open meanwhile
    #              0 -> 1, 2  all agree, or the error
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
                missing = [process for process in range(processes) if process not in came]
                raise LaunchError(
                    f"{listed(missing)} did not come to {coordinator} within {timeout_s:g} s",
                    actual=f"{len(came)} of {processes} processes came",
                    fix="see why it did not start, or whether a firewall closes the port",
                ) from None
            try:
                line.settimeout(_HELLO_S)
                line.sendall(f"{_GREETING}\n".encode())
                number, its_own = json.loads(_read_line(line))
                process, its_own = int(number), {_COUNT: "", **its_own}
            except (OSError, ValueError, TypeError):
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
        refuse_differences(came, may_lack=True)

    def tell(outcome: str) -> None:
        for line in lines:
            with contextlib.suppress(OSError), line:
                line.sendall(f"{outcome}\n".encode())

    with listen(int(coordinator.rpartition(":")[2]), processes) as server:
        deciding(collect, tell, "meeting the others")


def listen(port: int, backlog: int) -> socket.socket:
    """Returns a socket that listens on all interfaces (port 0: a free one), else LaunchError."""
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


def _ask(coordinator: str, process: int, about: dict[str, str], timeout_s: float) -> str:
    """Sends `about` to process 0, returns its answer for `heard`; LaunchError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    host, _, port = coordinator.rpartition(":")
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as line:
                line.settimeout(min(left, _GREETING_S))
                if _read_line(line, len(_GREETING) + 1) != _GREETING:
                    raise ConnectionError("another program listens there")
                line.sendall(f"{json.dumps([process, about])}\n".encode())
                line.settimeout(timeout_s + _SLOW_S)
                return _read_line(line)
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"process {process} cannot reach process 0 at {coordinator} within "
                    f"{timeout_s:g} s",
                    actual=str(error),
                    fix="see whether process 0 runs and why it ended, whether this machine knows "
                    "its name, whether a firewall closes the port or another program has it",
                ) from None
        time.sleep(0.2)


def _read_line(line: socket.socket, longest: int = _LONGEST) -> str:
    """Returns the next line from a socket; OSError if cut off or over `longest` bytes."""
    with line.makefile("rb") as file:
        data = file.readline(longest)
    if not data.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return data[:-1].decode()

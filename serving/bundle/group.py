"""Several processes that serve one bundle: process 0 leads, the others repeat its calls.

    process 0                                        process 1, 2, ...
    Bundle.run ──> queue ──> a thread ──> socket ──> a thread ──> queue ──> Bundle.run

Every process holds the same bundle, each with the shards of its own devices. Programs have
collectives, so all have to run the same ones in the same order: that of process 0's bundle, which
tells its leader of each call before it begins. Outputs are whole on every process; process 0 reads
them, nobody else does.

The connections also tell who lives: one that closes ends all processes, within moments and with the
reason, by `spmd.launch.peers`. How they end:

    what happens                      process 0                        the others
    it was asked to end               drains, says `end`, exits 0      exit 0
    another one was asked to end      the same, exits 75               exit 75
    another one is lost or fails      clients get 503, exits 76        exit 76
    it is lost itself                                                  exit 76
"""

import contextlib
import hmac
import json
import logging
import math
import os
import queue
import secrets
import selectors
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple, NoReturn

import jax
import numpy as np

from spmd.errors import LaunchError
from spmd.launch import EXIT_PREEMPTED
from spmd.launch.meet import listen
from spmd.launch.peers import at_stop, first_line, peer_lost, stop_now
from spmd.launch.store import JobStore, connected_to, job_store, this_process
from spmd.serving.bundle.bundle import Bundle

_SIZES = struct.Struct("!IQ")

IDLE_SECONDS, PROBE_SECONDS = 10, 5
LOST_SECONDS = 30
"""After so long without an answer from the other host the connection counts as closed."""


class Message(NamedTuple):
    """What one process tells another."""

    kind: str  # what to do
    names: Sequence[str] = ()  # what to do it with
    arrays: Sequence[Any] = ()  # the inputs


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
    # Inputs that nobody can write would be kept on the devices.
    head, body = file.read(head_size), bytearray(file.read(body_size))
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


KEY = "serving/leader"

_HELLO_SECONDS = 10.0
_HELLO_BYTES = 100


def welcome(store: JobStore, processes: int, timeout_s: float) -> dict[int, socket.socket]:
    """Process 0's connections to all others.

    Args:
      store: the job's store; members read there how to connect, and with which secret.

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


def connect(store: JobStore, process: int, timeout_s: float) -> socket.socket:
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


RUN, RESET, END, STOP = "run", "reset", "end", "stop"

QUEUED = 64
"""Calls that may wait for a slow connection; then process 0 waits, too."""

AHEAD = 4
"""Calls that a follower begins before the oldest one is done."""

CAUSE_SECONDS = 5.0
"""When a call has failed, so long another process may take to turn out to be the cause."""

GOODBYE_SECONDS = 10.0
"""So long process 0 waits for the others to end."""

_ASKED = b"t"

_LOG = logging.getLogger("serving")


def join(timeout_s: float = 300.0) -> "Leader | Follower | None":
    """Connects the processes of a job, after `spmd.initialize`.

    Returns:
      What this process is; None if it is alone.

    Raises:
      LaunchError: another process did not come.
    """
    store = job_store()
    if store is None:
        return None
    process, processes = this_process()
    if process == 0:
        return Leader(welcome(store, processes, timeout_s))
    return Follower(connect(store, process, timeout_s), process, processes)


class Leader:
    """Process 0's side.

    Args:
      lines: process -> connection.

    Example:
      >>> bundle = load_bundle(folder, mesh)
      >>> bundle.told = leader.tell      # from here on the others repeat what it runs
    """

    def __init__(self, lines: Mapping[int, socket.socket]) -> None:
        self._lines = dict(lines)
        self._queue: queue.Queue[bytes] = queue.Queue(QUEUED)
        self._drain: Callable[[], None] = lambda: None
        self._lose: Callable[[str], None] = lambda why: None
        self._ending = threading.Event()
        self._alone = threading.Event()
        self._lost = threading.Event()
        for work in (self._send, self._watch):
            threading.Thread(target=work, name=f"leader{work.__name__}", daemon=True).start()
        at_stop(self._farewell)

    def tell(self, kind: str, names: Sequence[str], arrays: Sequence[Any]) -> None:
        """Hands a call to the thread that sends it; waits only if the others are far behind."""
        self._queue.put(encode(Message(kind, names, arrays)))

    def attend(self, drain: Callable[[], None], lose: Callable[[str], None]) -> None:
        """Takes what to do if another process is asked to end, and what before a sudden end.

        Args:
          drain: begins to drain.
          lose: tells clients why, and returns when they have been told.
        """
        self._drain, self._lose = drain, lose

    def heed(self, error: Exception) -> None:
        """Ends all processes if a call failed on the devices: then it does not return."""
        if not _is_of_devices(error):
            return
        # A collective that breaks is most likely not at fault: who is, turns out in a moment.
        if not self._lost.wait(CAUSE_SECONDS):
            stop_now(f"process 0 failed: {first_line(error)}", code=1)
        threading.Event().wait()

    def end(self, asked: bool) -> NoReturn:
        """Ends all processes; they are to be started again, unless this one was asked to end."""
        if self._lost.is_set():
            threading.Event().wait()  # the thread that noticed ends the process
        code = 0 if asked else EXIT_PREEMPTED
        self._ending.set()
        with contextlib.suppress(queue.Full):
            self._queue.put(encode(Message(END, [str(code)])), timeout=1)
            self._alone.wait(GOODBYE_SECONDS)
        # Nothing of jax is shut down: a call may be under way, and the others have ended so, too.
        _exit(code)

    # The threads.

    def _send(self) -> None:
        while True:
            message = self._queue.get()
            for line in self._lines.values():
                with contextlib.suppress(OSError):  # the other thread notices, too
                    line.sendall(message)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    try:
                        said = os.read(key.fd, 1)
                    except OSError:
                        said = b""
                    if said == _ASKED:
                        _LOG.info("process %d was asked to end, and all with it", key.data)
                        self._drain()
                    elif not said:
                        selector.unregister(key.fileobj)
                        self._gone(key.data)
        self._alone.set()

    def _gone(self, process: int) -> None:
        if self._ending.is_set() or self._lost.is_set():
            return
        # In a thread of its own: this one goes on to see the others end.
        how = "its connection closed; its own output says why"
        threading.Thread(target=peer_lost, args=(process, how), daemon=True).start()

    def _farewell(self, verdict: str) -> None:
        """Tells the other processes and all clients why this one ends."""
        self._lost.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(encode(Message(STOP, [verdict])))
        self._lose(verdict)
        self._alone.wait(1.0)


def _is_of_devices(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__
    return False


def repeat(bundle: Bundle, call: Message) -> Any:
    """Runs a call that `Bundle.told` was told of; returns arrays that are computed."""
    kind, names, arrays = call
    if kind == RUN:
        return bundle.run_flat(names[0], arrays)
    if kind == RESET:
        return bundle.reset_state()
    return bundle.put_state(dict(zip(names, arrays, strict=True)))


class Follower:
    """The side of every other process.

    It does not end by signals: it passes them on to process 0, which drains and ends all.

    Args:
      line: to process 0.
      process: which one this is.
    """

    def __init__(self, line: socket.socket, process: int, processes: int) -> None:
        self.process, self.processes = process, processes
        self._line = line
        # No longer than process 0 runs ahead, and that waits for results which need this process.
        self._calls: queue.Queue[Message] = queue.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._pass_on())
        threading.Thread(target=self._receive, name="follower", daemon=True).start()

    def follow(self, bundle: Bundle) -> NoReturn:
        """Repeats process 0's calls until it says that all end."""
        _LOG.info("process %d of %d runs what process 0 runs", self.process, self.processes)
        under_way: deque[Any] = deque()
        while True:
            under_way.append(repeat(bundle, self._calls.get()))
            if len(under_way) > AHEAD:
                jax.block_until_ready(under_way.popleft())

    def _pass_on(self) -> None:
        with contextlib.suppress(OSError):
            self._line.send(_ASKED)

    def _receive(self) -> None:
        with self._line.makefile("rb") as file, contextlib.suppress(OSError):
            while (message := read(file)) is not None:
                if message.kind == END:
                    _exit(int(message.names[0]))
                if message.kind == STOP:
                    stop_now(message.names[0])
                self._calls.put(message)
        peer_lost(0, "its connection closed; its own output says why")


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)

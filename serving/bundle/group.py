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

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from serving.bundle.bundle import Bundle
from serving.bundle.connect import connect, welcome
from serving.bundle.wire import Message, encode, read
from spmd.launch import EXIT_PREEMPTED
from spmd.launch.peers import at_stop, first_line, peer_lost, stop_now
from spmd.launch.store import job_store, this_process

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


def join(timeout_s: float = 300.0) -> Leader | Follower | None:
    """Connects the processes of a job, after `spmd.initialize`.

    Args:
      timeout_s: seconds to wait for the others.

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
        """See `serving.http.others.Others`."""
        self._drain, self._lose = drain, lose

    def heed(self, error: Exception) -> None:
        """Ends all processes if a call failed on the devices; see `serving.http.others.Others`."""
        if not _is_of_devices(error):
            return
        # A collective that breaks is most likely not at fault: who is, turns out in a moment.
        if not self._lost.wait(CAUSE_SECONDS):
            stop_now(f"process 0 failed: {first_line(error)}", code=1)
        threading.Event().wait()

    def end(self, asked: bool) -> NoReturn:
        """See `serving.http.others.Others`."""
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
      processes: how many there are.
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
        with self._line.makefile("rb") as file:
            while (message := _next(file)) is not None:
                if message.kind == END:
                    _exit(int(message.names[0]))
                if message.kind == STOP:
                    stop_now(message.names[0])
                self._calls.put(message)
        peer_lost(0, "its connection closed; its own output says why")


def _next(file: Any) -> Message | None:
    try:
        return read(file)
    except OSError:
        return None


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)

"""Peers: processes of one job stop together, and say why.

A process that dies leaves the others inside collectives that never end. So a thread of each process
writes a sign of life, a counter, to the store every few seconds. If one does not change for long,
process 0 writes a verdict: the text that says which process was lost. A process that fails writes
one itself. A thread that reads a verdict prints it and ends its process with `EXIT_PEER_LOST`, even
while the main thread hangs inside a collective.

They stop at one step, too, when one of them gets SIGTERM (`StopVote`).

If process 0 dies the store dies with it, and jax's client aborts within milliseconds; `watch_peers`
handles that signal, for a message and the same exit code.
"""

import atexit
import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

import jax

from spmd.launch.doing import ALIVE, LEFT, WHO, Sign, all_signs, sign_of
from spmd.launch.restart import exit_code, hear_news
from spmd.launch.store import JobStore, connected_to, listed, this_process

EXIT_PREEMPTED = 75
"""Exit code after SIGTERM if the state was saved: start it again (`EX_TEMPFAIL` of sysexits.h)."""

EXIT_PEER_LOST = 76
"""Exit code of a process that stopped because another one of its job was lost or failed."""

EXIT_HUNG = 77  # exit code of a process that its watchdog stopped: no progress within the limit

VERDICT = "verdict"

COLLECTIVE_FAILED = re.compile(
    r"gloo|nccl|connection (closed|reset)|socket closed|heartbeat|coordination service", re.I
)
"""Matches the text of an error that the end of another process has most likely caused."""

SHOWN = 4  # so many lost processes are named with their hosts


class Signs:
    """Keeps when, in s, each process's sign of life last changed: at first `started` for all."""

    def __init__(self, processes: int, timeout_s: float, started: float) -> None:
        self.timeout_s = timeout_s
        self._seen = dict.fromkeys(range(processes), ("", started))

    def silent(self, now: float, signs: Mapping[int, str]) -> dict[int, float]:
        """Returns process -> seconds since its sign changed, if these are over `timeout_s`.

        `signs` is process -> its present sign, `LEFT` if it ends because the job does and may be
        silent; one that is missing has not changed. `now` is the time of the call in seconds.
        """
        # Signs are counters, not times: hosts' clocks differ. Only this process's clock is read,
        # at the moment when it sees a counter change.
        for process, sign in signs.items():
            if self._seen[process][0] != sign:
                self._seen[process] = (sign, now)
        return {
            process: now - since
            for process, (sign, since) in self._seen.items()
            if sign != LEFT and now - since > self.timeout_s
        }


def lost(how: str, processes: Iterable[int], signs: Mapping[int, Sign]) -> str:
    """Returns `process 1 was lost: <how>; it was pid 4711 on host`, the end if `signs` has it."""
    names = sorted(processes)
    each = [signs[process].who for process in names if process in signs]
    told = f"; it was {', '.join(each[:SHOWN])}" if each else ""
    return f"{listed(names)} {'were' if len(names) > 1 else 'was'} lost: {how}{told}"


STOP_REACHED = "stop"  # folder of the steps that processes have reached when they are to stop


class StopVote:
    """Lets all processes stop before the same step, though SIGTERM reaches them at different ones.

    The thread that watches peers calls `look` every few seconds, the main thread `reached`.
    """

    # A process that is asked to stop freezes the step that it has reached, and publishes it. Then
    # the thread of every other one does so for its main thread; all stop at the step after the
    # furthest. If process 0 is in step 7 and process 1 in step 9, both stop before step 10. No
    # process waits for a main thread, so a collective that it is in ends as always.

    def __init__(self, store: JobStore, process: int, processes: int) -> None:
        self.store, self.process, self.processes = store, process, processes
        self._step = -1
        self._stop_at: int | None = None
        self._is_frozen = False
        self._change = threading.Condition()

    def reached(self, step: int, wanted: bool) -> bool:
        """Whether all processes stop before `step`, which is next; `wanted` asks them to stop."""
        # While steps are being counted this process must not go on to the next one, or the furthest
        # would be wrong. The wait is short: threads answer even while main threads compute.
        with self._change:
            self._change.wait_for(lambda: not self._is_frozen)
            if self._stop_at is not None:
                return step >= self._stop_at
            self._step = step
            if wanted:
                self._freeze()
            return False

    def _freeze(self) -> None:
        self._is_frozen = True
        self.store.put(f"{STOP_REACHED}/{self.process}", str(self._step))

    def look(self) -> None:
        """Publishes this process's step once one asks to stop; once all did, sets where to stop."""
        if self._stop_at is not None or not (reached := self.store.all(STOP_REACHED)):
            return
        with self._change:
            if not self._is_frozen:
                self._freeze()
                reached = self.store.all(STOP_REACHED)
            if len(reached) == self.processes:
                self._stop_at = max(map(int, reached.values())) + 1
                self._is_frozen = False
                self._change.notify_all()


class Peers:
    """Writes this process's signs of life on a thread; ends this process if another one is lost.

    A process is lost after `timeout_s` seconds without a sign, or when it reports its failure.
    """

    # How process 2 of 4 is missed, with a timeout of 60 s and a look every 5 s:
    #   0 s      2 is killed; the others hang in their next collective, but their threads still look
    #   60 s     0 sees no new sign of 2, and claims the verdict "process 2 was lost ..."
    #   65 s     1 and 3 read it, print it and exit with 76
    #   71 s     0 exits last: the store lives in it, and the others had to read the verdict there
    # `claim` writes only once, so a failure that follows from the first one cannot replace it.

    def __init__(self, store: JobStore, timeout_s: float) -> None:
        self.store = store
        self.process, self.processes = this_process()
        self.timeout_s = timeout_s
        self.interval_s = min(5.0, max(0.2, timeout_s / 10))
        self.failed: int | None = None
        # Whether it ends after the others: the store, in which they read why, lives in process 0.
        self.is_last = self.process == 0
        self.others_know = False  # whether they hear why from somebody else
        self.last_words: list[Callable[[str], object]] = []  # called with that reason
        self.form: Callable[[str], str] = str
        self.on_abort: Any = None
        self.vote = StopVote(store, self.process, self.processes)
        self.known = self._meet()
        self._contact = time.monotonic()
        self._leaving = threading.Event()
        self._gone = threading.Event()
        self._stopping = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="spmd peers", daemon=True)
        self._clock = threading.Thread(target=self._watch_store, name="spmd store", daemon=True)

    def _meet(self) -> dict[int, Sign]:
        """Returns the first sign of process 0, which it gives here, for the end of its store."""
        if self.process == 0:
            self._say(json.dumps(Sign(0, WHO, "", 0)))
        else:
            self.store.get(f"{ALIVE}/0", self.timeout_s)
        first = sign_of(self.store, 0)
        return {} if first is None else {0: first}

    def _run(self) -> None:
        seen = Signs(self.processes, self.timeout_s, time.monotonic())
        sign = Sign(0, "", "", 0)
        while not self._gone.is_set():
            try:
                sign = sign.next(self._leaving.is_set())
                if (verdict := self._look(seen, sign)) is not None:
                    self._say(LEFT)
                    self.stop(verdict)
            except Exception as error:
                # One failed request is no verdict: hosts are busy and networks lose packets. A
                # refused connection is, for nobody listens there any more; but the service also
                # ends when all have met.
                if not self._leaving.is_set() and self.is_coordinator_gone():
                    self.stop(self.coordinator_lost(first_line(error)))
            if self._leaving.wait(self.interval_s):
                self._gone.wait(self.interval_s)

    def _look(self, seen: Signs, sign: Sign) -> str | None:
        self._say(json.dumps(sign))
        if self.process == 0:
            silent = seen.silent(time.monotonic(), self.store.all(ALIVE))
            if silent:
                how = f"no sign of life for {min(silent.values()):.0f} s"
                told = lost(how, silent, all_signs(self.store))
                self.store.claim(VERDICT, f"{told}; its output or the scheduler's log says why")
        self.vote.look()
        verdict = self.store.get(VERDICT)
        self._contact = time.monotonic()
        return verdict

    def _say(self, sign: str) -> None:
        self.store.put(f"{ALIVE}/{self.process}", sign)

    def coordinator_lost(self, how: str) -> str:
        """Returns the text that process 0 was lost, with the cause `how`, its pid and host."""
        return lost(how, [0], self.known)

    def _watch_store(self) -> None:
        """Runs in a thread; ends this process if the store is silent for `timeout_s` seconds."""
        # Silence is counted in turns of this thread, so that it ends where this process itself was
        # stopped or had no time.
        contact, silence = self._contact, 0.0
        while not self._gone.wait(self.interval_s):
            is_silent = contact == self._contact and not self._leaving.is_set()
            contact, silence = self._contact, silence + self.interval_s if is_silent else 0.0
            if silence > self.timeout_s:
                self.stop(self.coordinator_lost(f"its store was silent for {silence:.0f} s"))

    def is_coordinator_gone(self) -> bool:
        """Whether process 0 accepts no connection within 2 s; False on process 0 itself."""
        if self.process == 0:
            return False
        host, _, port = str(connected_to()).rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError:
            return True
        return False

    def hear(self, news: str) -> NoReturn:
        """Ends this process with the launcher's `news` that another was lost; others hear it."""
        self.others_know = True
        self.stop(news)

    def stop(self, verdict: str) -> NoReturn:
        """Prints `verdict`, why the job ends; exits with `failed`, or if None EXIT_PEER_LOST."""
        with self._stopping:
            self._tell(verdict)
            _flush()
            with contextlib.suppress(Exception):  # at once and unbuffered: this process ends
                text = f"error: process {self.process} of {self.processes} stops: {verdict}"
                os.write(2, f"{self.form(text)}\n".encode())
            self._exit(EXIT_PEER_LOST if self.failed is None else self.failed)

    def _tell(self, verdict: str) -> None:
        for say in self.last_words:
            with contextlib.suppress(Exception):
                say(verdict)

    def _exit(self, code: int) -> NoReturn:
        if self.is_last and not self.others_know:
            with contextlib.suppress(Exception):
                ctypes.CDLL(None).signal(signal.SIGTERM, signal.SIG_IGN)
                end = time.monotonic() + 2 * self.interval_s + 0.5
                # Only process 0 may ask the store here: on others a request could last for ever.
                while time.monotonic() < end and not (self.process == 0 and self._have_left()):
                    time.sleep(0.1)
        _flush()
        os._exit(code)

    def _have_left(self) -> bool:
        signs = self.store.all(ALIVE)
        return all(signs.get(process) == LEFT for process in range(1, self.processes))

    # This process's own end.

    def wait_for_cause(self, why: str) -> None:
        """Waits, if `why` is a failed collective's error text, until its cause would be known.

        Most likely another process ended. The thread that watches them then ends this process, with
        that reason: its own error, which tells users nothing, is not shown.
        """
        if COLLECTIVE_FAILED.search(why):
            self.await_stop(self.timeout_s + 3 * self.interval_s)

    def await_stop(self, seconds: float) -> None:
        """Waits `seconds` for another thread to `stop` this process; returns if none began to."""
        time.sleep(seconds)
        with self._stopping:  # held by `stop` until the end: its message is the last
            pass

    def fail(self, why: str, code: int) -> None:
        """Makes the others stop, as this one fails with error `why` and will exit with `code`."""
        verdict = f"process {self.process} failed: {first_line(why)}"
        with self._stopping:
            self.failed = code
        with contextlib.suppress(Exception):
            self.store.claim(VERDICT, verdict)
        self._tell(verdict)

    def leave(self) -> None:
        """Runs at the interpreter's end: waits for the others' end, or exits if this one failed."""
        # A thread must not be inside of jax's client when the interpreter ends: Python would end
        # the thread there, which C++ answers with an abort, and that with our handler of it, which
        # needs the interpreter.
        if self.failed is None:
            self._leaving.set()
            try:
                jax.distributed.shutdown()  # waits for all, while the thread looks after them
            finally:
                self._gone.set()
                self._thread.join()
                ctypes.CDLL(None).signal(signal.SIGABRT, signal.SIG_DFL)
            return
        with self._stopping:
            logging.shutdown()
            self._exit(self.failed)


_peers: Peers | None = None


def watch_peers(store: JobStore, timeout_s: float) -> None:
    """Starts to watch the other processes; an uncaught error of this one will end them, too."""
    global _peers
    _peers = peers = Peers(store, timeout_s)
    peers._thread.start()
    if peers.process:
        peers._clock.start()
    hear_news(peers.hear)
    atexit.register(peers.leave)
    show = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            show(kind, error, trace)  # of a callback in a library's thread: nobody's end
            return
        why = "".join(traceback.format_exception_only(kind, error)).strip()
        peers.wait_for_cause(why)
        show(kind, error, trace)
        peers.fail(why, 130 if issubclass(kind, KeyboardInterrupt) else exit_code(error))

    sys.excepthook = report
    libc = ctypes.CDLL(None)

    def on_abort(_: int) -> None:
        """Handles SIGABRT: if process 0 was lost, says so and exits; otherwise aborts."""
        # Our message and exit code then; any other abort goes on as it would without us.
        silence = time.monotonic() - peers._contact
        if peers.process == 0 and silence > peers.timeout_s:
            peers.stop(
                f"it gave no sign of life for {silence:.0f} s (was it stopped, or its machine "
                "asleep?), and the others took it for lost"
            )
        if peers.is_coordinator_gone():
            peers.stop(peers.coordinator_lost("its store is gone"))
        if threading.current_thread() is not threading.main_thread():
            # Most likely jax has noticed what our thread is about to say.
            peers.await_stop(3 * peers.interval_s)
        libc.signal(signal.SIGABRT, signal.SIG_DFL)
        libc.abort()

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    peers.on_abort = handler  # keeps it alive
    libc.signal(signal.SIGABRT, handler)


def fail_peers(why: str, code: int = 1) -> None:
    """Makes the others stop, as this process fails with error `why` and will exit with `code`."""
    if _peers is not None:
        _peers.wait_for_cause(why)
        _peers.fail(why, code)


def at_stop(say: Callable[[str], object], tells_others: bool = True) -> None:
    """Has `say` called with the reason before this process ends because one of the job failed.

    `say` runs on any thread. `tells_others` means that `say` tells the others: process 0 then does
    not wait until they have read the reason. Does nothing where there is but one process.
    """
    if _peers is not None:
        _peers.last_words.append(say)
        _peers.others_know |= tells_others


def form_last_line(form: Callable[[str], str]) -> None:
    """Sets `form(line)`, which returns the last line, `error: ...`, in the form of the job's logs.

    `form` runs on any thread. Does nothing where there is but one process.
    """
    if _peers is not None:
        _peers.form = form


def peer_lost(process: int, how: str) -> NoReturn:
    """Ends this process (EXIT_PEER_LOST) and the others, as `process` was lost by cause `how`."""
    assert _peers is not None
    # With process 0 the store is gone.
    stop_now(lost(how, [process], _peers.known), tells_others=process != 0)


def stop_now(verdict: str, code: int = EXIT_PEER_LOST, *, tells_others: bool = False) -> NoReturn:
    """Ends this process with exit code `code`, whatever its threads do.

    Unless it is alone it first prints `verdict`, why the job ends. If `tells_others`, the others
    end, too, and before it; if they have a verdict already, that one is printed instead.
    """
    if _peers is not None:
        _peers.failed, _peers.is_last = code, _peers.is_last or tells_others
        if tells_others:
            with contextlib.suppress(Exception):
                _peers.store.claim(VERDICT, verdict)
                verdict = _peers.store.get(VERDICT) or verdict
        _peers.stop(verdict)
    _flush()
    os._exit(code)


def stop_agreed(step: int, wanted: bool) -> bool:
    """Whether all processes stop before this step; every process has to call it before every step.

    SIGTERM reaches processes at different steps, and some not at all, but a checkpoint is saved by
    all together. True from the same step on everywhere, soon after `wanted` was true anywhere.

    Args:
      step: the step that would be next.
      wanted: whether this process was asked to stop, by a signal.

    Example:
      >>> while step < steps and not stop_agreed(step, wanted=got_sigterm.is_set()):
      ...     state = train_step(state)
    """
    return wanted if _peers is None else _peers.vote.reached(step, wanted)


@contextlib.contextmanager
def stopping_peers() -> Iterator[None]:
    """Makes an exit with an error inside, as by `sys.exit("error: ...")`, stop the other processes.

    Uncaught exceptions stop them anyway, after `initialize`. Without this they would wait, after an
    exit, for this process in their next collective.

    Example:
      >>> with stopping_peers():
      ...     sys.exit("error: no such file")
    """
    try:
        yield
    except SystemExit as error:
        code = error.code
        if code not in (None, 0, EXIT_PREEMPTED):  # a saved state is no failure: all end so
            if isinstance(code, int):
                fail_peers(str(error.__cause__ or code), code)
            else:
                fail_peers(str(code))
        raise


def first_line(error: object) -> str:
    """Returns the first line of an error's text, or its type's name where the text is empty.

    For an SpmdError, its `actual` follows in parentheses. Cut off after 1000 characters.
    """
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    actual = [f" ({line.partition(': ')[2]})" for line in rest if line.startswith("  actual: ")]
    return "".join((first, *actual))[:1000]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()

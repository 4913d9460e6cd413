"""Functions that are compiled while those that a bundle needs first run already."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping

from serving.bundle.function import BundleError


class Behind:
    """Jobs on threads of their own; when the process ends, those that have not begun are dropped.

    Args:
      jobs: name -> what to do; it raises a `BundleError` if it cannot.
      threads: how many at a time.
      ended: called behind the last one.
    """

    def __init__(
        self,
        jobs: Mapping[str, Callable[[], None]],
        threads: int,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._left = len(jobs)
        self._ended = ended
        self._lock = threading.Lock()
        # Not daemons: a thread inside XLA crashes when the interpreter shuts down around it.
        pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="compile")
        self._futures = {name: pool.submit(self._run, job) for name, job in jobs.items()}
        pool.shutdown(wait=False)
        if not jobs:
            ended()

    def wait(self, name: str) -> bool:
        """Waits for a job; returns whether there is such a one.

        Raises:
          BundleError: it failed.
        """
        future = self._futures.get(name)
        if future is None:
            return False
        future.result()
        return True

    def done(self) -> Iterator[str]:
        """The names of jobs, each once it is done.

        Raises:
          BundleError: some failed; all others were given out before.
        """
        names = {future: name for name, future in self._futures.items()}
        for future in concurrent.futures.as_completed(names):
            if future.exception() is None:
                yield names[future]
        for future in names:
            future.result()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            if not threading.main_thread().is_alive():
                raise BundleError("the process ends")
            job()
        finally:
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last:
                self._ended()

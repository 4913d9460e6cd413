"""What the server serves, and its status: loading, ready, draining or failed."""

import functools
import time
from typing import Any, Literal

from spmd.serving.engine.batches import Batches
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.infer import NAMES
from spmd.serving.engine.statistics import Statistics
from spmd.serving.engine.stream import SHUTTING_DOWN, Lost
from spmd.serving.engine.workers import Workers
from spmd.serving.errors import ApiError, ServingError
from spmd.serving.http.adapters import Adapters, no_model
from spmd.serving.http.admission import Admission, Allowance
from spmd.serving.http.fields import SHORT, Fields, parse_object
from spmd.serving.http.keys import Keys
from spmd.serving.http.language import Heed, Language, Loaded
from spmd.serving.http.limits import ServerOptions
from spmd.serving.http.traffic import RequestMetrics, Traffic

STOP_SECONDS = 10.0
"""So long calls that are under way are waited for, when their requests have failed already."""

PROCESS_LOST = "process_lost"
"""The code of what fails since a process of those that run the model was lost."""

Status = Literal["loading", "ready", "draining", "failed"]


class Service:
    """What all handlers share.

    Args:
      heed: is told what the model raised.

    Attributes:
      status: loading, ready, draining or failed.
      lost: why the process is about to end without having drained; None if it is not.
      loaded: the model, once it is there.
      adapters: those of it.
      created: when the server started, in seconds since 1970.
      keys: who may use it, and how much.
      admission: the book of all requests.
      traffic: the metrics.
      statistics: what the model has done since the start.
      grammars: what compiles the grammars of requests.
    """

    def __init__(
        self, options: ServerOptions | None = None, heed: Heed = lambda error: None
    ) -> None:
        self.options = options or ServerOptions()
        self.status: Status = "loading"
        self.lost: str | None = None
        self._heed = heed
        self.loaded: Loaded | None = None
        self.adapters = Adapters(Loaded(""))
        self.created = int(time.time())
        self.keys = Keys(self.options.api_keys, self.options.api_key_file)
        self.admission = Admission(Allowance(0), Allowance(self.options.bodies_bytes))
        self.traffic = Traffic(self.admission)
        # A long text takes seconds, in which short ones must not wait.
        threads = self.options.text_threads
        self._short = Workers("short texts", threads)
        self._long = Workers("long texts", threads)
        self.grammars = Workers("grammars")  # those of strangers take seconds, too
        self.statistics = Statistics()
        self._tensors: Workers | None = None
        self._batches: Batches | None = None
        self._language: Language | None = None
        for workers in (self._short, self._long, self.grammars):
            workers.start()

    def become_ready(self, loaded: Loaded) -> None:
        """Serves a model from now on.

        Raises:
          ServingError: it cannot be served.
        """
        if loaded.language is None and loaded.infer is None:
            raise ServingError(f"{loaded.name}: neither a language model nor one of tensors")
        if loaded.infer is not None:  # KServe's protocol has to name all dtypes
            for spec in (*loaded.infer.inputs, *loaded.infer.outputs):
                if spec.dtype not in NAMES:
                    raise ServingError(
                        f"tensor {spec.name}: {spec.dtype} cannot be served; these can: "
                        f"{', '.join(NAMES)}"
                    )
        requests = RequestMetrics(loaded.name, self._counts, self.traffic.registry, self.statistics)
        slots = 0
        if loaded.language is not None:
            self._language = Language(loaded, self.options, requests, self._heed)
            self._language.engine.start()
            slots += loaded.language.limits.slots
        if loaded.infer is not None:
            # `Infer` is called by one thread at a time.
            self._tensors = Workers("tensors", finished=requests.finished, heed=self._heed)
            self._tensors.start()
            self._batches = Batches(loaded.infer, self.statistics)
            slots += 1
        self.admission.places.limit = slots + self.options.max_waiting
        self.adapters = Adapters(loaded, self.options.adapters_from)
        self.loaded = loaded
        if self.status == "loading":
            self.status = "ready"

    def problem(self) -> str | None:
        """Why requests are not served now; None if they are."""
        if self.lost is not None:
            return self.lost
        if self.status == "draining":
            return SHUTTING_DOWN
        if self.loaded is None:
            return "the model is still loading" if self.status == "loading" else "loading failed"
        return self.broken()

    def broken(self) -> str | None:
        """Why the process has to be started anew; None if it need not."""
        if self.lost is not None:
            return self.lost
        if self._language is not None and self._language.engine.error is not None:
            return self._language.engine.error
        stalled = max((model.stalled() for model in self._models), default=0.0)
        if stalled > self.options.stall_seconds:
            return f"a call of the model has been under way for {stalled:.0f} seconds"
        return None

    def require(self, model: str | None = None) -> Loaded:
        """The model, if it is ready.

        Args:
          model: the name that the request asks for; None accepts any.

        Raises:
          ApiError: it is not ready, or has another name.
        """
        if self.loaded is None or self.lost is not None or self.status == "draining":
            problem = self.problem()
            code = self.status if self.lost is None else PROCESS_LOST
            raise ApiError(503, f"not now: {problem}", code=code, retry_after=5)
        self.check_name(model)
        return self.loaded

    def check_name(self, model: str | None) -> None:
        """Checks that a request asks for the model that there is, or an adapter; None accepts any.

        Raises:
          ApiError: it has another name.
        """
        if model is not None and model not in (names := self.adapters.names):
            raise no_model(model, names)

    def parse(self, body: bytes) -> dict[str, Any]:
        """The object in a request's body, which asks for the model as `check_name` has it.

        Raises:
          ApiError: it is no object, or asks for another model.
        """
        found = parse_object(body)
        self.check_name(Fields(found).text("model") or None)
        return found

    def language(self) -> Language:
        """The language model.

        Raises:
          ApiError: there is none.
        """
        if self._language is None:
            raise ApiError(404, "this is no language model: use /v2/models/.../infer")
        return self._language

    def tensors(self) -> tuple[Workers, Batches]:
        """What runs the model of tensors, and makes calls of it.

        Raises:
          ApiError: there is none.
        """
        if self._tensors is None or self._batches is None:
            raise ApiError(404, "this is no model of tensors: use /v1/completions")
        return self._tensors, self._batches

    def texts(self, size: int) -> Workers:
        """What reads a body of so many bytes: long ones have threads of their own."""
        return self._short if size <= SHORT else self._long

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""
        engine_idle = self._language is None or self._language.engine.idle
        return not self.admission.places.taken and engine_idle

    def drain(self) -> None:
        """Refuses new requests from now on; those that have a place go on to their ends."""
        self.status = "draining"

    def lose(self, why: str) -> None:
        """Ends all requests at once, and refuses new ones: the model will not answer any more.

        Args:
          why: what all of them are told.
        """
        self.lost, self.status = why, "failed"
        for part in self._parts:
            part.stop(timeout=0, why=functools.partial(Lost, why))

    def stop(self) -> None:
        """Ends all threads; requests that are not finished fail at once."""
        self.drain()
        for part in self._parts:
            part.stop(timeout=0)
        end = time.monotonic() + STOP_SECONDS
        for part in self._parts:
            part.stop(timeout=max(0.0, end - time.monotonic()))

    @property
    def ended(self) -> bool:
        """Whether no thread runs: a call may take longer than `stop` waits."""
        background = None if self.loaded is None else self.loaded.background
        if background is not None and background.is_alive():
            return False
        return all(part.ended for part in self._parts)

    @property
    def _parts(self) -> list[Engine | Workers]:
        return [self._short, self._long, self.grammars, *self._models]

    @property
    def _models(self) -> list[Engine | Workers]:
        engine = None if self._language is None else self._language.engine
        return [model for model in (engine, self._tensors) if model is not None]

    def _counts(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        tensors = self._tensors
        running, waiting = (0, 0) if tensors is None else (tensors.running, tensors.waiting)
        if self._language is not None:
            state = self._language.engine.state()
            running, waiting = running + state.running, waiting + state.waiting
        return running, waiting

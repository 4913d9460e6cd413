"""`serving.engine.model_backend.ModelBackend` over functions that compute nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.engine.backend import Limits, Sampling
from serving.engine.model_backend import ModelBackend, generate

LIMITS = Limits(slots=2, max_length=32, chunks=(4, 8), decode_steps=4, top_logprobs=1, vocab_size=9)


class Computed:
    """An array of the device's that says when somebody waits for it."""

    def __init__(self, value: Any, waited: list[int], call: int) -> None:
        self.value, self.waited, self.call = np.asarray(value), waited, call

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.waited.append(self.call)
        return self.value


class Programs:
    """The functions of a model that always says the same tokens, one after the other."""

    compile_total = 0

    def __init__(self, says: tuple[int, ...] = (1,)) -> None:
        tags: dict[str, dict[str, Any]] = {
            "decode": {"kind": "decode", "length": 32},
            "copy": {"kind": "copy", "length": 32},
        }
        for chunk in LIMITS.chunks:
            for kind in ("prefill", "score"):
                tags[f"{kind}{chunk}"] = {"kind": kind, "chunk": chunk, "length": 32}
        self.functions = {name: SimpleNamespace(tags=mine) for name, mine in tags.items()}
        self.calls: list[str] = []
        self.waited: list[int] = []
        self.rest = iter(says)

    def run(self, name: str, *inputs: Any) -> Any:
        self.calls.append(name)
        if name == "copy":
            return None
        if name == "decode":
            steps = int(inputs[0]["steps"])
            ids = [[next(self.rest), 0] for _ in range(steps)]
            return self._report(np.pad(ids, ((0, LIMITS.decode_steps - steps), (0, 0))))
        is_last = bool(inputs[0]["last"])
        return {"first": self._report([next(self.rest) if is_last else 0])}

    def _report(self, ids: Any) -> tuple[Computed, ...]:
        shape = np.shape(ids)
        values = (ids, np.zeros(shape), np.zeros((*shape, 1), int), np.zeros((*shape, 1)))
        return tuple(Computed(value, self.waited, len(self.calls)) for value in values)


def test_a_chunk_is_over_when_the_device_is_done_with_it() -> None:
    """Else a long prompt would be begun all at once, and a reader that leaves stops nothing."""
    programs = Programs()
    backend = ModelBackend(programs, LIMITS)
    first = backend.prefill(0, [3] * 8, 0)
    last = backend.prefill(0, [3] * 12, 8, sampling=Sampling())
    assert programs.waited == []
    assert first().first is None
    assert set(programs.waited) == {1}
    drawn = last().first
    assert drawn is not None and drawn.ids.tolist() == [1]
    assert set(programs.waited) == {1, 2}


@pytest.mark.parametrize(
    ("ends", "made", "calls"), [((), range(1, 8), 2), ({4}, range(1, 6), 1), ({1}, [1], 0)]
)
def test_generating_ends_with_a_call_that_has_an_end(ends: Any, made: Any, calls: int) -> None:
    programs = Programs(tuple(range(1, 9)))
    tokens, logprobs = generate(ModelBackend(programs, LIMITS), [5] * 10, 7, ends=frozenset(ends))
    assert tokens == list(made) and len(logprobs) == len(tokens)
    assert programs.calls == ["prefill8", "prefill4", *["decode"] * calls]

"""`spmd.serving.engine.model_backend.ModelBackend` over functions that compute nothing."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from spmd.models.decode.packing import pack_report, row_shapes, unpack_rows
from spmd.models.sampling import Report
from spmd.serving.engine.backend import Limits, Sampling, SlotPart
from spmd.serving.engine.model_backend import ModelBackend, generate

LIMITS = Limits(
    slots=6, max_length=32, rows=(4, 9), groups=2, page=4, pages=20, top_logprobs=1, vocab_size=9
)
LENGTHS = (8, 32)
SLOTS = 3
"""Of a group."""


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
    """Functions that note their inputs.

    The token that is drawn behind a row, and a target's log-probability, is the number of its
    group, slot and position.
    """

    compile_total = 0

    def __init__(self) -> None:
        tags: dict[str, dict[str, Any]] = {n: {"kind": n} for n in ("begin", "allow")}
        for kind in ("step", "score"):
            for rows in LIMITS.rows:
                for length in LENGTHS:
                    name = f"{kind}_r{rows}_t{length}"
                    tags[name] = {"kind": kind, "rows": rows, "length": length}
        self.functions = {name: SimpleNamespace(tags=mine) for name, mine in tags.items()}
        self.calls: list[str] = []
        self.inputs: list[Any] = []
        self.waited: list[int] = []

    def run(self, name: str, *inputs: Any) -> Any:
        self.calls.append(name)
        tags, given = self.functions[name].tags, inputs[0]
        if name not in ("begin", "allow"):
            table = tags["length"] // LIMITS.page
            given = unpack_rows(given["rows"], row_shapes(SLOTS, tags["rows"], table, tags["kind"]))
        self.inputs.append(given)
        if name in ("begin", "allow"):
            return {}
        groups = np.arange(LIMITS.groups)[:, None]
        said = number(groups, given["slots"], given["positions"])
        outputs = {"drawn": self._report(said[groups, given["draws"]])}
        if "targets" in given:
            outputs["scores"] = self._report(given["targets"], said)
        return outputs

    def _report(self, ids: Any, logprobs: Any = None) -> Computed:
        shape = np.shape(ids)
        logprobs = np.zeros(shape) if logprobs is None else np.asarray(logprobs, np.float32)
        report = Report(ids, logprobs, np.zeros((*shape, 1), np.int32), np.zeros((*shape, 1)))
        packed = pack_report(Report(*map(jnp.asarray, report)))
        return Computed(packed, self.waited, len(self.calls))


def number(group: Any, slot: Any, position: Any) -> Any:
    return position + 100 * (slot + SLOTS * group)


@st.composite
def steps(draw: st.DrawFn) -> list[SlotPart]:
    """Parts in any order; none of the groups has more rows than a step."""
    parts, left = [], [LIMITS.rows[-1]] * LIMITS.groups
    for slot in draw(st.lists(st.integers(0, LIMITS.slots - 1), min_size=1, unique=True)):
        group = slot // SLOTS
        later = SLOTS  # rows for the others, at most
        decodes = draw(st.booleans())
        count = 1 if decodes else draw(st.integers(1, max(1, left[group] - later)))
        left[group] -= count
        start = draw(st.integers(0, LIMITS.max_length - count))
        ids = st.integers(0, LIMITS.vocab_size - 1)
        several = st.lists(ids, min_size=count, max_size=count).map(tuple)
        least = -(-(start + count) // LIMITS.page)
        page = st.integers(0, LIMITS.pages - 1)
        pages = draw(st.lists(page, min_size=least, max_size=least + 1).map(tuple))
        pages = pages[: LIMITS.max_length // LIMITS.page]
        targets = None if decodes else draw(st.none() | several)
        tokens = None if decodes else draw(several)
        parts.append(SlotPart(slot, start, tokens, pages, draw(st.booleans()), targets))
    return parts


@hypothesis.given(st.lists(steps(), min_size=1, max_size=3))
def test_rows_are_those_of_the_parts(several: list[list[SlotPart]]) -> None:
    """Read back from what a function gets, by what `spmd.ops.paged_attention` says of it."""
    programs = Programs()
    backend = ModelBackend(programs, LIMITS)
    for parts in several:
        made = backend.step(parts)()
        given = programs.inputs[-1]
        name, sizes = programs.calls[-1], fitting(parts)
        scored = any(part.targets is not None for part in parts)
        assert name == f"{'score' if scored else 'step'}_r{sizes[0]}_t{sizes[1]}"
        by_slot = {part.slot: part for part in parts}
        for slot in range(LIMITS.slots):
            check_slot(given, *divmod(slot, SLOTS), by_slot.get(slot))
        for group in range(LIMITS.groups):
            check_padding(given, group)
        check_results(parts, made)


def fitting(parts: Sequence[SlotPart]) -> tuple[int, int]:
    """The smallest rows and length that hold a step."""
    rows = np.zeros(LIMITS.groups, int)
    for part in parts:
        rows[part.slot // SLOTS] += len(part.tokens or (0,))
    longest = max(part.start + len(part.tokens or (0,)) for part in parts)
    return (
        next(n for n in LIMITS.rows if n >= rows.max()),
        next(n for n in LENGTHS if n >= longest),
    )


def check_slot(given: Any, group: int, slot: int, part: SlotPart | None) -> None:
    begin, end = given["first"][group, slot : slot + 2]
    drawing = [row for row in given["draws"][group] if begin <= row < end]
    if part is None:
        assert begin == end and not drawing
        return
    count = len(part.tokens or (0,))
    assert end - begin == count
    assert set(given["slots"][group, begin:end]) == {slot}
    positions = range(part.start, part.start + count)
    assert given["positions"][group, begin:end].tolist() == [*positions]
    tokens = [-1] if part.tokens is None else [*part.tokens]
    assert given["tokens"][group, begin:end].tolist() == tokens
    needed = -(-(part.start + count) // LIMITS.page)
    assert given["table"][group, slot, :needed].tolist() == [*part.pages[:needed]]
    assert drawing == ([end - 1] if part.draws else [])
    if part.targets is not None:
        assert given["targets"][group, begin:end].tolist() == [*part.targets]


def check_padding(given: Any, group: int) -> None:
    end = given["first"][group, -1]
    assert given["first"][group, 0] == 0
    assert np.all(given["positions"][group, end:] == -1)
    draws = given["draws"][group]
    assert len(draws) == min(SLOTS, given["tokens"].shape[1])
    assert np.all(draws < end)


def check_results(parts: Sequence[SlotPart], made: Any) -> None:
    def said(part: SlotPart) -> list[int]:
        group, slot = divmod(part.slot, SLOTS)
        return number(group, slot, part.start + np.arange(len(part.tokens or (0,)))).tolist()

    assert made.drawn.ids.tolist() == [said(part)[-1] for part in parts if part.draws]
    assert [scores is None for scores in made.scores] == [part.targets is None for part in parts]
    for part, scores in zip(parts, made.scores, strict=True):
        if scores is not None:
            assert scores.ids.tolist() == [*(part.targets or ())]
            assert scores.logprobs.tolist() == said(part)


def test_a_step_is_over_when_the_device_is_done_with_it() -> None:
    """Also one that draws nothing; another may begin before."""
    programs = Programs()
    backend = ModelBackend(programs, LIMITS)
    first = backend.step([SlotPart(0, 0, (3,) * 4, (5,), False)])
    second = backend.step([SlotPart(0, 4, (3,), (5, 6), True)])
    assert programs.waited == []
    assert first().drawn.ids.shape == (0,)
    assert set(programs.waited) == {1}
    assert second().drawn.ids.tolist() == [4]


def test_tables_of_calls_under_way_stay_as_they_are() -> None:
    programs = Programs()
    backend = ModelBackend(programs, LIMITS)
    backend.step([SlotPart(1, 4, None, (5, 6), True)])
    backend.step([SlotPart(1, 8, None, (5, 6, 7), True)])
    backend.step([SlotPart(1, 0, (1,), (9,), True)])
    tables = [inputs["table"][0, 1].tolist() for inputs in programs.inputs]
    assert [table[:2] for table in tables] == [[5, 6], [5, 6], [9, 6]]
    assert tables[1][2] == 7


def test_beginning_counts_what_was_drawn() -> None:
    programs = Programs()
    penalties: Any = {"repetition_penalty": 1.5, "presence_penalty": 0.5}
    sampling = Sampling(0.5, seed=2**32 - 1, logit_bias=((8, 1.5), (0, -100)), **penalties)
    ModelBackend(programs, LIMITS).begin(4, sampling, [1, 2, 2], [5, 5, 7])
    (given,) = programs.inputs
    assert given["slot"] == 4
    assert np.flatnonzero(given["seen"]).tolist() == [1, 2, 5, 7]
    assert given["drawn"].tolist() == [0, 0, 0, 0, 0, 2, 0, 1, 0]
    assert given["bias"].tolist() == [-100, 0, 0, 0, 0, 0, 0, 0, 1.5]
    assert given["sampling"]["seed"] == 2**32 - 1 and given["sampling"]["temperature"] == 0.5


def test_masks_are_those_of_slots() -> None:
    programs = Programs()
    ModelBackend(programs, LIMITS).allow({4: np.array([0b101], np.uint32), 0: None})
    (given,) = programs.inputs
    assert given["changed"].tolist() == [[True, False, False], [False, True, False]]
    assert given["masks"][1, 1].tolist() == [0b101]
    assert given["masks"][0, 0].tolist() == [2**32 - 1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([SlotPart(0, 0, (), (0,), True)], "0 rows at position 0"),
        ([SlotPart(0, 30, (1, 2, 3), (0,) * 9, True)], "3 rows at position 30 do not fit into 32"),
        ([SlotPart(0, -1, None, (0,), True)], "1 rows at position -1"),
        ([SlotPart(0, 4, None, (0,), True)], "slot 0: 1 pages do not reach 5"),
        ([SlotPart(0, 4, None, (0, 20), True)], "slot 0: there are pages 0 to 19"),
        ([SlotPart(0, 0, None, (0,), True)] * 2, "two parts of one slot"),
        ([SlotPart(s, 0, (1,) * 5, (0, 0), True) for s in (0, 1)], "10 rows of a group: at most 9"),
    ],
)
def test_misuse_is_said(parts: list[SlotPart], message: str) -> None:
    programs = Programs()
    with pytest.raises(ValueError, match=message):
        ModelBackend(programs, LIMITS).step(parts)
    assert not programs.calls


def test_warming_up_calls_every_function_and_writes_nothing() -> None:
    programs = Programs()
    backend = ModelBackend(programs, LIMITS)
    backend.warm_up()
    assert not any(name.startswith("score") for name in programs.calls)
    backend.warm_up("score")
    assert sorted(programs.calls) == sorted(programs.functions)
    for given in programs.inputs[2:]:
        assert np.all(given["positions"] == -1) and np.all(given["draws"] == -1)


def test_what_scores_is_the_largest_step_until_that_is_compiled() -> None:
    programs = Programs()
    there = [name for name in programs.functions if not name.startswith("step_r9")]
    backend = ModelBackend(programs, LIMITS, names=there)
    for call in ("score_r9_t8", "step_r9_t8"):
        assert backend.step([SlotPart(0, 0, (1,) * 5, (0, 1), True)])().scores == (None,)
        assert programs.calls[-1] == call
        backend.add("step_r9_t8")


@pytest.mark.parametrize(("ends", "count"), [((), 7), ({14}, 4), ({11}, 1)])
def test_generating_ends_behind_an_end(ends: Any, count: int) -> None:
    """A prompt in pieces, then one call for each token; one of them may be under way."""
    programs = Programs()
    tokens, logprobs = generate(ModelBackend(programs, LIMITS), [5] * 12, 7, ends=frozenset(ends))
    assert tokens == [*range(11, 11 + count)] and len(logprobs) == len(tokens)
    prompt = ["begin", "step_r9_t32", "step_r4_t32"]
    assert programs.calls == [*prompt, *["step_r4_t32"] * min(6, count)]

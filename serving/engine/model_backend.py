"""A `Backend` over exported functions: picks each call's bucket, pads inputs, reads results."""

import collections
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from spmd.models.decode.packing import PLAIN, pack_rows, row_shapes, unpack_report
from spmd.models.sampling import ALL, FIELDS, words
from spmd.serving.engine.actions import GREEDY
from spmd.serving.engine.backend import Backend, Limits, Sampling, SlotPart, Stepped, Tokens, Words

NONE = -1
"""No position, no row; as a token the latest one of its slot."""


class Functions(Protocol):
    """Compiled functions with the weights and the state that they share; a bundle is one."""

    @property
    def functions(self) -> Mapping[str, Any]:
        """The functions by name, each with `tags`."""

    @property
    def compile_total(self) -> int:
        """How many programs have been compiled."""

    def run(self, name: str, *inputs: Any) -> Any:
        """Calls one function on weights, state and `inputs`; returns its outputs."""


class ModelBackend:
    """The `Backend` of a model whose functions are those of `spmd.models.decode.functions`.

    Args:
      seconds: rows of a group in a step -> what it is predicted to take, where that is known.
      names: of the functions that are there from the start; None is all. `add` adds others.
    """

    def __init__(
        self,
        programs: Functions,
        limits: Limits,
        info: Mapping[str, Any] | None = None,
        seconds: Mapping[int, float] = MappingProxyType({}),
        names: Collection[str] | None = None,
    ) -> None:
        self.limits = limits
        self.info = dict(info or {})
        self.seconds = seconds
        self._programs = programs
        # (Kind, rows, length) -> function, ascending.
        self._names: dict[tuple[str, int, int], str] = {}
        for name in programs.functions if names is None else names:
            self._enter(name)
        self._tables = _Tables(limits)
        self._nothing = {
            "seen": np.zeros(limits.vocab_size, np.bool_),
            "drawn": np.zeros(limits.vocab_size, np.int32),
            "bias": np.zeros(limits.vocab_size, np.float32),
        }
        for array in self._nothing.values():
            array.flags.writeable = False  # bundles keep such arrays on the devices

    @property
    def compile_total(self) -> int:
        """How many programs have been compiled."""
        return self._programs.compile_total

    @property
    def turns(self) -> Mapping[int, int]:
        """See `Backend.turns`."""
        longest, count = self.limits.max_length, self.limits.turns
        return {rows: count for kind, rows, n in self._names if (kind, n) == ("turns", longest)}

    @property
    def budget(self) -> int:
        """See `Backend.budget`."""
        limits = self.limits
        return budget(self.seconds, limits.slots // limits.groups) or limits.rows[-1]

    def begin(
        self, slot: int, sampling: Sampling, seen: Sequence[int], drawn: Sequence[int] = ()
    ) -> None:
        """See `Backend.begin`."""
        # What does not change how its tokens are drawn is on the devices already.
        vocabulary, large = self.limits.vocab_size, dict(self._nothing)
        if sampling.repetition_penalty != 1:
            large["seen"] = np.zeros(vocabulary, np.bool_)
            large["seen"][[*seen, *drawn]] = True
        if drawn and (sampling.frequency_penalty or sampling.presence_penalty):
            counts = np.bincount(np.array(drawn, np.int64), minlength=vocabulary)
            large["drawn"] = counts.astype(np.int32)
        if sampling.logit_bias:
            large["bias"] = np.zeros(vocabulary, np.float32)
            for token, added in sampling.logit_bias:
                large["bias"][token] = added
        fields = {n: np.asarray(getattr(sampling, n), d) for n, (d, _) in FIELDS.items()}
        if not sampling.temperature:
            fields["seed"] = np.asarray(0, np.uint32)
        inputs = {"slot": np.int32(slot), **large, "sampling": fields}
        self._programs.run(self._names["begin", 0, 0], inputs)

    def allow(self, masks: Mapping[int, Words | None]) -> None:
        """See `Backend.allow`."""
        limits = self.limits
        changed = np.zeros(limits.slots, np.bool_)
        rows = np.full((limits.slots, words(limits.vocab_size)), ALL, np.uint32)
        for slot, mask in masks.items():
            changed[slot] = True
            if mask is not None:
                rows[slot] = mask
        by_group = (limits.groups, limits.slots // limits.groups)
        inputs = {"changed": changed.reshape(by_group), "masks": rows.reshape(*by_group, -1)}
        self._programs.run(self._names["allow", 0, 0], inputs)

    def step(self, parts: Sequence[SlotPart], alternatives: bool = True) -> Callable[[], Stepped]:
        """See `Backend.step`."""
        limits, turns = self.limits, parts[0].turns
        if turns > 1:
            return self._turns(parts, turns)
        placed = _place(parts, limits)
        is_scored = any(part.targets is not None for part in parts)
        kinds = ("score",) if is_scored else (*self._plain("step", parts), "step", "score")
        kind, *size = tags = self._bucket(kinds, placed.fullest, placed.longest)
        inputs, drawing = self._inputs(kind, (size[0], size[1]), placed, alternatives)
        outputs = self._programs.run(self._names[tags], inputs)
        drawn = _copied(outputs["drawn"])
        scores = _copied(outputs["scores"]) if is_scored else None
        rows = size[0] * limits.groups

        def results() -> Stepped:
            # What was drawn is waited for even if nothing was: the step is over then.
            made = _taken(drawn(), drawing)
            drafts = tuple(part.drafts for part in parts)
            if scores is None:
                return Stepped(made, (None,) * len(parts), rows, drafts)
            of_rows, found = scores(), list[Tokens | None]()
            for part, group, begin, count in zip(
                parts, placed.group, placed.begin, placed.count, strict=True
            ):
                mine = group, slice(begin, begin + count)
                found.append(None if part.targets is None else _taken(of_rows, mine))
            return Stepped(made, tuple(found), rows, drafts)

        return results

    def _turns(self, parts: Sequence[SlotPart], turns: int) -> Callable[[], Stepped]:
        placed = _place([part._replace(turns=1) for part in parts], self.limits)
        longest = placed.longest + turns - 1
        for part in parts:
            _check_pages(part, part.start + turns, self.limits)
        kinds = (*self._plain("turns", parts), "turns")
        kind, *size = tags = self._bucket(kinds, placed.fullest, longest)
        inputs, (group, number) = self._inputs(kind, (size[0], size[1]), placed, False)
        drawn = _copied(self._programs.run(self._names[tags], inputs)["drawn"])

        def results() -> Stepped:
            found: list[Any] = [x[:, group, number] for x in drawn()]  # (turns, parts, ...)
            made = Tokens(*(np.concatenate(np.moveaxis(x, 1, 0)) for x in found))
            drafts = made.ids.reshape(len(parts), turns)[:, :-1].tolist()
            rows = tags[1] * self.limits.groups * turns
            return Stepped(made, (None,) * len(parts), rows, tuple(map(tuple, drafts)))

        return results

    def warm_up(self, kind: str = "step") -> None:
        """Calls functions once, so that no request pays for what a first call does.

        Args:
          kind: `step`: all that requests need which draw; `score`: what only those need that ask
            for the log-probabilities of their prompt, on any thread.
        """
        if kind == "step":
            self.begin(0, GREEDY, ())
            if ("allow", 0, 0) in self._names:
                self.allow({0: None})
        for name in [name for tags, name in self._names.items() if tags[0].endswith(kind)]:
            self._try_out(name)

    def add(self, name: str) -> None:
        """Takes a function that has been compiled meanwhile, and calls it once, on any thread."""
        self._try_out(name)
        self._enter(name)

    def _enter(self, name: str) -> None:
        """A new table instead of a changed one: another thread may read it."""
        self._names = dict(sorted({**self._names, self._tags(name): name}.items()))

    def _tags(self, name: str) -> tuple[str, int, int]:
        tags = self._programs.functions[name].tags
        return tags.get("kind", ""), tags.get("rows", 0), tags.get("length", 0)

    def _plain(self, kind: str, parts: Sequence[SlotPart]) -> tuple[str, ...]:
        """The kind that leaves adapters out, if there are some and no part has one."""
        adapted = not self.limits.adapters or any(part.adapter != NONE for part in parts)
        return () if adapted else (PLAIN + kind,)

    def _inputs(
        self, kind: str, size: tuple[int, int], placed: "_Placed", alternatives: bool
    ) -> tuple[dict[str, Any], Any]:
        """The inputs of a step, and where the tokens of the parts that draw will be."""
        limits, (rows, length) = self.limits, size
        fields = _row_inputs(placed, rows, limits)
        fields["table"] = self._tables.filled(placed.parts, length)
        drawing, fields["draws"] = _draws(placed, rows, limits)
        is_scored = kind == "score"
        if limits.adapters:
            fields["adapters"] = np.full(placed.per_slot.shape, NONE, np.int32)
            adapters = [part.adapter for part in placed.parts]
            fields["adapters"][placed.group, placed.slot] = adapters
        if is_scored:
            fields["targets"] = np.zeros((limits.groups, rows), np.int32)
            for i, part in enumerate(placed.parts):
                if part.targets is not None:
                    begin, end = placed.begin[i], placed.begin[i] + placed.count[i]
                    fields["targets"][placed.group[i], begin:end] = part.targets
        slots, table = limits.slots // limits.groups, length // limits.page
        packed = pack_rows(fields, row_shapes(slots, rows, table, kind, limits.adapters))
        inputs = {"rows": packed}
        if not kind.endswith("turns"):
            inputs["alternatives"] = np.bool_(alternatives and limits.top_logprobs > 0)
        return inputs, drawing

    def _try_out(self, name: str) -> None:
        """Calls a step on padding, which changes nothing."""
        kind, *size = self._tags(name)
        if kind.removeprefix(PLAIN) not in ("step", "score", "turns"):
            return
        inputs, _ = self._inputs(kind, (size[0], size[1]), _place((), self.limits), False)
        _copied(self._programs.run(name, inputs)["drawn"])()

    def _bucket(self, kinds: Sequence[str], rows: int, length: int) -> tuple[str, int, int]:
        """The smallest function that is there of some kinds; of those as large the first kind's.

        While the largest step is still to be compiled, the function that scores takes its place.
        """
        there = [tags for kind in kinds for tags in self._names if tags[0] == kind]
        fitting = [tags for tags in there if tags[1] >= rows and tags[2] >= length]
        if fitting:
            return min(fitting, key=lambda tags: tags[1:])
        _, most_rows, most = (max(sizes) for sizes in zip(*there, strict=True))
        if rows > most_rows:
            raise ValueError(f"{rows} rows of a group: at most {most_rows}")
        raise ValueError(f"{length} positions of a slot: at most {most}")


SLOWER = 3
"""So many times as long a step may take for which decoding slots wait."""

SHORT = 0.025
"""Seconds of a step that is short for whoever reads, however quick steps are without prompts."""


def budget(seconds: Mapping[int, float], slots: int) -> int:
    """The most rows of a step that is short, or at most thrice as long as one that only decodes.

    Reading the weights takes as long for few rows as for some hundreds; behind that each row costs,
    and a step of many costs them the least: prompts are through sooner, and pauses are short still.

    Args:
      seconds: rows of a group in a step -> what it is predicted to take.
      slots: of a group, which all decode.

    Returns:
      Rows of a group, 0 where nothing is predicted. There is room for a piece of a prompt beside
      all slots, however long that takes, if any step has it.

    Example:
      >>> budget({16: 0.010, 64: 0.011, 256: 0.020, 1024: 0.060}, slots=64)
      256
    """
    most = max(seconds, default=0)
    decoding = min((rows for rows in seconds if rows >= slots), default=most)
    longest = max(SHORT, SLOWER * seconds.get(decoding, 0))
    quick = max((rows for rows in seconds if seconds[rows] <= longest), default=0)
    beside = min((rows for rows in seconds if rows > slots), default=most)
    return max(quick, beside)


class _Placed(NamedTuple):
    """Where the rows of parts go."""

    parts: Sequence[SlotPart]  # as they were given
    # group, slot: of each part; the slot within its group
    group: Any
    slot: Any
    begin: Any  # the row of its group with which each part begins
    count: Any  # how many rows each part has
    ends: Any  # how many positions each part's slot has with them
    per_slot: Any  # (A, B) rows of each slot

    @property
    def fullest(self) -> int:
        """Rows of the group that has the most."""
        return int(self.per_slot.sum(axis=1).max())

    @property
    def longest(self) -> int:
        """Positions of the slot that has the most."""
        return int(self.ends.max())


def _place(parts: Sequence[SlotPart], limits: Limits) -> _Placed:
    """Puts the rows of each group's slots one behind the other, in the order of slots."""
    slots = limits.slots // limits.groups
    count = np.array([part.rows for part in parts], np.int32)
    ends = np.array([p.start for p in parts], np.int32) + count
    of_all = np.array([p.slot for p in parts], np.int32)
    if len(set(of_all.tolist())) != len(parts):
        raise ValueError(f"a step has two parts of one slot: {of_all.tolist()}")
    for part, end, rows in zip(parts, ends.tolist(), count.tolist(), strict=True):
        if rows < 1 or not rows <= end <= limits.max_length:
            raise ValueError(
                f"slot {part.slot}: {rows} rows at position {part.start} do not fit into "
                f"{limits.max_length}"
            )
        _check_pages(part, end, limits)
    per_slot = np.zeros((limits.groups, slots), np.int32)
    per_slot.reshape(-1)[of_all] = count
    before = np.cumsum(per_slot, axis=1) - per_slot
    return _Placed(
        parts, of_all // slots, of_all % slots, before.reshape(-1)[of_all], count, ends, per_slot
    )


def _check_pages(part: SlotPart, end: int, limits: Limits) -> None:
    if not end <= min(limits.max_length, len(part.pages) * limits.page):
        raise ValueError(f"slot {part.slot}: {len(part.pages)} pages do not reach {end}")


def _row_inputs(placed: _Placed, rows: int, limits: Limits) -> dict[str, Any]:
    """`tokens`, `slots`, `positions` (A, R) and `first` (A, B + 1)."""
    shape = (limits.groups, rows)
    tokens, slots = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    positions = np.full(shape, NONE, np.int32)
    group, slot, begin, count, end = (
        np.repeat(x, placed.count)
        for x in (placed.group, placed.slot, placed.begin, placed.count, placed.ends)
    )
    # 0, 1, ... within each part.
    within = np.arange(len(group)) - np.repeat(np.cumsum(placed.count) - placed.count, placed.count)
    row = begin + within
    slots[group, row] = slot
    positions[group, row] = end - count + within
    ids = [(NONE, *p.drafts) if p.tokens is None else p.tokens for p in placed.parts]
    tokens[group, row] = np.fromiter(itertools.chain.from_iterable(ids), np.int32, len(row))
    first = np.zeros((limits.groups, placed.per_slot.shape[1] + 1), np.int32)
    np.cumsum(placed.per_slot, axis=1, out=first[:, 1:])
    return {"tokens": tokens, "slots": slots, "positions": positions, "first": first}


def _draws(placed: _Placed, rows: int, limits: Limits) -> tuple[Any, Any]:
    """(group and number of each token that is drawn, the rows (A, D) behind which they are)."""
    most = min(rows, placed.per_slot.shape[1])
    tokens = np.array([part.drawn for part in placed.parts], np.int64)
    group = np.repeat(placed.group, tokens)
    # Of each part the last rows, up to its end.
    back = np.repeat(np.cumsum(tokens), tokens) - np.arange(len(group))
    last = np.repeat(placed.begin + placed.count, tokens) - back
    draws = np.full((limits.groups, most), NONE, np.int32)
    # The n-th of its group: parts are counted along, group by group.
    is_of = group[:, None] == np.arange(limits.groups)
    number = np.cumsum(is_of, axis=0)[np.arange(len(group)), group] - 1
    draws[group, number] = last
    return (group, number), draws


class _Tables:
    """The pages of each slot, kept from call to call: a slot that decodes has mostly the same."""

    def __init__(self, limits: Limits) -> None:
        self._page, self._end = limits.page, limits.pages
        slots = limits.slots // limits.groups
        self._table = np.zeros((limits.groups, slots, limits.max_length // limits.page), np.int32)
        self._pages: list[tuple[int, ...]] = [()] * limits.slots

    def filled(self, parts: Sequence[SlotPart], length: int) -> Any:
        """(A, B, M) for some positions. Rows of slots without a part hold anything."""
        by_slot = self._table.reshape(-1, self._table.shape[2])
        for part in parts:
            pages = part.pages
            # Tuples of the same objects are equal at once.
            if pages is not self._pages[part.slot] and pages != self._pages[part.slot]:
                if not 0 <= min(pages) <= max(pages) < self._end:
                    raise ValueError(f"slot {part.slot}: there are pages 0 to {self._end - 1}")
                by_slot[part.slot, : len(pages)] = pages
                self._pages[part.slot] = pages
        return self._table[:, :, : length // self._page]


def _taken(tokens: Tokens, index: Any) -> Tokens:
    arrays: Any = (x[index] for x in tokens)
    return Tokens(*arrays)


def _copied(report: Any) -> Callable[[], Tokens]:
    """Starts to copy a report to the host; returns a function that waits for it."""
    report.copy_to_host_async()
    return lambda: Tokens(*unpack_report(np.asarray(report)))


def generate(
    backend: Backend,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling | None = None,
    ends: frozenset[int] = frozenset(),
) -> tuple[list[int], list[float]]:
    """Draws the tokens after one prompt, in slot 0 and its group's first pages.

    Args:
      backend: the model; nobody else may use it meanwhile.
      prompt: token ids, at least one.
      count: how many tokens to draw.
      sampling: how to draw them; None takes the likeliest.
      ends: ids after which drawing stops.

    Returns:
      (tokens, their log-probabilities).
    """
    limits = backend.limits
    end = len(prompt) + count - 1  # the last token that is drawn is not run
    pages = tuple(range(-(-end // limits.page)))
    backend.begin(0, sampling or GREEDY, prompt)
    under_way = collections.deque[Callable[[], Stepped]]()
    for start in range(0, len(prompt), limits.rows[-1]):
        chunk = tuple(prompt[start : start + limits.rows[-1]])
        is_last = start + len(chunk) == len(prompt)
        call = backend.step([SlotPart(0, start, chunk, pages, is_last)], alternatives=False)
        if is_last:
            under_way.append(call)
    tokens: list[int] = []
    logprobs: list[float] = []
    position = len(prompt)
    while under_way and (not tokens or tokens[-1] not in ends):
        if position < end:  # begun before its token is known
            part = SlotPart(0, position, None, pages, draws=True)
            under_way.append(backend.step([part], alternatives=False))
            position += 1
        drawn = under_way.popleft()().drawn
        tokens.append(int(drawn.ids[0]))
        logprobs.append(float(drawn.logprobs[0]))
    return tokens, logprobs

"""Training samples that depend on (seed, number) alone.

There is no state, such as a position in a file or a random generator. A run that resumes at step
1000, or on another number of hosts, sees the same batches as one that never stopped.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
import numpy.typing as npt

from spmd.models.training.data.corpus import Bools, CorpusPart, joined
from spmd.models.training.errors import DataError
from spmd.models.training.paths import at_once

# Mixes several sources: which one a sample comes from, in constant time and evenly spread.
#
# With shares 3 and 1, a cycle of the mixture is a a b a (and so on), so every beginning of the
# stream has nearly the wanted shares.

Int64s = npt.NDArray[np.int64]

CYCLE = 1024
"""After so many samples the pattern repeats. Shares are rounded to whole samples of a cycle."""


class MixtureShares(grain.transforms.DatasetSelectionMap):  # type: ignore[misc]
    """Number of a sample in the mixture -> (part, number of the sample in that part).

    grain's own mixing searches for the number, and takes milliseconds for one sample.

    Args:
        shares: of each part, positive, in any unit.
    """

    def __init__(self, shares: Sequence[float], length: int) -> None:
        self._length = length
        wanted = np.array(shares) / sum(shares) * CYCLE
        # A part's samples are spread evenly over the cycle, and every part has at least one.
        self._counts = np.maximum(1, np.rint(wanted)).astype(np.int64)
        parts = np.repeat(np.arange(len(self._counts)), self._counts)
        ranks = np.concatenate([np.arange(count) for count in self._counts])
        # The i-th of n wants to be at (i + 0.5) / n of the cycle; ties go to the first part.
        order = np.argsort((ranks + 0.5) / self._counts[parts], kind="stable")
        self._parts, self._ranks = parts[order], ranks[order]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[int, int]:
        turn, place = divmod(int(number), len(self._parts))
        part = int(self._parts[place])
        return part, turn * int(self._counts[part]) + int(self._ranks[place])


Batch = dict[str, npt.NDArray[Any]]

DTYPES = {
    "inputs": np.int32,
    "targets": np.int32,
    "segment_ids": np.int32,
    "positions": np.int32,
    "weights": np.float32,
    "answers": np.float32,
    "reference_chosen": np.float32,
    "reference_rejected": np.float32,
}
"""The leaves of a batch (B, S), the last two (B,); `PackedTokens.leaves` says which it has."""


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """The samples of a part of a corpus, in order: `seq_len` tokens each, and the one after them.

    Documents are packed: put one after the other, then cut into windows, wherever they end. With
    `seq_len` 4:

        tokens      a a a . b b . c c c c .         "." ends a document
        sample 0    inputs a a a .   targets a a . b
        sample 1    inputs b b . c   targets b . c c

    A window's last target is the next window's first input. Tokens at the end that do not fill a
    window are never seen.

    With `documents` they stay whole: a window has as many as it has room for, and zeros, which do
    not count, behind them. What is longer than a window loses its end. Preferences have a window
    for each pair, and where it has no room for both, each gets half of it.

        sample 0    inputs a a a .   targets a a . 0
        sample 1    inputs b b . 0   targets b . 0 0
    """

    part: CorpusPart
    seq_len: int
    leaves: Sequence[str]
    mask_boundaries: bool
    documents: bool = False
    # of preferences: log-probabilities under the reference (W, 2), what was chosen and rejected
    reference: npt.NDArray[np.float32] | None = None

    @functools.cached_property
    def cuts(self) -> Int64s:
        """The pieces of each window with whole documents (W, P, 2): where each begins and ends."""
        begins, room = self.part.documents(), self.seq_len + 1
        if self.part.corpus.row_documents == 2:
            lengths = np.diff(begins).reshape(-1, 2)
            fits = lengths.sum(axis=1, keepdims=True) <= room
            lengths = np.where(fits, lengths, np.minimum(lengths, room // 2))
            starts = begins[:-1].reshape(-1, 2)
            return np.stack([starts, starts + lengths], axis=2)
        cuts, place = [], 0
        while place < len(begins) - 1:
            limit = begins[place] + room
            stop = max(place + 1, int(np.searchsorted(begins, limit, "right")) - 1)
            cuts.append([(begins[place], min(begins[stop], limit))])
            place = stop
        return np.array(cuts, np.int64).reshape(-1, 1, 2)

    def __len__(self) -> int:
        return len(self.cuts) if self.documents else max(0, len(self.part) - 1) // self.seq_len

    def __getitem__(self, number: Any) -> Batch:
        number, room = int(number), self.seq_len + 1
        start = number * self.seq_len
        pieces = self.cuts[number] if self.documents else [(start, start + room)]
        windows = [self.part.read(int(low), int(high)) for low, high in pieces]
        if empty := room - sum(len(tokens) for tokens, _, _ in windows):
            windows.append(
                (np.zeros(empty, np.int32), np.arange(empty) == 0, np.zeros(empty, bool))
            )
        tokens, is_first, learned = joined(windows)
        sample = {"inputs": tokens[:-1], "targets": tokens[1:]}
        if len(self.leaves) > len(sample):
            sample |= describe_documents(is_first, self.mask_boundaries, learned)
            sample["answers"] = sample["weights"]
            reference = (0.0, 0.0) if self.reference is None else self.reference[number]
            for name, value in zip(("chosen", "rejected"), reference, strict=True):
                sample[f"reference_{name}"] = np.asarray(value, np.float32)
        return {name: sample[name] for name in self.leaves}


def describe_documents(is_first: Bools, mask_boundaries: bool, learned: Bools) -> Batch:
    """`segment_ids`, `positions` and `weights` (S,) of a sample with S inputs.

    Args:
        is_first: for each of the S + 1 tokens whether it is the first of its document.
        mask_boundaries: whether a target that begins another document has weight 0: it cannot be
            predicted from the document before it.
        learned: for each of the tokens whether it is learned; the others have weight 0, too.

    Example:
        >>> made = describe_documents(np.array([0, 0, 1, 0], bool), True, np.ones(4, bool))
        >>> made["segment_ids"].tolist(), made["positions"].tolist(), made["weights"].tolist()
        ([1, 1, 2], [0, 1, 0], [1.0, 0.0, 1.0])
    """
    begins = is_first[:-1].copy()
    begins[0] = True  # attention cannot look beyond the sample, so its first token begins one
    place = np.arange(len(begins))
    weights = learned[1:] & ~is_first[1:] if mask_boundaries else learned[1:]
    return {
        "segment_ids": np.cumsum(begins, dtype=np.int32),
        "positions": (place - np.maximum.accumulate(np.where(begins, place, 0))).astype(np.int32),
        "weights": weights.astype(np.float32),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class PackedTokens:
    """Batches of packed documents.

    Row `b` of step `s` is sample number `first(s) + b`. Sample numbers go through the windows
    of each part in a pseudo-random order, a new one in each epoch. Nothing is dropped at an epoch's
    end: a batch may hold the last samples of one epoch and the first of the next. Several parts are
    mixed by `shares`, and each has its own epochs.

    Raises:
        DataError: a part is too short for one sample, a size or share is not positive, or the
            seed is negative.

    Example:
        >>> from spmd.models.training.data import corpus, tokenizer
        >>> text = corpus.from_documents([tokenizer.encode("to be or not to be")], 256)
        >>> batch = PackedTokens([corpus.whole(text)], seq_len=4, batch_size=2)(7)
        >>> batch["inputs"].shape, batch["targets"].shape
        ((2, 4), (2, 4))
    """

    parts: Sequence[CorpusPart]  # where the tokens come from
    seq_len: int  # inputs of a sample
    batch_size: int  # samples of a batch
    seed: int = 0  # decides the order
    # the share of each part in the samples, in any unit; None is equal shares
    shares: Sequence[float] | None = None
    boundaries: bool = False  # whether batches say which document a token belongs to
    before: int = 0  # samples seen before, less those of as many steps with this `batch_size`
    documents: bool = False  # whether documents are never cut, and are kept apart (`Windows`)
    # of preferences: as `Windows.reference`, of one part after the other; None: zeros
    references: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.batch_size < 1:
            raise DataError(f"{self.batch_size} samples of {self.seq_len} tokens are no batch")
        if self.seed < 0:
            raise DataError(f"the seed must not be negative, and is {self.seed}")
        shares = [1.0] * len(self.parts) if self.shares is None else list(self.shares)
        if len(shares) != len(self.parts) or not all(0 < share < np.inf for share in shares):
            raise DataError(f"{len(self.parts)} parts cannot be mixed by {shares}")
        if len({part.corpus.row_documents for part in self.parts}) > 1:
            raise DataError(
                "preferences and other data cannot be mixed: train on one after the other"
            )
        if self.is_preferences and not self.documents:
            raise DataError("preferences are packed as pairs alone: leave out --packing")
        if self.references is not None and len(self.references) != self.count:
            raise DataError(
                f"{self.parts[0].corpus.name}: these are other pairs than those whose "
                "log-probabilities the run has computed before its first step; begin a new run"
            )
        for part in self.parts:
            if self.documents and not len(part):
                raise DataError(f"{part.corpus.name}: there is no document in this part of it")
            if not self.documents and len(part) <= self.seq_len:
                raise DataError(
                    f"{part.corpus.name}: {len(part)} tokens are too few: samples of "
                    f"{self.seq_len} tokens, each with a successor, need at least "
                    f"{self.seq_len + 1}"
                )

    @property
    def is_preferences(self) -> bool:
        """Whether samples are pairs of what was chosen and what was rejected."""
        return self.parts[0].corpus.row_documents == 2

    @property
    def leaves(self) -> tuple[str, ...]:
        """The names of a batch's leaves."""
        names = list(DTYPES)
        if self.is_preferences:  # which all count the same, so their batches have no `weights`
            return tuple(name for name in names if name != "weights")
        if self.boundaries or self.documents:
            return tuple(names[:5])
        is_weighted = any(part.corpus.is_answers for part in self.parts)
        return ("inputs", "targets", *(("weights",) if is_weighted else ()))

    @functools.cached_property
    def windows(self) -> list[Windows]:
        """The samples of each part, in order."""
        how = self.seq_len, self.leaves, self.documents or self.boundaries, self.documents
        made = [Windows(part, *how) for part in self.parts]
        if self.references is None:
            return made
        each = np.split(self.references, np.cumsum([len(windows) for windows in made])[:-1])
        pairs = zip(made, each, strict=True)
        return [dataclasses.replace(windows, reference=array) for windows, array in pairs]

    @property
    def count(self) -> int:
        """How many samples all parts have together."""
        return sum(len(part_windows) for part_windows in self.windows)

    def in_order(self) -> Iterator[Batch]:
        """All samples once, of one part after the other; the last batch is filled up with some."""
        samples = (windows[number] for windows in self.windows for number in range(len(windows)))
        while batch := list(itertools.islice(samples, self.batch_size)):
            yield self.stacked([*batch, *itertools.repeat(batch[0], self.batch_size - len(batch))])

    @property
    def notes(self) -> list[str]:
        """What people should know of the data, a sentence each."""
        notes = [note for part in self.parts for note in part.corpus.notes]
        for part in self.parts if self.documents else ():
            rows = part.documents()[:: part.corpus.row_documents]
            long = int((np.diff(rows) > self.seq_len + 1).sum())
            what = "pairs" if self.is_preferences else "documents"
            if long:
                notes.append(
                    f"{part.corpus.name}: {long:,} of {len(rows) - 1:,} {what} are longer than "
                    f"{self.seq_len + 1} tokens, and lose their ends"
                )
        return notes

    @functools.cached_property
    def samples(self) -> grain.MapDataset[Batch]:
        """Sample number -> sample, without an end."""
        # A seed for each part: with one for all, parts of equal size would be in the same order.
        seeds = np.random.SeedSequence(self.seed).generate_state(len(self.parts))
        orders = [
            grain.MapDataset.source(windows).shuffle(seed=int(seed)).repeat()
            for windows, seed in zip(self.windows, seeds, strict=True)
        ]
        if len(orders) == 1:
            return orders[0]
        shares = MixtureShares(self.shares or [1.0] * len(orders), sys.maxsize)
        return grain.MapDataset.select_from_datasets(orders, shares)

    def first(self, step: int) -> int:
        """The number of a step's first sample: so many are seen before the step."""
        return self.before + step * self.batch_size

    def going_on(self, step: int, seen: int) -> "PackedTokens":
        """The same after so many steps that have seen so many samples, in batches of any size."""
        return dataclasses.replace(self, before=seen - step * self.batch_size)

    def __call__(self, step: int) -> Batch:
        """The whole batch of a step."""
        start = self.first(step)
        return self.rows(range(start, start + self.batch_size))

    def rows(self, numbers: Iterable[int]) -> Batch:
        """The samples with these numbers, stacked."""
        chosen = [int(number) for number in numbers]
        if any(part.corpus.is_remote for part in self.parts):
            samples = at_once(self.samples.__getitem__, chosen)
        else:
            samples = [self.samples[number] for number in chosen]
        return self.stacked(samples)

    def stacked(self, samples: Sequence[Batch]) -> Batch:
        """A batch of samples."""
        return {name: np.stack([sample[name] for sample in samples]) for name in self.leaves}

    def struct(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a batch."""
        shape = (self.batch_size, self.seq_len)
        return {
            name: jax.ShapeDtypeStruct(shape[: 1 if "reference" in name else 2], DTYPES[name])  # type: ignore[no-untyped-call]
            for name in self.leaves
        }

    @property
    def token_count(self) -> int:
        """Tokens of all parts together."""
        return sum(len(part) for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """A hash; datasets that share it give the same samples for the same seed and numbers."""
        about = {
            "parts": [part.fingerprint for part in self.parts],
            "shares": list(self.shares or ()),
            "packing": [self.seq_len, self.boundaries, True, *["documents"] * self.documents],
        }
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]

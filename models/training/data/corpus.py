"""A corpus: the tokens of many documents as one long stream, in memory or memory-mapped."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spmd.models.training.errors import DataError
from spmd.models.training.paths import StorePath

# Tokens that stay on an object store: each window is read by a request of its own.


class RangedTokens:
    """The tokens of a file on a store (N,), of which slices can be read, like those of an array.

    Windows are read in a random order and once in an epoch, so nothing is kept.

    Args:
        path: the file; it holds tokens and nothing else.
    """

    def __init__(self, path: StorePath, dtype: np.dtype[Any], count: int) -> None:
        self.path, self.dtype, self._count = path, dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, window: slice) -> npt.NDArray[Any]:
        start, stop, _ = window.indices(self._count)
        size = self.dtype.itemsize
        return np.frombuffer(self.path.read_bytes(start * size, stop * size), self.dtype)


HELD_OUT_EVERY = 20
HELD_OUT_CHUNK = 64 * 2**10

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Window = tuple[npt.NDArray[np.int32], Bools, Bools]
"""Tokens (N,), for each whether it is the first of its document (N,), and whether it is learned:
counts where it is to be predicted (N,)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """Some whole documents, one after the other."""

    # the documents' tokens (N,), unsigned, or what has slices like them
    tokens: npt.NDArray[Any] | RangedTokens
    index: Int64s  # where each document begins, then where the last one ends (D + 1,)
    # for each token whether it is learned (N,), 0 or 1, as `tokens`; None: all are
    learned: npt.NDArray[Any] | RangedTokens | None = None

    def read(self, start: int, stop: int) -> Window:
        """The tokens from `start` to before `stop`."""
        is_first = np.zeros(stop - start, np.bool_)
        low, high = np.searchsorted(self.index, np.asarray([start, stop], self.index.dtype))
        is_first[self.index[low:high] - start] = True
        learned = np.ones(stop - start, np.bool_)
        if self.learned is not None:
            learned = self.learned[start:stop].astype(np.bool_)
        return self.tokens[start:stop].astype(np.int32), is_first, learned


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of many documents."""

    shards: tuple[Shard, ...]  # the tokens, in order
    vocab_size: int  # number of token ids
    name: str  # what error messages call it
    fingerprint: str  # a hash; corpora with the same tokens have the same
    # whether each read waits for the network, so that many at once are quicker
    is_remote: bool = False
    notes: tuple[str, ...] = ()  # what people should know of it, a sentence each
    # how many documents belong together, one after the other: 2 of preferences (what was chosen,
    # what was rejected), else 1
    row_documents: int = 1

    @property
    def is_answers(self) -> bool:
        """Whether there are tokens that are not learned, such as those of prompts."""
        return any(shard.learned is not None for shard in self.shards)

    @functools.cached_property
    def ends(self) -> Int64s:
        """Where each shard ends in the stream."""
        return np.cumsum([len(shard.tokens) for shard in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> Window:
        """The tokens of the stream from `start` to before `stop`."""
        spans = _spans(self.ends, start, stop)
        return joined([self.shards[number].read(low, high) for number, low, high in spans])

    def next_rows(self, places: Int64s) -> Int64s:
        """For each place in the stream, where the next row's documents begin: there or later.

        Args:
            places: in ascending order.
        """
        found = []
        cuts = np.searchsorted(places, self.ends)
        bases = self.ends - [len(shard.tokens) for shard in self.shards]
        for shard, base, here in zip(self.shards, bases, np.split(places, cuts[:-1]), strict=True):
            index = shard.index[:: self.row_documents]
            found.append(base + index[np.searchsorted(index, here - base)])
        return np.concatenate(found)

    @functools.cached_property
    def begins(self) -> Int64s:
        """Where each document begins (D,)."""
        bases = self.ends - [len(shard.tokens) for shard in self.shards]
        return np.concatenate([b + s.index[:-1] for b, s in zip(bases, self.shards, strict=True)])


@dataclasses.dataclass(frozen=True, eq=False)
class CorpusPart:
    """Some ranges of a corpus, one after the other, such as its held-out part.

    A range that begins inside a document counts as the beginning of a document.
    """

    corpus: Corpus  # the whole corpus
    ranges: Int64s  # (start, stop) of each range (R, 2)

    @functools.cached_property
    def ends(self) -> Int64s:
        """Where each range ends in the part."""
        return np.cumsum(self.ranges[:, 1] - self.ranges[:, 0], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ranges) else 0

    def read(self, start: int, stop: int) -> Window:
        """The tokens of the part from `start` to before `stop`."""
        windows = []
        for number, low, high in _spans(self.ends, start, stop):
            first = int(self.ranges[number, 0])
            window = self.corpus.read(first + low, first + high)
            window[1][0] |= low == 0
            windows.append(window)
        return joined(windows)

    def documents(self) -> Int64s:
        """Where each document of the part begins, then where the last one ends (D + 1,)."""
        found = []
        for (start, stop), end in zip(self.ranges, self.ends, strict=True):
            low, high = np.searchsorted(self.corpus.begins, (start, stop))
            found.append(np.union1d([start], self.corpus.begins[low:high]) + end - stop)
        return np.concatenate([*found, [len(self)]]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """A hash; parts with the same tokens have the same."""
        return hashlib.sha256(
            self.corpus.fingerprint.encode() + np.ascontiguousarray(self.ranges, "<i8").tobytes()
        ).hexdigest()


def _spans(ends: Int64s, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The pieces that hold places of a stream: (number, where in the piece from, until where)."""
    for number in range(int(np.searchsorted(ends, start, "right")), len(ends)):
        base = int(ends[number - 1]) if number else 0
        if base >= stop:
            return
        yield number, max(start - base, 0), min(stop, int(ends[number])) - base


def joined(windows: list[Window]) -> Window:
    """One window of several."""
    if len(windows) == 1:
        return windows[0]
    tokens, is_first, learned = (np.concatenate(arrays) for arrays in zip(*windows, strict=True))
    return tokens, is_first, learned


def from_documents(
    documents: Iterable[npt.NDArray[Any]],
    vocab_size: int,
    name: str = "documents",
    learned: Sequence[Bools | None] = (),
    row_documents: int = 1,
) -> Corpus:
    """Makes a corpus in memory.

    Args:
        documents: the tokens of each document, with the token that ends it; none may be empty.
        name: what error messages call it.
        learned: for each document, which tokens are learned; None is all of them.
        row_documents: as in `Corpus`.

    Raises:
        DataError: there is no document.
    """
    documents = list(documents)
    if not documents:
        raise DataError(f"{name}: there is no document")
    tokens = np.concatenate(documents)
    index = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
    digest = hashlib.sha256(tokens.astype("<u4").tobytes() + index.astype("<i8").tobytes())
    marks = None
    if any(one is not None for one in learned):
        pairs = zip(documents, learned, strict=True)
        marks = np.concatenate([np.ones(len(d), bool) if x is None else x for d, x in pairs])
        digest.update(marks.tobytes())
    shard = Shard(tokens, index, marks)
    return Corpus((shard,), vocab_size, name, digest.hexdigest(), row_documents=row_documents)


def whole(corpus: Corpus) -> CorpusPart:
    """The part that is all of a corpus."""
    return CorpusPart(corpus, np.array([[0, len(corpus)]], np.int64))


def split_held_out(corpus: Corpus, every: int = HELD_OUT_EVERY) -> tuple[CorpusPart, CorpusPart]:
    """Splits a corpus into a training part and a held-out part.

    It is cut into chunks of about 64 Ki tokens, and every 20th of them is held out. They come from
    all over the corpus, as its end alone may be of another kind. Chunks begin and end between
    documents, except inside a text that is longer than a chunk; chats and preferences stay whole.

    The split depends on the corpus alone, not on a seed: a resumed run never trains on text that
    it evaluated on before.

    Args:
        every: one chunk of so many is held out.

    Returns:
        (training part, held-out part).
    """
    total = len(corpus)
    chunk = max(1, min(HELD_OUT_CHUNK, total // every))
    places = np.arange(0, total, chunk, dtype=np.int64)
    begins = corpus.next_rows(places)
    is_whole = corpus.is_answers or corpus.row_documents > 1
    borders = np.append(np.where(is_whole | (begins < places + chunk), begins, places), total)
    held_out = np.arange(every - 1, len(places), every)
    starts, stops = borders[held_out], borders[held_out + 1]
    rest = np.stack([np.append(0, stops), np.append(starts, total)], axis=1)
    return (
        CorpusPart(corpus, rest[rest[:, 0] < rest[:, 1]]),
        CorpusPart(corpus, np.stack([starts, stops], axis=1)[starts < stops]),
    )

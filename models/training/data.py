"""Text as bytes, and training samples that are a function of (seed, step) alone.

Nothing here has state: a run that resumes at step 1000, or on another number of hosts, sees the
same batches as one that never stopped.
"""

from __future__ import annotations

import dataclasses
import glob
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint8]
Batch = dict[str, npt.NDArray[np.int32]]

BYTE_VOCABULARY = 256
DOCUMENT_END = 0
"""Token between documents: a byte that no text contains."""

DEFAULT_CORPUS_BYTES = 8 * 2**20
HELD_OUT_EVERY = 20
HELD_OUT_CHUNK = 64 * 2**10


class DataError(ValueError):
    """A corpus that cannot be read, or is too small."""


def encode(text: str) -> Tokens:
    """Text -> its UTF-8 bytes, one token each."""
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def decode(tokens: Iterable[int]) -> str:
    """Tokens -> text; bytes that are not valid UTF-8 become the replacement character."""
    return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


# Corpora


def standard_library_files() -> list[Path]:
    """The `.py` sources of Python's standard library, sorted; without tests and site-packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(
        path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)
    )


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files, all files below directories, and what glob patterns match; sorted, each one once.

    Raises:
        DataError: a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
        below = (
            path for match in matches for path in (match.rglob("*") if match.is_dir() else [match])
        )
        files = {path for path in below if path.is_file()}
        if not files:
            raise DataError(f"no file matches {pattern!r}")
        found |= files
    return sorted(found)


def load_corpus(files: Sequence[Path], max_bytes: int = DEFAULT_CORPUS_BYTES) -> Tokens:
    """The files' bytes, in order, each followed by `DOCUMENT_END`.

    Files that are not text (they contain a zero byte) are skipped; reading stops at `max_bytes`.

    Raises:
        DataError: nothing was left.
    """
    documents: list[bytes] = []
    left = max_bytes
    for path in files:
        document = path.read_bytes()[:left]
        if not document or DOCUMENT_END in document:
            continue
        documents += [document, bytes([DOCUMENT_END])]
        left -= len(document)
        if left <= 0:
            break
    if not documents:
        raise DataError(f"none of {len(files)} files contains text")
    return np.frombuffer(b"".join(documents), dtype=np.uint8)


def split_held_out(tokens: Tokens, every: int = HELD_OUT_EVERY) -> tuple[Tokens, Tokens]:
    """(training tokens, held-out tokens): every 20th chunk of up to 64 KiB is held out.

    Chunks from all over the corpus, because its end alone may be of another kind.
    """
    chunk = max(1, min(HELD_OUT_CHUNK, len(tokens) // every))
    held_out = np.arange(len(tokens)) // chunk % every == every - 1
    return tokens[~held_out], tokens[held_out]


# Samples


@dataclasses.dataclass(frozen=True, eq=False)
class TokenWindows:
    """Batches of windows at random places of a corpus; batch `i` depends on (seed, i) only.

    Args:
        tokens: the corpus, token ids in one dim.
        seq_len: tokens of a window.
        batch_size: windows of a batch.
        seed: chooses the places.

    Raises:
        DataError: the corpus is shorter than one window and its target.

    Example:
        >>> windows = TokenWindows(encode("to be or not to be"), seq_len=4, batch_size=2, seed=0)
        >>> batch = windows(7)
        >>> batch["inputs"].shape, batch["targets"].shape
        ((2, 4), (2, 4))
    """

    tokens: Tokens
    seq_len: int
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.seq_len:
            raise DataError(
                f"the corpus has {len(self.tokens)} tokens; windows of {self.seq_len} tokens, each "
                f"with a successor, need at least {self.seq_len + 1}"
            )

    def __call__(self, step: int) -> Batch:
        """`inputs` (B, S) and, one token on, `targets` (B, S) of one step; int32."""
        generator = np.random.default_rng([self.seed, step])
        starts_B = generator.integers(0, len(self.tokens) - self.seq_len, size=self.batch_size)
        windows = self.tokens[starts_B[:, None] + np.arange(self.seq_len + 1)].astype(np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}

    def struct(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a batch."""
        leaf = jax.ShapeDtypeStruct((self.batch_size, self.seq_len), np.int32)  # type: ignore[no-untyped-call]
        return {"inputs": leaf, "targets": leaf}


def place(batch: Any, shardings: Any) -> Any:
    """A tree of numpy arrays -> global `jax.Array`s; each process copies only its own shards.

    Args:
        batch: the whole batch, equal on every process.
        shardings: a matching tree of `jax.sharding.Sharding`.
    """
    return jax.tree.map(_place_leaf, batch, shardings)


def _place_leaf(leaf: npt.NDArray[Any], sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

"""The files of a folder of tokens, and how those of a shard are written.

manifest.json         lists the shards; written last, so a folder without it is unfinished
00000.tokens.bin      the tokens of a shard: uint16 or uint32, little-endian, nothing else
00000.index.npy       where each of its documents begins and where the last one ends, int64
00000.learned.bin     for each token a byte: 1 if it is learned, 0 if not; not there if all are
tokenizer.json        the tokenizer, unless it is the built-in one
"""

import hashlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from spmd.models.training.paths import AnyPath, StorePath, sha256_of

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PLAN = "plan.json"
UNFINISHED = ".unfinished"
"""The ending of files that are being written."""

COPIED_AT_ONCE = 2**24

Record = dict[str, Any]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smaller of the two dtypes if it holds every id, else the larger."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def shard_paths(folder: AnyPath, name: str) -> tuple[AnyPath, AnyPath]:
    """The files of a shard: (tokens, index)."""
    return folder / f"{name}.tokens.bin", folder / f"{name}.index.npy"


def learned_path(folder: AnyPath, name: str) -> AnyPath:
    """The file that says which tokens of a shard are learned."""
    return folder / f"{name}.learned.bin"


def shard_hashes(folder: AnyPath, record: Record) -> dict[AnyPath, str]:
    """The hash that each file of a shard had when it was written."""
    tokens, index = shard_paths(folder, str(record["name"]))
    hashes = {tokens: record["sha256"], index: record["index_sha256"]}
    if "learned_sha256" in record:
        hashes[learned_path(folder, str(record["name"]))] = record["learned_sha256"]
    return hashes


def write_whole(path: AnyPath, content: bytes) -> None:
    """Writes a file that appears complete or not at all, even if the machine loses power."""
    if isinstance(path, StorePath):
        path.write_bytes(content)
        return
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


class ShardWriter:
    """Writes a shard; its files get their names when `finish` is called.

    Attributes:
        begins: where each document begins.
        written: number of tokens so far.
        is_open: whether a document has begun and not ended.

    Example:
        >>> with ShardWriter(folder, "00000", token_dtype(256)) as writer:
        ...     writer.add(np.array([104, 105, 0]), is_last=True)
        ...     record = writer.finish()
    """

    def __init__(self, folder: AnyPath, name: str, dtype: np.dtype[Any]) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.begins: list[int] = []
        self.written = 0
        self.is_open = False
        self._learned: bytearray | None = None  # from the first document of which a part is learned
        path, _ = shard_paths(folder, name)
        unfinished = f"{path.name}.{os.getpid()}{UNFINISHED}"
        # A store takes whole files only: the shard grows on the disk, and is copied at its end.
        here = folder if isinstance(folder, Path) else Path(tempfile.gettempdir())
        self._unfinished = here / unfinished
        self._file: BinaryIO = self._unfinished.open("wb")

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def add(
        self,
        tokens: npt.NDArray[Any],
        *,
        is_last: bool,
        learned: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Adds tokens to the current document.

        Args:
            learned: which of them are learned (N,); None is all.
            is_last: whether the document ends with them; if so, the next call begins another.
        """
        if not self.is_open:
            self.begins.append(self.written)
        if learned is not None and self._learned is None:
            self._learned = bytearray(b"\1") * self.written
        if self._learned is not None:
            marks = np.ones(len(tokens), np.uint8) if learned is None else learned
            self._learned += marks.astype(np.uint8).tobytes()
        self._file.write(tokens.astype(self.dtype).tobytes())
        self.written += len(tokens)
        self.is_open = not is_last

    def drop_open(self) -> None:
        """Removes the document that has begun and not ended, if there is one."""
        if not self.is_open:
            return
        self.written = self.begins.pop()
        self._file.seek(self.written * self.dtype.itemsize)
        self._file.truncate()
        if self._learned is not None:
            del self._learned[self.written :]
        self.is_open = False

    def finish(self) -> Record:
        """Gives the files their names.

        Returns:
            The shard's record: name, counts and hashes.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        tokens_path, index_path = shard_paths(self.folder, self.name)
        index = np.array([*self.begins, self.written], "<i8")
        # The tokens come last: where they are, the index is.
        write_whole(index_path, _npy(index))
        record = {
            "name": self.name,
            "tokens": self.written,
            "documents": len(self.begins),
            "sha256": sha256_of(self._unfinished),
            "index_sha256": hashlib.sha256(_npy(index)).hexdigest(),
        }
        if self._learned is not None:
            write_whole(learned_path(self.folder, self.name), bytes(self._learned))
            record["learned_sha256"] = hashlib.sha256(self._learned).hexdigest()
        if isinstance(tokens_path, StorePath):
            with self._unfinished.open("rb") as source, tokens_path.open("wb") as target:
                shutil.copyfileobj(source, target, COPIED_AT_ONCE)
        else:
            os.replace(self._unfinished, tokens_path)
        return record


def _npy(array: npt.NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()

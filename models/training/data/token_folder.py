"""A folder of tokens: how it is written, piece by piece, and how it is opened.

manifest.json         lists the shards; written last, so a folder without it is unfinished
00000.tokens.bin      the tokens of a shard: uint16 or uint32, little-endian, nothing else
00000.index.npy       where each of its documents begins and where the last one ends, int64
tokenizer.json        the tokenizer, unless it is the built-in one
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from models.training.data.corpus import Corpus, Int64s, Shard
from models.training.data.ranged import RangedTokens
from models.training.data.tokenizer import BYTES, ByteTokenizer, FileTokenizer, Tokenizer
from models.training.errors import DataError
from models.training.paths import AnyPath, StorePath, as_path, at_once, file_sizes

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


# Writing


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

    Args:
        folder: where they go.
        name: of the shard.
        dtype: of the tokens.

    Attributes:
        begins: where each document begins.
        written: number of tokens so far.

    Example:
        >>> with ShardWriter(folder, "00000", token_dtype(256)) as writer:
        ...     writer.add(np.array([104, 105, 0]), is_last=True)
        ...     record = writer.finish()
    """

    def __init__(self, folder: AnyPath, name: str, dtype: np.dtype[Any]) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.begins: list[int] = []
        self.written = 0
        self._is_open = False
        path, _ = shard_paths(folder, name)
        unfinished = f"{path.name}.{os.getpid()}{UNFINISHED}"
        # A store takes whole files only: the shard grows on the disk, and is copied at its end.
        here = folder if isinstance(folder, Path) else Path(tempfile.gettempdir())
        self._unfinished = here / unfinished
        self._file: BinaryIO = self._unfinished.open("wb")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def add(self, tokens: npt.NDArray[Any], *, is_last: bool) -> None:
        """Adds tokens to the current document.

        Args:
            tokens: ids.
            is_last: whether the document ends with them; if so, the next call begins another.
        """
        if not self._is_open:
            self.begins.append(self.written)
        self._file.write(tokens.astype(self.dtype).tobytes())
        self.written += len(tokens)
        self._is_open = not is_last

    @property
    def is_open(self) -> bool:
        """Whether a document has begun and not ended."""
        return self._is_open

    def drop_open(self) -> None:
        """Removes the document that has begun and not ended, if there is one."""
        if not self._is_open:
            return
        self.written = self.begins.pop()
        self._file.seek(self.written * self.dtype.itemsize)
        self._file.truncate()
        self._is_open = False

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


def sha256_of(path: AnyPath) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Opening


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says, as far as reading needs it.

    Args:
        folder: where it is.
        vocab_size: number of token ids.
        dtype: of the tokens.
        tokenizer: its name, hash and special ids.
        shards: a record for each shard that has tokens.
        fingerprint: a hash; folders with the same tokens and tokenizer have the same.
    """

    folder: AnyPath
    vocab_size: int
    dtype: np.dtype[Any]
    tokenizer: Record
    shards: tuple[Record, ...]
    fingerprint: str


def is_token_folder(path: AnyPath) -> bool:
    """Whether `scripts/tokenize_data` made this folder, or began to."""
    return (path / MANIFEST).is_file() or (path / PLAN).is_file()


def read_manifest(folder: AnyPath) -> Manifest:
    """Reads and checks the manifest of a folder.

    Raises:
        DataError: it is missing, damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{folder}: there is no {MANIFEST}; scripts/tokenize_data was stopped before its end, "
            "run it again and it goes on"
        )
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["schema_version"] != SCHEMA_VERSION:
            raise DataError(
                f"{path} is of version {about['schema_version']}, and only {SCHEMA_VERSION} can be "
                "read; tokenise the data again"
            )
        shards = tuple(
            {**record, "tokens": int(record["tokens"]), "documents": int(record["documents"])}
            for record in about["shards"]
            if record["tokens"]
        )
        tokenizer = dict(about["tokenizer"])
        vocab_size = int(tokenizer["vocab_size"])
        hashes = [tokenizer["sha256"], *(s["sha256"] + s["index_sha256"] for s in shards)]
        dtype = token_dtype(vocab_size)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({type(error).__name__}: {error}); tokenise the data again"
        ) from error
    if not shards:
        raise DataError(f"{folder}: it holds no tokens")
    fingerprint = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return Manifest(folder, vocab_size, dtype, tokenizer, shards, fingerprint)


def open_folder(folder: str | AnyPath) -> Corpus:
    """Opens a folder as a corpus; its files are memory-mapped, not read.

    Of those on an object store the indices are read, and later every window when it is needed.

    Raises:
        DataError: a file is missing, damaged, or has the wrong size.
    """
    folder = as_path(folder)
    manifest = read_manifest(folder)
    if isinstance(folder, StorePath):
        opened = functools.partial(_open_remote_shard, manifest, folder, file_sizes(folder))
        shards = tuple(at_once(opened, manifest.shards))
    else:
        shards = tuple(_open_shard(manifest, folder, record) for record in manifest.shards)
    return Corpus(
        shards,
        manifest.vocab_size,
        str(folder),
        manifest.fingerprint,
        functools.partial(open_folder, folder),
        is_remote=isinstance(folder, StorePath),
    )


def _check_size(manifest: Manifest, record: Record, path: AnyPath, found: int) -> None:
    wanted = record["tokens"] * manifest.dtype.itemsize
    if found != wanted:
        raise DataError(
            f"{path} has {found} bytes and should have {wanted}: it was cut or changed; "
            "copy it anew, or tokenise the data again"
        )


def _open_remote_shard(
    manifest: Manifest, folder: StorePath, sizes: Mapping[str, int], record: Record
) -> Shard:
    tokens_path, index_path = shard_paths(folder, str(record["name"]))
    assert isinstance(tokens_path, StorePath) and isinstance(index_path, StorePath)
    _check_size(manifest, record, tokens_path, sizes.get(tokens_path.name, 0))
    try:
        index: Int64s = np.load(io.BytesIO(index_path.read_bytes()))
    except (ValueError, EOFError) as error:
        raise DataError(f"{index_path} is damaged ({error}); tokenise the data again") from error
    _check_index(index, index_path, record)
    return Shard(RangedTokens(tokens_path, manifest.dtype, record["tokens"]), index)


def _open_shard(manifest: Manifest, folder: Path, record: Record) -> Shard:
    name = str(record["name"])
    tokens_path, index_path = (folder / path.name for path in shard_paths(folder, name))
    try:
        _check_size(manifest, record, tokens_path, tokens_path.stat().st_size)
        index: Int64s = np.load(index_path, mmap_mode="r")
        tokens = np.memmap(tokens_path, manifest.dtype, "r")
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; tokenise the data again") from error
    except (ValueError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{index_path} is damaged ({error}); tokenise the data again") from error
    _check_index(index, index_path, record)
    return Shard(tokens, index)


def _check_index(index: Int64s, path: AnyPath, record: Record) -> None:
    fits = index.shape == (record["documents"] + 1,) and index.dtype == np.int64
    if not fits or index[0] != 0 or index[-1] != record["tokens"]:
        raise DataError(
            f"{path} does not fit {record['documents']} documents of {record['tokens']} tokens; "
            "tokenise the data again"
        )


def damages(folder: AnyPath) -> Iterator[str]:
    """Hashes all files of a folder.

    Yields:
        A sentence for each file that is missing or has changed.

    Raises:
        DataError: the manifest cannot be read.
    """
    for record in read_manifest(folder).shards:
        hashes = (record["sha256"], record["index_sha256"])
        for path, wanted in zip(shard_paths(folder, record["name"]), hashes, strict=True):
            if not path.is_file():
                yield f"{path} is missing"
            elif sha256_of(path) != wanted:
                yield f"{path} has changed since it was written"


def folder_tokenizer(folder: AnyPath) -> Tokenizer:
    """The tokenizer that made a folder's tokens.

    Raises:
        DataError: it is missing, or is another one.
    """
    about = read_manifest(folder).tokenizer
    if about["name"] == BYTES:
        return ByteTokenizer()
    tokenizer = FileTokenizer(folder / TOKENIZER, about["eos_id"], about["bos_id"])
    if tokenizer.sha256 != about["sha256"]:
        raise DataError(f"{folder / TOKENIZER} is not the tokenizer that made these tokens")
    return tokenizer

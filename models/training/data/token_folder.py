"""Opens a folder of tokens, whose files are those of `shard_writer.py`."""

import dataclasses
import functools
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spmd.installed import as_called
from spmd.models.training.data import shard_writer
from spmd.models.training.data.corpus import Corpus, Int64s, RangedTokens, Shard
from spmd.models.training.data.shard_writer import MANIFEST, TOKENIZER, Record, shard_hashes
from spmd.models.training.data.tokenizer import BYTES, ByteTokenizer, FileTokenizer, Tokenizer
from spmd.models.training.errors import DataError
from spmd.models.training.paths import AnyPath, StorePath, as_path, at_once, file_sizes, sha256_of


@dataclasses.dataclass(frozen=True)
class TokenManifest:
    """What `manifest.json` says, as far as reading needs it."""

    folder: AnyPath  # where it is
    vocab_size: int  # number of token ids
    dtype: np.dtype[Any]  # of the tokens
    tokenizer: Record  # its name, hash and special ids
    shards: tuple[Record, ...]  # a record for each shard that has tokens
    fingerprint: str  # a hash; folders with the same tokens and tokenizer have the same


def is_token_folder(path: AnyPath) -> bool:
    """Whether `scripts/tokenize_data` made this folder, or began to."""
    return (path / MANIFEST).is_file() or (path / shard_writer.PLAN).is_file()


def read_manifest(folder: AnyPath) -> TokenManifest:
    """Reads and checks the manifest of a folder.

    Raises:
        DataError: it is missing, damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{folder}: there is no {MANIFEST}; {as_called('scripts/tokenize_data')} was stopped "
            "before its end, run it again and it goes on"
        )
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["schema_version"] != shard_writer.SCHEMA_VERSION:
            raise DataError(
                f"{path} is of version {about['schema_version']}, and only "
                f"{shard_writer.SCHEMA_VERSION} can be read; tokenise the data again"
            )
        shards = tuple(
            {**record, "tokens": int(record["tokens"]), "documents": int(record["documents"])}
            for record in about["shards"]
            if record["tokens"]
        )
        tokenizer = dict(about["tokenizer"])
        vocab_size = int(tokenizer["vocab_size"])
        hashes = [tokenizer["sha256"], *("".join(shard_hashes(folder, s).values()) for s in shards)]
        dtype = shard_writer.token_dtype(vocab_size)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({type(error).__name__}: {error}); tokenise the data again"
        ) from error
    if not shards:
        raise DataError(f"{folder}: it holds no tokens")
    fingerprint = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return TokenManifest(folder, vocab_size, dtype, tokenizer, shards, fingerprint)


def open_folder(folder: str | AnyPath) -> Corpus:
    """Opens a folder as a corpus; its files are memory-mapped, not read.

    Of those on an object store the indices are read, and later every window when it is needed.

    Raises:
        DataError: a file is missing, damaged, or has the wrong size.
    """
    folder = as_path(folder)
    manifest = read_manifest(folder)
    opened = functools.partial(_open_shard, manifest, file_sizes(folder))
    is_remote = isinstance(folder, StorePath)
    shards = tuple(at_once(opened, manifest.shards) if is_remote else map(opened, manifest.shards))
    return Corpus(
        shards,
        manifest.vocab_size,
        str(folder),
        manifest.fingerprint,
        is_remote=is_remote,
        row_documents=manifest.shards[0].get("row_documents", 1),
    )


def _open_shard(manifest: TokenManifest, sizes: Mapping[str, int], record: Record) -> Shard:
    """A shard, whose tokens are mapped, or stay on their store.

    Args:
        sizes: of the folder's files, by name.
    """
    path, index_path = shard_writer.shard_paths(manifest.folder, str(record["name"]))
    marks, count = shard_writer.learned_path(manifest.folder, str(record["name"])), record["tokens"]
    wanted = {path: count * manifest.dtype.itemsize}
    wanted |= {marks: count} if "learned_sha256" in record else {}
    missing = [p for p in (*wanted, index_path) if p.name not in sizes]
    if missing:
        raise DataError(f"{missing[0]}: No such file or directory; tokenise the data again")
    for file, size in wanted.items():
        if sizes[file.name] != size:
            raise DataError(
                f"{file} has {sizes[file.name]} bytes and should have {size}: it was cut or "
                "changed; copy it anew, or tokenise the data again"
            )
    try:
        if isinstance(path, StorePath):
            index: Int64s = np.load(io.BytesIO(index_path.read_bytes()))
        else:
            index = np.load(str(index_path), mmap_mode="r")
        tokens = _opened(path, manifest.dtype, count)
        learned = _opened(marks, np.dtype(np.uint8), count) if marks in wanted else None
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; tokenise the data again") from error
    except (ValueError, EOFError) as error:
        raise DataError(f"{index_path} is damaged ({error}); tokenise the data again") from error
    fits = index.shape == (record["documents"] + 1,) and index.dtype == np.int64
    if not fits or index[0] != 0 or index[-1] != record["tokens"]:
        raise DataError(
            f"{index_path} does not fit {record['documents']} documents of {record['tokens']} "
            "tokens; tokenise the data again"
        )
    return Shard(tokens, index, learned)


def _opened(path: AnyPath, dtype: np.dtype[Any], count: int) -> Any:
    """The numbers of a file, which are read where they are asked for."""
    if isinstance(path, StorePath):
        return RangedTokens(path, dtype, count)
    return np.memmap(path, dtype, "r")


def damages(folder: AnyPath) -> Iterator[str]:
    """Hashes all files of a folder.

    Yields:
        A sentence for each file that is missing or has changed.

    Raises:
        DataError: the manifest cannot be read.
    """
    for record in read_manifest(folder).shards:
        for path, wanted in shard_hashes(folder, record).items():
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

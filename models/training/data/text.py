"""Text that is tokenized in memory, at every start: files as they are."""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.training.data import documents as readers
from models.training.data.corpus import Corpus, from_documents
from models.training.data.documents import COMPRESSED, Bad, DocumentSource, FilePiece
from models.training.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from models.training.errors import DataError
from models.training.paths import AnyPath

DEFAULT_CORPUS_BYTES = 8 * 2**20
"""How much of Python's standard library is read."""

NO_TEXT = frozenset({
    ".7z", ".arrow", ".bz2", ".docx", ".feather", ".h5", ".hdf5", ".npy", ".npz", ".pdf", ".pkl",
    ".pt", ".rar", ".safetensors", ".tar", ".tfrecord", ".tgz", ".xlsx", ".xz", ".zip",
})  # fmt: skip
"""Endings of files that hold text, if any, in a form that is not read here."""


def standard_library_files() -> list[Path]:
    """The `.py` files of Python's standard library, sorted; without tests and site-packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(
        path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)
    )


def load_corpus(
    files: Sequence[AnyPath],
    max_bytes: int = DEFAULT_CORPUS_BYTES,
    tokenizer: Tokenizer | None = None,
    name: str = "the corpus",
    *,
    whole: bool = False,
) -> Corpus:
    """Reads files and tokenizes them in memory.

    A file of text is a document. Lines of JSON and rows of Parquet are documents, too, as
    `scripts/tokenize_data` reads them, whether compressed or not. Other files with a zero byte are
    skipped, as they are not text. Reading stops at `max_bytes`.

    Args:
        files: in the order of the documents.
        tokenizer: None takes the byte tokenizer.
        name: what error messages call the corpus.
        whole: whether more text than `max_bytes` is an error.

    Raises:
        DataError: there is too much text, no file has text, or one is of a known kind and cannot be
            read as that.
    """
    tokenizer = tokenizer or load_tokenizer()
    documents: list[bytes] = []
    left = max_bytes
    skipped: list[AnyPath] = []
    for path in files:
        count = len(documents)
        for document in _documents(path, tokenizer):
            documents.append(document[:left])
            left -= len(document)
            if left < 0 and whole:
                raise DataError(
                    f"{name}: more than {max_bytes:,} bytes of text, the most that is tokenised in "
                    "memory; tokenise it once with scripts/tokenize_data, and give its folder"
                )
            if left <= 0:
                break
        if left <= 0:
            break
        skipped += [path] if len(documents) == count else []
    if not documents:
        raise DataError(f"none of {len(files)} files contains text")
    dtype = np.uint8 if tokenizer.vocab_size <= 2**8 else np.uint32
    ids = (one.astype(dtype) for one in _encode(documents, tokenizer))
    notes = [f"{len(skipped)} files have no text, {skipped[0]} among them"] if skipped else []
    corpus = from_documents(ids, tokenizer.vocab_size, name)
    return dataclasses.replace(corpus, notes=tuple(notes))


def _encode(documents: Sequence[bytes], tokenizer: Tokenizer) -> list[npt.NDArray[Any]]:
    """The ids of each document, with the tokens that begin and end it."""
    bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], np.uint32)
    eos = np.array([tokenizer.eos_id], np.uint32)
    if tokenizer.name == BYTES:  # as they are, valid UTF-8 or not
        ids: list[npt.NDArray[Any]] = [np.frombuffer(d, np.uint8) for d in documents]
    else:
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        ids = list(tokenizer.encode_batch(texts))
    return [np.concatenate([bos, one, eos]) for one in ids]


def _documents(path: AnyPath, tokenizer: Tokenizer) -> Iterator[bytes]:
    """The documents of a file, as the file's kind has them."""
    kind = readers.format_of(path, DocumentSource())
    unpacked = Path(path.stem) if path.suffix in COMPRESSED else path
    if unpacked.suffix in NO_TEXT:
        raise DataError(
            f"{path} is no text: unpack or convert it to text, JSONL or Parquet, then "
            f"{_command(path.with_name('FILES'), tokenizer)}"
        )
    if kind == "text" and path.suffix not in COMPRESSED:
        content = path.read_bytes()
        if content and b"\0" not in content:
            yield content
        return
    source = DocumentSource(forbidden="\0" if tokenizer.name == BYTES else "")
    parts: list[str] = []
    for piece in readers.cut(path, source, path.stat().st_size + 1):
        for item in readers.read(FilePiece(path, kind, piece.start, piece.stop), source):
            if isinstance(item, Bad):
                raise DataError(f"{item.message}; {_command(path, tokenizer)} has flags for it")
            parts.append(item.text)
            if item.is_last:
                yield "".join(parts).encode()
                parts = []


def _command(path: AnyPath, tokenizer: Tokenizer) -> str:
    """What prepares a file for training."""
    named = "" if tokenizer.name == BYTES else f" --tokenizer {tokenizer.name}"
    return f"scripts/tokenize_data --out TOKENS{named} {path}"

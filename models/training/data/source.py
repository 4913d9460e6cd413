"""The data of a run: plain text, or folders of tokens. This module is the way in to all of it.

`corpus` holds tokens, `token_folder` keeps them on disk, `tokenize` fills such folders, `samples`
makes batches of them, `loader` brings batches to the devices.
"""

import dataclasses
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spmd.installed import as_called
from spmd.models.training.data import documents as readers
from spmd.models.training.data.chat import find_template
from spmd.models.training.data.corpus import (
    HELD_OUT_EVERY,
    Bools,
    Corpus,
    CorpusPart,
    from_documents,
    split_held_out,
    whole,
)
from spmd.models.training.data.documents import DocumentSource, DocumentText, find_files
from spmd.models.training.data.loader import place
from spmd.models.training.data.samples import PackedTokens
from spmd.models.training.data.shard_jobs import encoded
from spmd.models.training.data.token_folder import folder_tokenizer, is_token_folder, open_folder
from spmd.models.training.data.tokenizer import (
    BYTES,
    Tokenizer,
    decode,
    encode,
    identity,
    load_tokenizer,
    same_ids,
)
from spmd.models.training.errors import DataError
from spmd.models.training.paths import AnyPath, as_path

__all__ = [  # what those who ask for `source` find in it, beside what is defined here
    "BYTES", "DataError", "PackedTokens", "Tokenizer", "decode", "encode", "find_files",
    "from_documents", "identity", "place", "whole",
]  # fmt: skip

MEMORY_BYTES = 2**30
"""The most text that is tokenized in memory."""

Packing = Literal["auto", "boundaries", "documents", "none"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    # folders made by `scripts/tokenize_data`, each with its share of the samples, as in
    # `folder@0.7` (1 if not given); or text files, directories and glob patterns. If empty,
    # Python's standard library.
    sources: Sequence[str] = ()
    # of text; folders have their own, which has to be this one unless it is `bytes`
    tokenizer: str = BYTES
    # `none` lets attention reach from one document of a sample into another, `boundaries` keeps
    # them apart, `documents` does and never cuts one; `auto` is `documents` for rows with answers,
    # else `none`
    packing: Packing = "auto"
    # what is evaluated on, named as `sources`; if empty, a part of these is held out
    valid: Sequence[str] = ()


def load_datasets(
    config: DataConfig,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    vocab_size: int | None = None,
) -> tuple[PackedTokens, PackedTokens]:
    """Opens the data of a run and splits it.

    Args:
        seed: decides the order of samples.
        vocab_size: number of ids that the model has; None does not check it.

    Returns:
        (training batches, held-out batches).

    Raises:
        DataError: the data cannot be read, is too small, or has ids that the model does not have.
    """
    corpora, shares = open_sources(config)
    valid, valid_shares = corpora, shares
    if config.valid:
        of_valid = dataclasses.replace(config, sources=config.valid)
        if not same_ids(tokenizer_of(config), tokenizer_of(of_valid)):
            raise DataError(
                f"{config.valid[0]} and {', '.join(config.sources) or 'the standard library'} are "
                "tokens of different tokenizers"
            )
        valid, valid_shares = open_sources(of_valid)
    for corpus in (*corpora, *valid):
        if vocab_size is not None and corpus.vocab_size > vocab_size:
            raise DataError(
                f"{corpus.name}: its tokenizer has {corpus.vocab_size} ids, and the model's "
                f"vocab_size is {vocab_size}; take the model's tokenizer, or a larger vocabulary"
            )
    splits = [split_held_out(corpus) for corpus in corpora]
    train, held_out = ([split[side] for split in splits] for side in (0, 1))
    if config.valid:
        train, held_out = [whole(c) for c in corpora], [whole(c) for c in valid]
    has_answers = any(corpus.is_answers for corpus in corpora)
    packing = (
        ("documents" if has_answers else "none") if config.packing == "auto" else config.packing
    )
    for part in () if config.valid else held_out:
        if len(part) <= (0 if packing == "documents" else seq_len):
            raise DataError(
                f"{part.corpus.name}: {len(part.corpus)} tokens are too few: a "
                f"{HELD_OUT_EVERY}th is held out, here {len(part)}, and has to be longer than "
                f"a sample of {seq_len}; or name other data to evaluate on with --valid_data"
            )

    def packed(parts: list[CorpusPart], shares: list[float]) -> PackedTokens:
        return PackedTokens(
            parts,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            shares=shares if len(shares) > 1 else None,
            boundaries=packing == "boundaries",
            documents=packing == "documents",
        )

    data, other = packed(train, shares), packed(held_out, valid_shares)
    if data.leaves != other.leaves:
        raise DataError(
            f"{config.valid[0]} and the training data are of different kinds: one of them has "
            "preferences, or answers, and the other has not"
        )
    return data, other


# Sources


def open_sources(config: DataConfig) -> tuple[list[Corpus], list[float]]:
    """Opens the corpora that a configuration names.

    Returns:
        (corpora, the share of each).

    Raises:
        DataError: one cannot be opened, or folders of tokens are mixed with text.
    """
    if not config.sources:
        files = standard_library_files()
        tokenizer = load_tokenizer(config.tokenizer)
        name = "the Python standard library"
        return [load_corpus(files, DEFAULT_CORPUS_BYTES, tokenizer, name)], [1.0]
    named = [_parse_source(source) for source in config.sources]
    folders = [path for path, _ in named if is_token_folder(path)]
    if not folders:
        text, name = find_files(config.sources), ", ".join(config.sources)
        tokenizer = load_tokenizer(config.tokenizer)
        return [load_corpus(text, MEMORY_BYTES, tokenizer, name, whole=True)], [1.0]
    if len(folders) < len(named):
        other = next(path for path, _ in named if path not in folders)
        raise DataError(
            f"{other} is text and {folders[0]} a folder of tokens: tokenise the text too, with "
            + as_called("scripts/tokenize_data")
        )
    wanted = folder_tokenizer(folders[0]).sha256
    for folder in folders[1:]:
        if folder_tokenizer(folder).sha256 != wanted:
            raise DataError(f"{folder} and {folders[0]} were made by different tokenizers")
    if config.tokenizer != BYTES:  # which is what is asked for where nothing is
        _check_tokenizer(folders[0], config.tokenizer)
    return [open_folder(folder) for folder in folders], [share for _, share in named]


def _parse_source(source: str) -> tuple[AnyPath, float]:
    """`"folder@0.7"` -> (folder, 0.7); a path that exists as it is written has the share 1."""
    name, at, share = source.rpartition("@")
    if not at or as_path(source).exists():
        return as_path(source), 1.0
    try:
        return as_path(name), float(share)
    except ValueError:
        return as_path(source), 1.0


def _check_tokenizer(folder: AnyPath, name: str) -> None:
    """Raises `DataError` if tokens were not made by the tokenizer that is asked for."""
    made, wanted = folder_tokenizer(folder), load_tokenizer(name)
    if not same_ids(made, wanted):
        theirs = "the bytes of the text" if made.name == BYTES else "those of another tokenizer"
        raise DataError(
            f"the tokens of {folder} are {theirs}, not of {wanted.name}: make them anew with "
            f"{as_called('scripts/tokenize_data')} --out NEW --tokenizer {name} FILES, or say with "
            f"--tokenizer {'bytes' if made.name == BYTES else folder} that they are meant"
        )


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The tokenizer of a configuration: that of its first folder, or the named one for text."""
    folders = [path for path, _ in map(_parse_source, config.sources) if is_token_folder(path)]
    return folder_tokenizer(folders[0]) if folders else load_tokenizer(config.tokenizer)


# Text that is tokenized in memory, at every start: files as they are.

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
    documents: list[bytes | DocumentText] = []
    left = max_bytes
    skipped: list[AnyPath] = []
    for path in files:
        count = len(documents)
        for document in _documents(path, tokenizer):
            documents.append(document[:left] if isinstance(document, bytes) else document)
            left -= len(document if isinstance(document, bytes) else document.text)
            if left < 0 and whole:
                raise DataError(
                    f"{name}: more than {max_bytes:,} bytes of text, the most that is tokenised in "
                    f"memory; run {as_called('scripts/tokenize_data')} on it, and give the folder"
                )
            if left <= 0:
                break
        if left <= 0:
            break
        skipped += [path] if len(documents) == count else []
    if not documents:
        raise DataError(f"none of {len(files)} files contains text")
    dtype = np.uint8 if tokenizer.vocab_size <= 2**8 else np.uint32
    kinds = {1 if isinstance(one, bytes) else one.row_documents for one in documents}
    if len(kinds) > 1:
        raise DataError(f"{name}: some rows are preferences, and some are not")
    learned: list[Bools | None] = []
    texts = [one for one in documents if isinstance(one, bytes)]
    ids: list[npt.NDArray[Any]] = []
    if tokenizer.name == BYTES and len(texts) == len(documents):  # as they are, valid UTF-8 or not
        ids = [np.append(np.frombuffer(text, np.uint8), dtype(tokenizer.eos_id)) for text in texts]
    else:
        items = [
            DocumentText(one.decode("utf-8", errors="replace")) if isinstance(one, bytes) else one
            for one in documents
        ]
        for _, tokens, answers in encoded(tokenizer, items):
            ids.append(tokens.astype(dtype))
            learned.append(answers)
    notes = [f"{len(skipped)} files have no text, {skipped[0]} among them"] if skipped else []
    corpus = from_documents(ids, tokenizer.vocab_size, name, learned, kinds.pop())
    return dataclasses.replace(corpus, notes=tuple(notes))


def _documents(path: AnyPath, tokenizer: Tokenizer) -> Iterator[bytes | DocumentText]:
    """The documents of a file, as the file's kind has them; rows with answers are not encoded."""
    kind = readers.format_of(path, DocumentSource())
    unpacked = Path(path.stem) if path.suffix in readers.COMPRESSED else path
    if unpacked.suffix in NO_TEXT:
        raise DataError(
            f"{path} is no text: unpack or convert it to text, JSONL or Parquet, then "
            f"{_command(path.with_name('FILES'), tokenizer)}"
        )
    if kind == "text" and path.suffix not in readers.COMPRESSED:
        content = path.read_bytes()
        if content and b"\0" not in content:
            yield content
        return
    forbidden = "\0" if tokenizer.name == BYTES else ""
    source = DocumentSource(forbidden=forbidden, template=find_template(tokenizer.name))
    parts: list[str] = []
    for piece in readers.cut(path, source, path.stat().st_size + 1):
        for item in readers.read(readers.FilePiece(path, kind, piece.start, piece.stop), source):
            if isinstance(item, readers.Bad):
                raise DataError(f"{item.message}; {_command(path, tokenizer)} has flags for it")
            if item.learned is not None:
                yield item
                continue
            parts.append(item.text)
            if item.is_last:
                yield "".join(parts).encode()
                parts = []


def _command(path: AnyPath, tokenizer: Tokenizer) -> str:
    """What prepares a file for training."""
    named = "" if tokenizer.name == BYTES else f" --tokenizer {tokenizer.name}"
    return f"{as_called('scripts/tokenize_data')} --out TOKENS{named} {path}"

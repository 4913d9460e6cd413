"""The data of a run: plain text, or folders of tokens. This module is the way in to all of it.

`corpus` holds tokens, `token_folder` keeps them on disk, `tokenize` fills such folders, `samples`
makes batches of them, `loader` brings batches to the devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

from models.training.data.corpus import (
    HELD_OUT_EVERY,
    Corpus,
    CorpusPart,
    from_documents,
    split_held_out,
    whole,
)
from models.training.data.files import find_files
from models.training.data.loader import Loader, place
from models.training.data.samples import Batch, PackedTokens
from models.training.data.text import (
    DEFAULT_CORPUS_BYTES,
    load_corpus,
    standard_library_files,
)
from models.training.data.token_folder import folder_tokenizer, is_token_folder, open_folder
from models.training.data.tokenizer import (
    BYTE_VOCABULARY,
    BYTES,
    DOCUMENT_END,
    Tokenizer,
    decode,
    encode,
    identity,
    load_tokenizer,
    same_ids,
)
from models.training.errors import DataError
from models.training.paths import AnyPath, as_path

__all__ = [
    "BYTES",
    "BYTE_VOCABULARY",
    "DOCUMENT_END",
    "HELD_OUT_EVERY",
    "PACKINGS",
    "Batch",
    "Corpus",
    "CorpusPart",
    "DataConfig",
    "DataError",
    "Loader",
    "PackedTokens",
    "Packing",
    "Tokenizer",
    "decode",
    "encode",
    "find_files",
    "from_documents",
    "identity",
    "load_corpus",
    "load_datasets",
    "load_tokenizer",
    "open_folder",
    "place",
    "split_held_out",
    "standard_library_files",
    "tokenizer_of",
    "whole",
]

MEMORY_BYTES = 2**30
"""The most text that is tokenized in memory."""

Packing = Literal["boundaries", "none"]
PACKINGS: tuple[Packing, ...] = ("boundaries", "none")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    # folders made by `scripts/tokenize_data`, each with its share of the samples, as in
    # `folder@0.7` (1 if not given); or text files, directories and glob patterns. If empty,
    # Python's standard library.
    sources: Sequence[str] = ()
    # of text; folders have their own, which has to be this one unless it is `bytes`
    tokenizer: str = BYTES
    # `boundaries` keeps documents that share a sample apart, `none` lets attention reach from one
    # into another
    packing: Packing = "none"


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
    for corpus in corpora:
        if vocab_size is not None and corpus.vocab_size > vocab_size:
            raise DataError(
                f"{corpus.name}: its tokenizer has {corpus.vocab_size} ids, and the model's "
                f"vocab_size is {vocab_size}; take the model's tokenizer, or a larger vocabulary"
            )
    splits = [split_held_out(corpus) for corpus in corpora]
    for _, held_out in splits:
        _check_held_out(held_out, seq_len)
    packed = functools.partial(
        PackedTokens,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        shares=shares if len(shares) > 1 else None,
        boundaries=config.packing == "boundaries",
    )
    return packed([train for train, _ in splits]), packed([held_out for _, held_out in splits])


def _check_held_out(held_out: CorpusPart, seq_len: int) -> None:
    if len(held_out) <= seq_len:
        raise DataError(
            f"{held_out.corpus.name}: {len(held_out.corpus)} tokens are too few: a "
            f"{HELD_OUT_EVERY}th is held out, here {len(held_out)}, and has to be longer than a "
            f"sample of {seq_len}"
        )


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
        return [_open_text(config)], [1.0]
    if len(folders) < len(named):
        text = next(path for path, _ in named if path not in folders)
        raise DataError(
            f"{text} is text and {folders[0]} a folder of tokens: tokenise the text too, with "
            "scripts/tokenize_data"
        )
    _check_same_tokenizer(folders)
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


def _open_text(config: DataConfig) -> Corpus:
    files = find_files(config.sources)
    name = ", ".join(config.sources)
    return load_corpus(files, MEMORY_BYTES, load_tokenizer(config.tokenizer), name, whole=True)


def _check_same_tokenizer(folders: Sequence[AnyPath]) -> None:
    hashes = [folder_tokenizer(folder).sha256 for folder in folders]
    for folder, sha256 in zip(folders, hashes, strict=True):
        if sha256 != hashes[0]:
            raise DataError(f"{folder} and {folders[0]} were made by different tokenizers")


def _check_tokenizer(folder: AnyPath, name: str) -> None:
    """Raises `DataError` if tokens were not made by the tokenizer that is asked for."""
    if name == BYTES:  # what is asked for where nothing is
        return
    made, wanted = folder_tokenizer(folder), load_tokenizer(name)
    if not same_ids(made, wanted):
        theirs = "the bytes of the text" if made.name == BYTES else "those of another tokenizer"
        raise DataError(
            f"the tokens of {folder} are {theirs}, not of {wanted.name}: make them anew with "
            f"scripts/tokenize_data --out NEW --tokenizer {name} FILES, or say with --tokenizer "
            f"{'bytes' if made.name == BYTES else folder} that they are meant"
        )


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The tokenizer of a configuration: that of its first folder, or the named one for text."""
    folders = [path for path, _ in map(_parse_source, config.sources) if is_token_folder(path)]
    return folder_tokenizer(folders[0]) if folders else load_tokenizer(config.tokenizer)

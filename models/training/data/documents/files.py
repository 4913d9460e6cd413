"""Files of any format, cut into pieces, and pieces that are read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from models.training.data.documents.jsonl import read_jsonl
from models.training.data.documents.parquet import cut_parquet, read_parquet
from models.training.data.documents.piece import (
    Bad,
    DocumentSource,
    DocumentText,
    FilePiece,
    Format,
)
from models.training.data.documents.plain_text import cuts_anywhere, read_text
from models.training.errors import DataError
from models.training.paths import AnyPath

COMPRESSED = (".gz", ".zst")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


def format_of(path: AnyPath, source: DocumentSource) -> Format:
    """The format of a file: the given one, or by its name, such as `a.jsonl.gz`."""
    if source.format != "auto":
        return source.format
    name = Path(path.stem) if path.suffix in COMPRESSED else path
    if name.suffix in JSONL_SUFFIXES:
        return "jsonl"
    return "parquet" if name.suffix == ".parquet" else "text"


def cut(path: AnyPath, source: DocumentSource, piece_bytes: int) -> list[FilePiece]:
    """Cuts a file into pieces of about `piece_bytes`; the result depends on the file alone.

    Raises:
        DataError: a Parquet file cannot be read, or has no such column.
    """
    kind = format_of(path, source)
    if kind == "parquet":
        return cut_parquet(path, source, piece_bytes)
    size = path.stat().st_size
    is_whole = kind == "text" and not cuts_anywhere(source.separator)
    if path.suffix in COMPRESSED or is_whole or size <= piece_bytes:
        return [FilePiece(path, kind)]
    starts = list(range(0, size, piece_bytes))
    return [FilePiece(path, kind, a, b) for a, b in zip(starts, [*starts[1:], None], strict=True)]


def read(piece: FilePiece, source: DocumentSource) -> Iterator[DocumentText | Bad]:
    """The documents of a piece, without those that are only white space.

    Raises:
        DataError: the file cannot be read at all.
    """
    readers = {"text": read_text, "jsonl": read_jsonl, "parquet": read_parquet}
    try:
        yield from readers[piece.format](piece, source)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{piece.path} cannot be read: {error}") from error

"""Documents of text, JSONL and Parquet files, streamed, from pieces that can be read apart.

A large file is cut into pieces so that several processes share it. Pieces are ranges of bytes
(text, JSONL) or of row groups (Parquet); wherever they are cut, each document belongs to exactly
one of them. Memory is bounded by the largest document, and a document that is a whole file comes in
parts.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from models.training.errors import DataError

Format = Literal["auto", "text", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = ("auto", "text", "jsonl", "parquet")

PART_BYTES = 2**20
"""Size of the parts in which a document that is a whole file is read."""

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """How documents lie in files.

    Args:
        format: of the files; `"auto"` goes by their names, and what has no known name is text.
        field: of a JSON object, or column of a table: where the text is.
        separator: a line with exactly this text separates documents of text files; None makes each
            file one document.
    """

    format: Format = "auto"
    field: str = "text"
    separator: str | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a file: from `start` up to `stop`, in bytes or row groups; None is its end."""

    path: str
    format: Format
    start: int = 0
    stop: int | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """Text of a document, the last of it if `is_last`; or, with `problem`, why there is none."""

    text: str
    where: str
    is_last: bool = True
    problem: str | None = None


def file_format(path: Path, options: ReadOptions) -> Format:
    """What a file holds: what the options say, else by its name."""
    if options.format != "auto":
        return options.format
    name = path.name.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return _SUFFIXES.get(Path(name).suffix, "text")


def cut(path: Path, options: ReadOptions, piece_bytes: int) -> list[Piece]:
    """The pieces of a file, of about `piece_bytes` each.

    What is compressed cannot be read from its middle, and a text file without separators is one
    document: these are one piece.

    Raises:
        DataError: a Parquet file that is none, or without the column.
    """
    kind, size = file_format(path, options), path.stat().st_size
    if kind == "parquet":
        return _cut_parquet(path, options, piece_bytes)
    whole = kind == "text" and options.separator is None
    if whole or path.suffix.lower() in _COMPRESSED or size <= piece_bytes:
        return [Piece(str(path), kind)]
    starts = list(range(0, size, piece_bytes))
    return [
        Piece(str(path), kind, start, stop)
        for start, stop in zip(starts, [*starts[1:], None], strict=True)
    ]


def _cut_parquet(path: Path, options: ReadOptions, piece_bytes: int) -> list[Piece]:
    metadata = _open_parquet(path, options.field).metadata
    pieces: list[Piece] = []
    start = filled = 0
    for group in range(metadata.num_row_groups):
        filled += metadata.row_group(group).total_byte_size
        if filled >= piece_bytes or group == metadata.num_row_groups - 1:
            pieces.append(Piece(str(path), "parquet", start, group + 1))
            start, filled = group + 1, 0
    return pieces


def read(piece: Piece, options: ReadOptions) -> Iterator[Part]:
    """The documents of a piece, in order; of a large one, part after part.

    Raises:
        DataError: the file as a whole cannot be read. What is wrong with one document is a
            `Part` with a problem.
    """
    readers = {"jsonl": _read_jsonl, "text": _read_text, "parquet": _read_parquet}
    try:
        yield from readers[piece.format](piece, options)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{piece.path} cannot be read: {error}") from error


# Lines


def _open(path: str) -> IO[bytes]:
    if path.lower().endswith(".gz"):
        return gzip.open(path)
    if path.lower().endswith(".zst"):
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(path, compression="zstd"), PART_BYTES)
    return open(path, "rb", buffering=PART_BYTES)


def _lines(file: IO[bytes], start: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that begin at `start` or later."""
    offset = start
    if start:
        file.seek(start - 1)
        offset += len(file.readline()) - 1
    for line in file:
        yield offset, line
        offset += len(line)


def _where(path: str, offset: int) -> str:
    """`path:line` of the line at an offset; counts lines, so only for what went wrong."""
    line, left = 1, offset
    with _open(path) as file:
        while left and (block := file.read(min(left, PART_BYTES))):
            line += block.count(b"\n")
            left -= len(block)
    return f"{path}:{line}"


# JSONL


def _read_jsonl(piece: Piece, options: ReadOptions) -> Iterator[Part]:
    with _open(piece.path) as file:
        for offset, line in _lines(file, piece.start):
            if piece.stop is not None and offset >= piece.stop:
                return
            if not line.strip():
                continue
            text, problem = _json_text(line, options.field)
            where = piece.path if problem is None else _where(piece.path, offset)
            yield Part(text, where, problem=problem)


def _json_text(line: bytes, field: str) -> tuple[str, str | None]:
    """(text of a line, None), or (nothing, why)."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 ({error.reason} at byte {error.start + 1} of the line)"
    except ValueError as error:
        return "", f"not JSON ({error})"
    if not isinstance(record, dict):
        return "", f"a JSON {type(record).__name__} and not an object"
    if field not in record:
        known = ", ".join(map(repr, list(record)[:8])) or "none"
        return "", f"no field {field!r} (there are: {known}); name the one with text with --field"
    return _checked(record[field], field)


def _checked(text: Any, field: str) -> tuple[str, str | None]:
    if not isinstance(text, str):
        return "", f"{field!r} holds {type(text).__name__} and not text"
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return "", f"{field!r} holds half of a surrogate pair, which is no text"
    return text, None


# Text


def _read_text(piece: Piece, options: ReadOptions) -> Iterator[Part]:
    if options.separator is None:
        return _read_whole(piece)
    return _read_separated(piece, options.separator)


def _read_whole(piece: Piece) -> Iterator[Part]:
    """A file that is one document, in parts that end with a line where lines are short enough."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept, offset = "", 0
    with _open(piece.path) as file:
        while block := file.read(PART_BYTES):
            try:
                kept += decoder.decode(block)
            except UnicodeDecodeError as error:
                # The decoder may have kept up to three bytes of the block before.
                at = offset + error.start - (len(error.object) - len(block))
                yield Part("", _where(piece.path, at), problem=f"not UTF-8 ({error.reason})")
                return
            offset += len(block)
            end = kept.rfind("\n") + 1 or len(kept)
            # One character stays back, so that the last part is never empty.
            end = min(end, len(kept) - 1)
            if end > 0:
                yield Part(kept[:end], piece.path, is_last=False)
                kept = kept[end:]
    try:
        kept += decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        problem = "not UTF-8 (it ends inside a character)"
        yield Part("", _where(piece.path, offset), problem=problem)
        return
    if kept:
        yield Part(kept, piece.path)


def _read_separated(piece: Piece, separator: str) -> Iterator[Part]:
    """Documents between lines that equal the separator.

    A document belongs to the piece in which the line before it begins; a file's first one to the
    file's first piece.
    """
    wanted = separator.encode("utf-8")
    document: list[bytes] | None = [] if piece.start == 0 else None
    begun = piece.start
    with _open(piece.path) as file:
        for offset, line in _lines(file, piece.start):
            if line.rstrip(b"\r\n") != wanted:
                if document is not None:
                    document.append(line)
                elif piece.stop is not None and offset >= piece.stop:
                    return
                continue
            if document is not None:
                yield from _document(piece.path, begun, document)
            if piece.stop is not None and offset >= piece.stop:
                return
            document, begun = [], offset + len(line)
    if document is not None:
        yield from _document(piece.path, begun, document)


def _document(path: str, offset: int, lines: Sequence[bytes]) -> Iterator[Part]:
    data = b"".join(lines)
    data = data.removesuffix(b"\n").removesuffix(b"\r")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = _where(path, offset + error.start)
        yield Part("", where, problem=f"not UTF-8 ({error.reason})")
        return
    if text:
        yield Part(text, path)


# Parquet


def _open_parquet(path: Path | str, column: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is no Parquet file: {error}") from error
    names = file.schema_arrow.names
    if column not in names:
        raise DataError(
            f"{path} has no column {column!r} (there are: {', '.join(map(repr, names))}); name the "
            "one with text with --field"
        )
    kind = file.schema_arrow.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{path}: column {column!r} holds {kind} and not text")
    return file


def _read_parquet(piece: Piece, options: ReadOptions) -> Iterator[Part]:
    import pyarrow as pa

    file = _open_parquet(piece.path, options.field)
    stop = file.metadata.num_row_groups if piece.stop is None else piece.stop
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, stop))
    try:
        for batch in file.iter_batches(256, row_groups=groups, columns=[options.field]):
            for value in batch.column(0):
                row += 1
                yield _parquet_part(value, f"{piece.path}: row {row}", options.field)
    except pa.ArrowException as error:
        raise DataError(f"{piece.path} cannot be read after row {row}: {error}") from error


def _parquet_part(value: Any, where: str, field: str) -> Part:
    try:
        text, problem = _checked(value.as_py(), field)
    except UnicodeDecodeError as error:
        text, problem = "", f"not UTF-8 ({error.reason})"
    return Part(text, where, problem=problem)

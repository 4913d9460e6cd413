"""Reads documents from text, JSONL and Parquet files, piece by piece, with bounded memory.

A row of JSONL or Parquet is a text, or one of the kinds of `chat.py`.

A large file is cut into pieces that different processes read: plain JSONL at line ends, text at
separators, Parquet between row groups. A document belongs to the piece in which it begins:

    bytes      0 ........ 99 | 100 ....... 199 | 200 ...
    lines      AAAAAA BBBBBBBBBBBB CCCCCCCCCCCC DDDDDDD
    read by    piece 0: A, B    piece 1: C    piece 2: D

Compressed files (.gz, .zst) are one piece, since they can only be read from their beginning.
"""

import codecs
import dataclasses
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from spmd.models.training.data import chat
from spmd.models.training.errors import DataError
from spmd.models.training.paths import AnyPath, StorePath, as_path

Format = Literal["auto", "text", "jsonl", "parquet"]


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """How to find documents in files."""

    format: Format = "auto"  # what the files are; `auto` goes by their names
    field: str = "text"  # the JSONL field or Parquet column that has the text
    # what is between documents of a text file; if empty, a file is one document
    separator: str = ""
    forbidden: str = ""  # a character that no document may contain
    template: chat.Template | None = None  # what writes messages


@dataclasses.dataclass(frozen=True)
class FilePiece:
    """A part of a file."""

    path: AnyPath  # the file
    format: Format  # what it is
    start: int = 0  # first byte, or first row group of a Parquet file
    stop: int | None = None  # where the next piece begins; None is the end of the file


@dataclasses.dataclass(frozen=True)
class DocumentText:
    """A document, or the next part of a long one."""

    text: str
    is_last: bool = True  # whether the document ends with it
    learned: chat.Spans | None = None  # the characters that are learned; None is all of them
    is_framed: bool = False  # whether what begins and ends documents is in the text already
    row_documents: int = 1  # how many documents its row has, one after the other


@dataclasses.dataclass(frozen=True)
class Bad:
    """A document that cannot be read; parts of it that came before have to be dropped."""

    message: str  # what is wrong, and where


# What readers of all formats share: files that are opened, and text that is checked.

BLOCK_BYTES = 4 * 2**20
"""How much text is in memory at a time; a longer document comes in several parts."""

BOM = codecs.BOM_UTF8
"""What some editors put before a file's text."""


def packed(path: AnyPath) -> Any:
    """What libraries open themselves: a local path, or an open file of a store."""
    return str(path) if isinstance(path, Path) else path.open("rb")


def opened(path: AnyPath) -> BinaryIO:
    """Opens a file, which is unpacked while it is read if it is compressed."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(packed(path), "rb"))
    if path.suffix == ".zst":
        import pyarrow

        unpacked = pyarrow.input_stream(packed(path), compression="zstd")
        return cast(BinaryIO, io.BufferedReader(unpacked))
    return cast(BinaryIO, path.open("rb"))


def lines_before(path: AnyPath, place: int) -> int:
    """Number of line ends before a byte; reads all up to there, so it is for messages only."""
    count = 0
    with opened(path) as file:
        while place > 0 and (block := file.read(min(place, BLOCK_BYTES))):
            count += block.count(b"\n")
            place -= len(block)
    return count


def decode(content: bytes) -> str:
    """The text of bytes of UTF-8.

    Raises:
        ValueError: they are no UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start)
        where = f"{line} lines on" if line else f"at byte {error.start}"
        raise ValueError(f"no valid UTF-8 {where}") from error


def as_text(value: Any, what: str) -> str:
    """Returns the value if it is text that UTF-8 can encode.

    Args:
        what: names it in the message.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise ValueError(f"{what} is no text, but {kind}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds half of a surrogate pair") from error
    return value


def checked(text: str, source: DocumentSource) -> str:
    """Returns the text if it has no forbidden character.

    Raises:
        ValueError: it has one.
    """
    if source.forbidden and source.forbidden in text:
        raise ValueError(f"the text contains {source.forbidden!r}, which ends documents here")
    return text


def row_fields(names: Sequence[str], source: DocumentSource, what: str) -> list[str]:
    """The fields or columns, among these, that make the documents of a row.

    Args:
        what: is `field` or `column`, for messages.

    Raises:
        ValueError: there are none.
    """
    found = [source.field] if source.field in names else chat.fields(names)
    if not found:
        raise ValueError(
            f"no {what} {source.field!r}, only {', '.join(names)}; name one with --field (rows of "
            f"chats have {', or '.join(' and '.join(kind) for kind in chat.KINDS)})"
        )
    return found


def row_documents(row: Mapping[str, Any], source: DocumentSource, what: str) -> list[DocumentText]:
    """The documents of a row; none if it is only white space.

    Raises:
        ValueError: something in it is not as it should be.
    """
    row = {name: row[name] for name in row_fields(list(row), source, what)}
    if source.field in row and not isinstance(row[source.field], list):
        text = checked(as_text(row[source.field], f"{what} {source.field!r}"), source)
        return [DocumentText(text)] if text.strip() else []
    if source.field in row:
        row = {"messages": row[source.field]}
    answered = chat.read(row, source.template)
    return [
        DocumentText(
            checked(as_text(a.text, "it"), source), True, a.learned, a.is_framed, len(answered)
        )
        for a in answered
    ]


# Text files: a document is all of a file, or what is between separators.


def cuts_anywhere(separator: str) -> bool:
    """Whether a reader finds the same separators wherever it begins to read.

    Not so with "||": read from the beginning, "a|||b" is "a" and "|b", but read from its third
    character on, the separator ends right before "b". So no end of a separator may be its
    beginning.
    """
    return bool(separator) and not any(
        separator.startswith(separator[-length:]) for length in range(1, len(separator))
    )


def read_text(piece: FilePiece, source: DocumentSource) -> Iterator[DocumentText | Bad]:
    """The documents that begin in a piece, long ones in parts."""
    separator = source.separator.encode()
    is_begun = is_bad = False  # this document: parts of it were given; it cannot be read
    with opened(piece.path) as file:
        for place, part, is_last in _split(file, separator, piece.start, piece.stop):
            if not is_bad:
                try:
                    text = checked(decode(part.removeprefix(b"" if place else BOM)), source)
                except ValueError as error:
                    is_bad = True
                    line = lines_before(piece.path, place) + 1
                    yield Bad(f"{piece.path}, in the text from line {line} on: {error}")
                else:
                    if is_begun or text.strip():
                        yield DocumentText(text, is_last)
                        is_begun = True
            if is_last:
                is_begun = is_bad = False


def _split(
    file: BinaryIO, separator: bytes, start: int, stop: int | None
) -> Iterator[tuple[int, bytes, bool]]:
    """The documents that begin in a range, in parts of bounded size.

    Yields:
        (place in the file, bytes, whether the document ends with them).
    """
    # A separator that ends exactly at `start` has to be seen, or the document behind it is lost.
    place = max(0, start - len(separator))
    if place:
        file.seek(place)
    is_found = start == 0  # whether `place` is where a document of ours begins or goes on
    buffer, is_end = b"", False
    while not is_end:
        block = file.read(BLOCK_BYTES)
        is_end = not block
        buffer += block
        low = 0
        while separator and (high := buffer.find(separator, low)) >= 0:
            if is_found:
                yield place + low, buffer[low:high], True
            low = high + len(separator)
            is_found = True
            if stop is not None and place + low >= stop:
                return
        if is_end and is_found:
            yield place + low, buffer[low:], True
        elif len(buffer) - low >= BLOCK_BYTES:
            # The end of the buffer may be the beginning of a separator: it stays for later.
            upto = _good_cut(buffer, low, len(buffer) - max(1, len(separator)))
            if is_found:
                yield place + low, buffer[low:upto], False
            low = upto
        place, buffer = place + low, buffer[low:]


def _good_cut(buffer: bytes, low: int, high: int) -> int:
    """Where to cut a long document: after a line, or else between two characters."""
    line_end = buffer.rfind(b"\n", low, high)
    if line_end > low:
        return line_end + 1
    while high > low + 1 and buffer[high] & 0xC0 == 0x80:  # inside a character of UTF-8
        high -= 1
    return high


# JSONL files: a line is a row.


def read_jsonl(piece: FilePiece, source: DocumentSource) -> Iterator[DocumentText | Bad]:
    """The documents of the lines that begin in a piece."""
    with opened(piece.path) as file:
        if piece.start:
            # The line that goes on here belongs to the piece before. Starting one byte early
            # keeps a line that begins exactly at `start`: only the newline before it is skipped.
            file.seek(piece.start - 1)
            file.readline()
        place = file.tell() if piece.start else 0
        first_line = None if piece.start else 1
        for number, line in enumerate(_lines(file, place, piece.stop)):
            content = line.removeprefix(BOM) if first_line and not number else line
            if not content.strip():
                continue
            try:
                yield from row_documents(_record(content, source), source, "field")
            except ValueError as error:
                before = first_line or lines_before(piece.path, place) + 1
                yield Bad(f"{piece.path}, line {before + number}: {error}")


def _lines(file: BinaryIO, place: int, stop: int | None) -> Iterator[bytes]:
    """The lines that begin before `stop`."""
    while stop is None or place < stop:
        line = file.readline()
        if not line:
            return
        yield line
        place += len(line)


def _record(line: bytes, source: DocumentSource) -> dict[str, Any]:
    try:
        record = json.loads(decode(line.rstrip()))
    except json.JSONDecodeError as error:
        raise ValueError(f"no valid JSON: {error.msg} at column {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("no JSON that can be read: it is nested too deep") from error
    if not isinstance(record, dict):
        raise ValueError(f"no field {source.field!r}, only a {type(record).__name__}")
    return record


# Parquet files.

PARQUET_ROWS = 256
"""How many rows are in memory at a time."""


def read_parquet(piece: FilePiece, source: DocumentSource) -> Iterator[DocumentText | Bad]:
    """The documents of a piece's row groups."""
    file, columns = _open_parquet(piece.path, source)
    with file:
        groups = range(piece.start, cast(int, piece.stop))
        row = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
        batches = file.iter_batches(PARQUET_ROWS, row_groups=list(groups), columns=columns)
        for batch in _readable(batches, piece.path) if groups else ():
            for number, values in enumerate(batch.to_pylist(), start=row):
                try:
                    yield from row_documents(values, source, "column")
                except ValueError as error:
                    yield Bad(f"{piece.path}, row {number}: {error}")
            row += len(batch)


def _open_parquet(path: AnyPath, source: DocumentSource) -> tuple[Any, list[str]]:
    """(an open file, the columns that make documents)."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(packed(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is no Parquet file that can be read: {error}") from error
    try:
        return file, row_fields(file.schema_arrow.names, source, "column")
    except ValueError as error:
        file.close()
        raise DataError(f"{path} has {error}") from error


def _readable(batches: Iterator[Any], path: AnyPath) -> Iterator[Any]:
    import pyarrow

    try:
        yield from batches
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is a damaged Parquet file: {error}") from error


# Files of any format.

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
        with _open_parquet(path, source)[0] as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            sizes = [group.total_byte_size for group in groups]
        starts, held = [0], 0
        for number, size in enumerate(sizes):
            if held and held + size > piece_bytes:
                starts.append(number)
                held = 0
            held += size
        stops: list[int | None] = [*starts[1:], len(sizes)]
    else:
        size = path.stat().st_size
        is_whole = kind == "text" and not cuts_anywhere(source.separator)
        is_one = path.suffix in COMPRESSED or is_whole or size <= piece_bytes
        starts = [0] if is_one else list(range(0, size, piece_bytes))
        stops = [*starts[1:], None]
    return [FilePiece(path, kind, a, b) for a, b in zip(starts, stops, strict=True)]


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


# Files that a user names.


def find_files(patterns: Sequence[str]) -> list[AnyPath]:
    """Finds files by name, directory or glob pattern.

    Args:
        patterns: files, directories (all files below them), or glob patterns; also URLs of an
            object store.

    Returns:
        The files, sorted, each one once.

    Raises:
        DataError: a pattern matches no file.
        StoreError: a store cannot be read.
    """
    found: set[AnyPath] = set()
    for pattern in patterns:
        path = as_path(pattern)
        if isinstance(path, StorePath):
            files = _on_store(path)
        else:
            matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
            matches = matches or ([path] if path.exists() else [])
            below = (x for m in matches for x in (m.rglob("*") if m.is_dir() else [m]))
            files = {one for one in below if one.is_file()}
        if not files:
            raise DataError(f"no file matches {pattern!r}")
        found |= files
    return sorted(found, key=lambda path: (isinstance(path, StorePath), path))


def _on_store(path: StorePath) -> set[AnyPath]:
    if path.is_file():
        return {path}
    if not any(sign in path.place for sign in "*?["):
        return set(path.rglob("*"))
    return {one for one in path.parent.glob(path.name) if one.is_file()}

"""Documents of JSONL files: one field of each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

from models.training.data.documents.piece import Bad, DocumentSource, DocumentText, FilePiece
from models.training.data.documents.reading import (
    BOM,
    as_text,
    checked,
    decode,
    lines_before,
    opened,
)


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
                text = checked(_field(content, source.field), source)
            except ValueError as error:
                before = first_line or lines_before(piece.path, place) + 1
                yield Bad(f"{piece.path}, line {before + number}: {error}")
                continue
            if text.strip():
                yield DocumentText(text)


def _lines(file: BinaryIO, place: int, stop: int | None) -> Iterator[bytes]:
    """The lines that begin before `stop`."""
    while stop is None or place < stop:
        line = file.readline()
        if not line:
            return
        yield line
        place += len(line)


def _field(line: bytes, field: str) -> str:
    try:
        record = json.loads(decode(line.rstrip()))
    except json.JSONDecodeError as error:
        raise ValueError(f"no valid JSON: {error.msg} at column {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("no JSON that can be read: it is nested too deep") from error
    if not isinstance(record, dict) or field not in record:
        fields = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ValueError(f"no field {field!r}, only {fields}; name one with --field")
    return as_text(record[field], f"field {field!r}")

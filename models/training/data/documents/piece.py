"""What is read, and what comes of it: parts of files, and documents."""

from __future__ import annotations

import dataclasses
from typing import Literal

from models.training.paths import AnyPath

Format = Literal["auto", "text", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = ("auto", "text", "jsonl", "parquet")


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """How to find documents in files.

    Args:
        format: what the files are; `auto` goes by their names.
        field: the JSONL field or Parquet column that has the text.
        separator: what is between documents of a text file; if empty, a file is one document.
        forbidden: a character that no document may contain.
    """

    format: Format = "auto"
    field: str = "text"
    separator: str = ""
    forbidden: str = ""


@dataclasses.dataclass(frozen=True)
class FilePiece:
    """A part of a file.

    Args:
        path: the file.
        format: what it is.
        start: first byte, or first row group of a Parquet file.
        stop: where the next piece begins; None is the end of the file.
    """

    path: AnyPath
    format: Format
    start: int = 0
    stop: int | None = None


@dataclasses.dataclass(frozen=True)
class DocumentText:
    """A document, or the next part of a long one.

    Args:
        text: the text.
        is_last: whether the document ends with it.
    """

    text: str
    is_last: bool = True


@dataclasses.dataclass(frozen=True)
class Bad:
    """A document that cannot be read; parts of it that came before have to be dropped.

    Args:
        message: what is wrong, and where.
    """

    message: str

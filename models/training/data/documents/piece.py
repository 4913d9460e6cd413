"""What is read, and what comes of it: parts of files, and documents."""

from __future__ import annotations

import dataclasses
from typing import Literal

from models.training.paths import AnyPath

Format = Literal["auto", "text", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = ("auto", "text", "jsonl", "parquet")


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """How to find documents in files."""

    format: Format = "auto"  # what the files are; `auto` goes by their names
    field: str = "text"  # the JSONL field or Parquet column that has the text
    # what is between documents of a text file; if empty, a file is one document
    separator: str = ""
    forbidden: str = ""  # a character that no document may contain


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


@dataclasses.dataclass(frozen=True)
class Bad:
    """A document that cannot be read; parts of it that came before have to be dropped."""

    message: str  # what is wrong, and where

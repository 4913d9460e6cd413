"""What readers of all formats share: files that are opened, and text that is checked."""

from __future__ import annotations

import codecs
import gzip
import io
from pathlib import Path
from typing import Any, BinaryIO, cast

from models.training.data.documents.piece import DocumentSource
from models.training.paths import AnyPath

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

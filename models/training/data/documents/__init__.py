"""Reads documents from text, JSONL and Parquet files, piece by piece, with bounded memory.

A large file is cut into pieces that different processes read: plain JSONL at line ends, text at
separators, Parquet between row groups. A document belongs to the piece in which it begins:

    bytes      0 ........ 99 | 100 ....... 199 | 200 ...
    lines      AAAAAA BBBBBBBBBBBB CCCCCCCCCCCC DDDDDDD
    read by    piece 0: A, B    piece 1: C    piece 2: D

Compressed files (.gz, .zst) are one piece, since they can only be read from their beginning.
"""

from models.training.data.documents.files import COMPRESSED, cut, format_of, read
from models.training.data.documents.piece import (
    FORMATS,
    Bad,
    DocumentSource,
    DocumentText,
    FilePiece,
    Format,
)

__all__ = [
    "COMPRESSED",
    "FORMATS",
    "Bad",
    "DocumentSource",
    "DocumentText",
    "FilePiece",
    "Format",
    "cut",
    "format_of",
    "read",
]

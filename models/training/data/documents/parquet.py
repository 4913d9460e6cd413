"""Documents of Parquet files: one column of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from models.training.data.documents.piece import Bad, DocumentSource, DocumentText, FilePiece
from models.training.data.documents.reading import as_text, checked, packed
from models.training.errors import DataError
from models.training.paths import AnyPath

PARQUET_ROWS = 256
"""How many rows are in memory at a time."""


def cut_parquet(path: AnyPath, source: DocumentSource, piece_bytes: int) -> list[FilePiece]:
    """Cuts a file between row groups; a larger one is a piece by itself.

    Raises:
        DataError: it cannot be read, or has no such column.
    """
    with _open_parquet(path, source) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes = [group.total_byte_size for group in groups]
    starts, held = [0], 0
    for number, size in enumerate(sizes):
        if held and held + size > piece_bytes:
            starts.append(number)
            held = 0
        held += size
    stops = [*starts[1:], len(sizes)]
    return [FilePiece(path, "parquet", a, b) for a, b in zip(starts, stops, strict=True)]


def read_parquet(piece: FilePiece, source: DocumentSource) -> Iterator[DocumentText | Bad]:
    """The documents of a piece's row groups."""
    with _open_parquet(piece.path, source) as file:
        groups = range(piece.start, cast(int, piece.stop))
        row = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
        batches = file.iter_batches(PARQUET_ROWS, row_groups=list(groups), columns=[source.field])
        for batch in _readable(batches, piece.path) if groups else ():
            for number, value in enumerate(batch.column(0).to_pylist(), start=row):
                try:
                    text = checked(as_text(value, f"column {source.field!r}"), source)
                except ValueError as error:
                    yield Bad(f"{piece.path}, row {number}: {error}")
                    continue
                if text.strip():
                    yield DocumentText(text)
            row += len(batch)


def _open_parquet(path: AnyPath, source: DocumentSource) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(packed(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is no Parquet file that can be read: {error}") from error
    names = file.schema_arrow.names
    if source.field not in names:
        file.close()
        raise DataError(
            f"{path} has no column {source.field!r}, only {', '.join(names)}; name one with --field"
        )
    return file


def _readable(batches: Iterator[Any], path: AnyPath) -> Iterator[Any]:
    import pyarrow

    try:
        yield from batches
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is a damaged Parquet file: {error}") from error

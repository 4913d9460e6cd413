"""Open files of an object store, and errors of its drivers in one line."""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterator
from typing import Any


class StoreError(OSError):
    """An object store that cannot be reached or used; the message is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> Any:
        return StoreError, (str(self),)


@contextlib.contextmanager
def one_error(path: object) -> Iterator[None]:
    """Errors of any driver become `OSError`s with one line that says where."""
    try:
        yield
    except FileNotFoundError as error:
        text = "there is no such file, or no such bucket"
        raise FileNotFoundError(errno.ENOENT, text, str(path)) from error
    except StoreError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StoreError(f"{path}: {lines[0]}") from error


class StoreFile(io.RawIOBase):
    """A file of a store whose errors are `StoreError`s."""

    def __init__(self, file: Any, path: object) -> None:
        self._file, self._path = file, path

    def readable(self) -> bool:
        """Whether it was opened to be read."""
        return bool(self._file.readable())

    def writable(self) -> bool:
        """Whether it was opened to be written."""
        return bool(self._file.writable())

    def seekable(self) -> bool:
        """Whether `seek` works."""
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer; returns how many bytes there were."""
        with one_error(self._path):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes; all that are left without a size."""
        with one_error(self._path):
            return bytes(self._file.read(-1 if size is None else size))

    def readline(self, size: int | None = -1) -> bytes:
        """The next line, with its end."""
        with one_error(self._path):
            return bytes(self._file.readline())

    def write(self, content: Any) -> int:
        """Adds bytes; returns their number."""
        with one_error(self._path):
            return int(self._file.write(content))

    def seek(self, place: int, whence: int = 0) -> int:
        """Goes to a place; returns it."""
        return int(self._file.seek(place, whence))

    def tell(self) -> int:
        """The place."""
        return int(self._file.tell())

    def discard(self) -> None:
        """Closes a file that was being written, so that nothing of it appears."""
        with contextlib.suppress(Exception):
            self._file.discard()
        self._file.closed = True
        super().close()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None and self.writable():
            self.discard()
        self.close()

    def close(self) -> None:
        """Closes it; what was written appears."""
        if not self.closed:
            with one_error(self._path):
                self._file.close()
            super().close()

"""What goes wrong with data, told to the user in one line."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be read, do not fit what is asked of them, or are too few."""

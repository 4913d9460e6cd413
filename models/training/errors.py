"""What a user can mend; free of jax, so that processes that tokenise start fast."""

import math
from collections.abc import Callable, Mapping, Sequence


class DataError(ValueError):
    """Data that cannot be read, does not fit, or is too small; the message is one line."""


class RunError(ValueError):
    """A run that cannot be made; the message is one line."""


class TrainingError(RuntimeError):
    """A run that cannot go on: loss, gradients or an update are not finite."""


RANGES: Mapping[str, Callable[[float], bool]] = {
    "positive": lambda x: 0 < x < math.inf,
    "at least 0": lambda x: 0 <= x < math.inf,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in [0, 1)": lambda x: 0 <= x < 1,
}
"""What numbers have to be."""


def check_ranges(config: object, wanted: Mapping[str, Sequence[str]]) -> None:
    """Raises `RunError` for a number that is out of its range; None never is.

    Args:
        wanted: one of `RANGES` -> the names of the numbers.
    """
    for what, names in wanted.items():
        for name in names:
            value = getattr(config, name)
            if value is not None and not RANGES[what](value):
                raise RunError(f"{name} must be {what}, not {value}")


def shortened(items: Sequence[str], most: int = 5) -> str:
    """The first few items, and how many more there are.

    Example:
        >>> shortened(["a", "b", "c"], most=1)
        'a and 2 more'
    """
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest

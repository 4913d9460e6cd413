"""The errors that users see: one class for each kind, and one format for all their messages.

A message says what was asked, the op and the user's source line, what is there and what is required
(shardings, with sizes), and how to fix it. Fields that do not apply are left out.
"""

from typing import Any


class SpmdError(Exception):
    """Base of every error that `spmd` raises on purpose.

    Args:
      what: one sentence: what was asked and why it cannot be done.
      op: the op, mark or argument concerned, as text.
      source: `file.py:line (function)` of the user's code.
      actual: what is there, with sizes.
      required: what would have to be there, with sizes.
      fix: what to change.
    """

    def __init__(
        self, what: str, *, op: str | None = None, source: str | None = None,
        actual: str | None = None, required: str | None = None, fix: str | None = None,
    ) -> None:  # fmt: skip
        self.what, self.op, self.source = what, op, source
        self.actual, self.required, self.fix = actual, required, fix
        super().__init__(self.render())

    def at(self, source: str | None) -> None:
        """Gives the error a source line, where it has none."""
        self.source = self.source or source
        self.args = (self.render(),)

    def render(self) -> str:
        """Returns the message: `what`, then one indented line `name: text` for each other field."""
        fields = {"op": self.op, "at": self.source, "actual": self.actual}
        fields |= {"required": self.required, "fix": self.fix}
        return "\n".join(
            [self.what, *(f"  {name}: {text}" for name, text in fields.items() if text)]
        )


class MeshError(SpmdError):
    """Raised for a mesh that is missing, impossible, unfit for its use, or unlike another one."""


class SpecError(SpmdError):
    """Raised for a partition spec that does not fit its mesh, its tensor or its pytree."""


class UnsupportedOpError(SpmdError):
    """Raised for an op that `spmd` cannot partition, or not in the form in which it is used."""


class FrontendError(SpmdError):
    """Raised for a function or a StableHLO module that cannot be read into a `Program`."""


class PlanError(SpmdError):
    """Raised when no choice of shardings keeps to the memory limit under the given marks."""

    # Where the memory limit is the cause: bytes of one device that the smallest plan found needs,
    # or that every plan needs at least, if that is more than the limit already. Else 0.
    least_bytes: int = 0


class ArgumentError(SpmdError):
    """Raised for arguments that a call cannot take, or that do not match what was compiled."""


class LaunchError(SpmdError):
    """Raised when a job's processes are set up wrongly, too late, can't connect, fail or differ."""


class InstallError(SpmdError, ImportError):
    """Raised when a package that is needed is not installed, or its version does not work."""


class LegalityError(SpmdError):
    """Raised when a compiler stage made a malformed program: a bug in `spmd`, not the user's."""


def bytes_text(count: float) -> str:
    """Returns a number of bytes as text with about three digits: `1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds_text(seconds: float) -> str:
    """Returns a time, given in seconds, as text of three digits in s, ms or us: `1.25 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        count = seconds / scale
        if float(f"{count:.3g}") >= 1 or unit == "us":  # 999.9 us are 1 ms
            break
    return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"


def described(thing: Any) -> str:
    """Returns a value as text: `a float32 array of shape (8, 16)`; else its repr, shortened."""
    shape, dtype = getattr(thing, "shape", None), getattr(thing, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"a {dtype} array of shape {shape}"
    text = repr(thing)
    return text if len(text) <= 100 else f"{text[:97]}..."

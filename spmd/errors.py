"""The one family of errors that users see, and the one renderer that words them.

Every error says what was asked, the op and the user's source line, the actual and the required
sharding with sizes, and how to fix it. Fields that do not apply are left out.
"""

from __future__ import annotations

from typing import Any


class SpmdError(Exception):
    """Base of every error that `spmd` raises on purpose.

    Args:
      what: one sentence, what was asked and why it cannot be done.
      op: the op, mark or argument concerned, as text.
      source: `file.py:line (function)` of the user's code.
      actual: what is there, with sizes.
      required: what would have to be there, with sizes.
      fix: what to change.
    """

    def __init__(
        self,
        what: str,
        *,
        op: str | None = None,
        source: str | None = None,
        actual: str | None = None,
        required: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.op, self.source = what, op, source
        self.actual, self.required, self.fix = actual, required, fix
        super().__init__(self.render())

    def at(self, source: str | None) -> SpmdError:
        """Returns the same error with a source line, where it has none."""
        fields = {"op": self.op, "actual": self.actual, "required": self.required, "fix": self.fix}
        return type(self)(self.what, source=self.source or source, **fields)

    def render(self) -> str:
        """Returns the message: one line that says what, then one indented line for each field."""
        fields = {"op": self.op, "at": self.source, "actual": self.actual}
        fields |= {"required": self.required, "fix": self.fix}
        return "\n".join(
            [self.what, *(f"  {name}: {text}" for name, text in fields.items() if text)]
        )


class MeshError(SpmdError):
    """Raised for a mesh that cannot exist, or for two meshes where there must be one."""


class SpecError(SpmdError):
    """Raised for a partition spec that does not fit its mesh or its tensor."""


class UnsupportedOpError(SpmdError):
    """Raised for an op that has no rule, or a use of it that the rule does not cover."""


class FrontendError(SpmdError):
    """Raised for a module or function that cannot be imported."""


class PlanError(SpmdError):
    """Raised when no plan satisfies the marks and the limits."""

    # Of a memory limit that was not kept to: the least that was found, on one device, or what every
    # plan needs at least, where that is more than the limit already.
    least_bytes: int = 0


class ArgumentError(SpmdError):
    """Raised for arguments that a call cannot take, or that do not match what was compiled."""


class LaunchError(SpmdError):
    """Raised when processes of a job cannot come together, or are not about to do the same."""


class InstallError(SpmdError, ImportError):
    """Raised for a package that is not installed, or in a version that does not work."""


class LegalityError(SpmdError):
    """Raised when a stage broke its contract: a bug in `spmd`, never the user's fault."""


def bytes_text(count: float) -> str:
    """Writes a size in binary units with about three digits: `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds_text(seconds: float) -> str:
    """Writes a time with three digits, in s, ms or us: `1.25 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def described(thing: Any) -> str:
    """Describes what a user passed: `a float32 array of shape (8, 16)`, else by its repr."""
    shape, dtype = getattr(thing, "shape", None), getattr(thing, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"a {dtype} array of shape {shape}"
    text = repr(thing)
    return text if len(text) <= 100 else f"{text[:97]}..."

"""An extension of griffe, which reads docstrings for the site: `Example:` is a section of code.

griffe knows the code of a section `Examples:`, and takes `Example:` for prose in a box.
"""

import re
from typing import Any

import griffe

_TITLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Examples(griffe.Extension):  # type: ignore[misc]  # Any where griffe is missing
    """Renames the section before docstrings are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that was found."""
        if obj.docstring is not None:
            obj.docstring.value = _TITLE.sub(r"\1Examples:", obj.docstring.value)

"""Where spmd lies: in a checkout, or installed from a wheel, with the same names in both.

A wheel has the folders `models`, `serving`, `scripts` and `torch` inside `spmd`. In a checkout they
lie beside it (`torch` as `pytorch`: a folder `torch` would hide PyTorch), and links lead to them.
"""

import functools
import hashlib
import os
import re
from pathlib import Path

PACKAGE = Path(__file__).parent

USERS_OF_IT = ("models", "serving", "scripts")
"""Folders of programs that use the compiler, as a user's own do."""

COMPILER = tuple(str(path) for path in PACKAGE.iterdir() if path.name not in USERS_OF_IT)
"""How the paths of the compiler's own files begin: their frames are not a program's."""


@functools.cache
def source_digest() -> str:
    """Returns a digest of every Python file of the package, of those in linked folders too."""
    digest, walked = hashlib.sha256(), os.walk(PACKAGE, followlinks=True)
    for path in sorted(Path(top, name) for top, _, names in walked for name in names):
        if path.suffix == ".py":
            digest.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def as_called(text: str) -> str:
    """Returns a text that names programs as they are called here.

    Example:
      >>> as_called("run scripts/serve bundle")  # installed from a wheel: "run spmd-serve bundle"
      'run scripts/serve bundle'
    """
    if (PACKAGE / "scripts" / "serve").exists():  # a wheel has no shell scripts
        return text
    name = r"(?:\S*python )?\bscripts/(\w+)(?:\.py)?"
    return re.sub(name, lambda found: f"spmd-{found[1].replace('_', '-')}", text)

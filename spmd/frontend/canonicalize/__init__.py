"""Program to program: ops that are defined by others are written out in those.

Importing this package fills the table of them.
"""

from spmd.frontend.canonicalize import (  # noqa: F401
    chlo,
    contract,
    custom_call,
    dynamic,
    map,
    norm,
)

"""Program to program: ops that are defined by others are written out in those.

Importing this package fills the table of them.
"""

from spmd.frontend.canonicalize import rules  # noqa: F401

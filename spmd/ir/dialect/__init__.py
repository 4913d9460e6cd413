"""Every op, described once, by family. Importing this package fills the table of descriptions."""

from spmd.ir.dialect import (  # noqa: F401
    callbacks,
    collectives,
    contract,
    elementwise,
    linalg,
    manual,
    window,
)

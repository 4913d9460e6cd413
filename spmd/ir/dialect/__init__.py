"""Every op, described once, by family. Importing this package fills the table of descriptions."""

from spmd.ir.dialect import (  # noqa: F401
    callbacks,
    calls,
    collectives,
    contract,
    control,
    elementwise,
    index,
    linalg,
    manual,
    shape,
    sort,
    window,
)

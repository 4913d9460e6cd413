"""Every op, described once. Importing this package fills the registry with all descriptions."""

from spmd.ir.dialect import (  # noqa: F401
    contract,
    elementwise,
    index,
    linalg,
    manual,
    misc,
    ragged,
    random,
    shape,
    sort,
    window,
)

"""What each op becomes on one device. Importing this package fills the table of local lowerings."""

from spmd.lowering.local import (  # noqa: F401
    callbacks,
    index,
    merge,
    shape,
    window,
)

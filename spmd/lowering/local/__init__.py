"""What each op becomes on one device. Importing this package fills the table of local lowerings."""

from spmd.lowering.local import (  # noqa: F401
    contract,
    convolution,
    dynamic_slice,
    index,
    merge,
    moves,
    ragged,
    shape,
    window,
)

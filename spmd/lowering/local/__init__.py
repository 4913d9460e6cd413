"""What each op becomes on one device. Importing this package fills the table of local lowerings."""

from spmd.lowering.local import (  # noqa: F401
    contract,
    convolution,
    dynamic_slice,
    elementwise,
    index,
    linalg,
    manual,
    merge,
    misc,
    moves,
    ragged,
    random,
    shape,
    window,
)

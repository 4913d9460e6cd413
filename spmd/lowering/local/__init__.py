"""What each op becomes on one device. Importing this package fills the table of local lowerings."""

from spmd.lowering.local import callbacks, merge, shape, window  # noqa: F401

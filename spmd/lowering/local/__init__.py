"""Local lowerings: what each op becomes on one device. Importing this package registers them."""

from spmd.lowering.local import callbacks, merge, shape, window  # noqa: F401

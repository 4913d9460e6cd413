"""Recomputation: what would not fit in memory is made again where it is read."""

"""Rewrites of the local program, one file each, in the order of `optimize.py`."""

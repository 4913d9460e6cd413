"""Program to program: ops that are defined by others are written out in those."""

"""Rewrites of the local program that save work, and join or hide collectives.

`simplify` comes first, then `slices`, remat (`spmd.lowering.recompute`) and `schedule`. What
`slices` makes of a program, and on TPUs what `ring` does, `spmd.compiler.Trial` takes where it is
faster.
"""

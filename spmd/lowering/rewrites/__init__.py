"""Rewrites of the local program that save work, and join or hide collectives.

`simplify` comes first, then remat (`spmd.lowering.recompute`), then `schedule`. On TPUs `schedule`
also gets what `ring` makes of the program, and `spmd.compiler.Trial` takes the faster result.
"""

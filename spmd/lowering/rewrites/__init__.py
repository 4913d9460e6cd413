"""Rewrites of the local program: each one's result may give the next one more to do.

`simplify` comes first, then recomputation (`spmd.lowering.recompute`), then `schedule`, of the
program as it is and of the one whose sums travel (`ring`): `spmd.trial` takes the faster.
"""

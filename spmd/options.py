"""`Options`: everything about a compilation that is not the program, the mesh or the marks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spmd.errors import ArgumentError
from spmd.mesh.topology import Topology


@dataclass(frozen=True)
class Options:
    """Holds the options of one compilation.

    Attributes:
      topology: the machine to plan for; guessed from the mesh's devices when left out.
      planner: `exact` weighs all decisions together, `greedy` takes them in program order.
      memory_limit: bytes that one device may be predicted to use: missing it is an error. Without
        it the plan aims at what the topology's devices have room for, which on GPUs is 90% of their
        memory and on TPUs 60% (`spmd.predict.backends`), and says so where it misses it.
      recompute: whether a program may make values again (a gathered weight, an activation) rather
        than hold them, where memory is short or where that is faster; `explain()` tells which.
      combine_bytes: small gathers and reductions over the same axes travel together, up to this
        many bytes (and memory) at a time; those of more than a quarter of it travel alone. 0: all.
      prefetch: how many gathers over the same links may be under way or wait ahead of their use;
        each takes memory. 0 leaves collectives where they are wanted.
      layouts: whether arguments that are donated, and the results that take their place, lie in
        memory as the program's collectives want them (`Compiled.in_formats`); else major to minor.
        None: where these would transpose them otherwise, which is on GPUs.
      unroll: loops that run at most so often (a `scan` over layers, say) are written out, once for
        each time. XLA then overlaps one layer's communication with the next, and copies no stacks
        of residuals; it compiles longer. 0: loops stay. None: on GPUs and TPUs, where 3,000 runs
        are predicted to save more time than it takes to compile.
      callbacks: `run`, or `drop` to leave `jax.debug.print` and `jax.debug.callback` out of the
        program. Callbacks whose results it reads, and `io_callback`, always run.
      check: verify every stage's result against its legality table.
      verbose: print the time of every stage.
      progress: say what a compilation of more than a second or two is doing, in one line that is
        erased at the end; on terminals and in notebooks alone, never in logs.
      cache_dir: the folder in which plans are kept, so that the next start with the same program
        plans nothing; `none` keeps nothing. Left out: `$SPMD_CACHE_DIR`, else jax's compilation
        cache, else `~/.cache/spmd`.
      compiler_options: passed to XLA as they are, over what is set for the platform by default
        (`spmd.lowering.xla_options.DEFAULTS`).
    """

    topology: Topology | None = None
    planner: Literal["exact", "greedy"] = "exact"
    memory_limit: int | None = None
    recompute: bool = True
    combine_bytes: int = 4 << 20
    prefetch: int = 2
    layouts: bool | None = None
    unroll: int | None = None
    callbacks: Literal["run", "drop"] = "run"
    check: bool = False
    verbose: bool = False
    progress: bool = True
    cache_dir: str | os.PathLike[str] | None = None
    compiler_options: Mapping[str, str | bool | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.unroll is not None and self.unroll < 0:
            raise ArgumentError(f"unroll={self.unroll} is no option", required="at least 0")
        for name, known in (("planner", ("exact", "greedy")), ("callbacks", ("run", "drop"))):
            if getattr(self, name) not in known:
                raise ArgumentError(
                    f"{name}={getattr(self, name)!r} is no option",
                    required=f"one of {', '.join(map(repr, known))}",
                )

    @property
    def shows_progress(self) -> bool:
        """Whether the line of `progress` is shown; prints of `verbose` would break it."""
        return self.progress and not self.verbose

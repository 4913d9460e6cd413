"""`Options`: the settings of a compilation besides the program, its mesh and its marks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spmd.errors import ArgumentError
from spmd.mesh.topology import Topology


@dataclass(frozen=True)
class Options:
    """The settings of one compilation.

    Attributes:
      topology: the machine to plan for; that of the mesh's devices when left out.
      planner: `exact` chooses all shardings together, by predicted time; `greedy` op after op.
      memory_limit: bytes that one device may be predicted to use; PlanError if no plan keeps to it.
        None: the plan aims at what the topology's devices have room for, which on GPUs is 90% of
        their memory and on TPUs 60% (`spmd.predict.backends`); `explain()` says if it needs more.
      recompute: whether a program may compute values again (remat of an activation, a second gather
        of a weight) rather than hold them, where memory is short or where that is faster.
      combine_bytes: small gathers and reductions over the same axes are combined, into collectives
        of up to this many bytes (and memory); those of over a quarter of it are not. 0: none is.
      prefetch: how many gathers over the same links may run or have run ahead of the ops that read
        them; each takes memory. 0: collectives stay where they are needed.
      layouts: whether donated arguments, and the results that replace them, have their dims in the
        order in memory that collectives need (`Compiled.in_formats`); else major to minor. None:
        on GPUs, where collectives along another dim than the outermost would transpose them.
      unroll: loops of at most this many trips (a `scan` over layers, say) are unrolled. XLA then
        overlaps one layer's communication with the next, and copies no stacks of residuals; it
        compiles longer. 0: no loop. None: those loops, on GPUs and TPUs, where 3,000 runs are
        predicted to save more time than compiling takes.
      callbacks: `run`, or `drop` to leave `jax.debug.print` and `jax.debug.callback` out of the
        program. `io_callback`, and callbacks whose results the program reads, always run.
      check: check every stage's program for errors of the compiler itself (LegalityError).
      verbose: print the time of every stage on stderr.
      progress: show what a compilation of more than a second or two is doing, in one line that is
        erased at the end; on terminals and in notebooks alone, never in logs.
      cache_dir: the folder in which plans are kept, so that the next process with the same program
        need not plan it; `none` keeps nothing. None: `$SPMD_CACHE_DIR`, else a folder in that of
        jax's compilation cache, else `~/.cache/spmd`.
      compiler_options: passed to XLA as they are; they override the defaults for the platform
        (`spmd.lowering.execute.DEFAULTS`).
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
        """Whether to show the line of `progress`: not with `verbose`, whose prints break it."""
        return self.progress and not self.verbose

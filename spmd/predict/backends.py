"""How XLA's backends differ: in memory, layouts, loops, and the time that they take to compile.

The table says what XLA's buffer assignments show. CPUs are the backend on which predictions
are compared with XLA's figures for every program (`benchmarks/memory.py`).
"""

from importlib.metadata import version
from typing import Literal, NamedTuple

from spmd.mesh.topology import Topology


class XlaBackend(NamedTuple):
    """How one backend of XLA differs from the others in its use of memory and of time."""

    # 16-bit floats are held as 32-bit ones, arguments and results excepted.
    widens_halves: bool = False
    # Kernels are those of CPUs. They run in the order in which their operands get ready, so that
    # independent ones can run at the same time, and all-reduces that do not wait for each other
    # become one; else kernels run in the order of the program. Contractions, convolutions and
    # collectives want dims in one order, and read other operands transposed. Sums and maxima of
    # float32 are library calls, which compute inside what leads to their operand alone and what the
    # library has. Elementwise ops are computed inside every reader that can do so, whatever it then
    # reads; else not where storing the value costs less (`wide_values`). Barriers are gone before
    # anything is fused. A select_and_scatter is a scatter to indices that are found first.
    is_cpu: bool = False
    # Gathers and reduce-scatters join and cut pieces along the outermost dim in memory; a tensor in
    # which another dim lies there is transposed.
    joins_outermost: bool = False
    # Running totals (cumsum) are totals of tiles and what lies before each tile
    # (`ReduceWindowRewriter`).
    rewrites_windows: bool = False
    fills_results: bool = False  # values that are dead by then lie in a result's memory before it
    # The share of a device's memory that a prediction may fill; the compiler may take the rest.
    fills: float = 1.0
    compile_seconds: float = 0.0  # of one more op of a program
    # One trip of a loop begins when the one before has ended, its collectives too, which could run
    # beside the next trip's arithmetic otherwise.
    waits_at_loops: bool = False
    waits_for: tuple[str, ...] = ()  # kinds of collectives beside which nothing is computed


_KEEPS_HALVES = (0, 11)  # jaxlib from which on XLA computes with 16-bit floats on CPUs

_CPU = XlaBackend(
    widens_halves=tuple(map(int, version("jaxlib").split(".")[:2])) < _KEEPS_HALVES,
    is_cpu=True,
    rewrites_windows=True,
    fills_results=True,
)

# 32 layers of a Llama took 20 s more on GPUs when they were written out; libtpu 0.0.42 takes 24 s
# of two cores' time for each more. It compiles with all cores, of which hosts of TPUs have at least
# 24: a sixth of that is reckoned.
# The TPU compiler reports up to 1.8 times the prediction, where many layers' inputs are stacked
# (docs/benchmarks/tpu.md); XLA on GPUs up to a tenth more.
_GPU = XlaBackend(
    joins_outermost=True,
    fills=0.9,
    rewrites_windows=True,
    fills_results=True,
    compile_seconds=2e-3,
    waits_at_loops=True,
)
_TPU = XlaBackend(
    fills=0.6,
    compile_seconds=1e-2,
    waits_at_loops=True,
    waits_for=("reduce_scatter", "all_reduce", "all_to_all"),  # docs/benchmarks/tpu.md
)


def backend_of(platform: str | None) -> XlaBackend:
    """Returns the `XlaBackend` of a platform of jax; for an unknown one that of defaults."""
    known = {"cpu": _CPU, "cuda": _GPU, "rocm": _GPU, "tpu": _TPU}
    return known.get(platform or "", XlaBackend())


def memory_for(topology: Topology, limit: int | None) -> int:
    """Returns the bytes a program may take on a device: `limit`, else its memory less headroom."""
    return int(backend_of(topology.platform).fills * topology.hbm_bytes) if limit is None else limit


def room_for(peak: int, topology: Topology) -> Literal["fits", "tight", "does not fit"]:
    """Says whether `peak` bytes fit a device; `tight`: they do, but without the usual headroom."""
    if peak <= memory_for(topology, None):
        return "fits"
    return "tight" if peak <= topology.hbm_bytes else "does not fit"

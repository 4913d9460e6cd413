"""What a collective costs: the alpha-beta model, latency of its steps plus bytes on the wire.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
in MPICH" (bytes of the bandwidth-optimal, steps of the latency-optimal algorithms); Rink et al.
2021, "Memory-efficient array redistribution through portable collective communication".
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from spmd.errors import LegalityError
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology

KINDS = (
    "slice", "all_gather", "all_to_all", "collective_permute", "reduce_scatter", "all_reduce",
    "collective_broadcast", "ragged_all_to_all",
)  # fmt: skip
"""The kinds of steps of a reshard; `slice` sends nothing, and only a user's own program broadcasts.
The ragged all-to-all is inside of composites, and its bytes are those that are expected."""


def group_size(attrs: Mapping[str, Any], mesh: Mesh) -> int:
    """Returns how many devices a group of a collective has, by its `groups` or its atoms `axes`."""
    return len(attrs["groups"][0]) if "groups" in attrs else mesh.extent(attrs["axes"])


def wire_bytes(kind: str, group_size: int, local_in_bytes: int, local_out_bytes: int) -> int:
    """Returns the bytes that each device sends by a ring algorithm; LegalityError for other kinds.

    It takes one device's bytes before and after: an all-gather among 4 into 400 bytes sends 300.
    """
    if kind == "slice" or group_size == 1:
        return 0
    if kind in ("collective_permute", "collective_broadcast"):
        return local_in_bytes
    others = group_size - 1
    if kind == "all_gather":
        return -(-local_out_bytes * others // group_size)
    if kind in ("reduce_scatter", "all_to_all", "ragged_all_to_all"):
        return -(-local_in_bytes * others // group_size)
    if kind == "all_reduce":
        return -(-2 * local_in_bytes * others // group_size)
    raise LegalityError(f"{kind!r} is no kind of collective", required=f"one of {', '.join(KINDS)}")


def latency_steps(kind: str, atom_sizes: Sequence[int]) -> int:
    """Returns how many messages of a collective follow one another; its start counts as one.

    An atom of size n adds n - 1, in an all-reduce twice that. In an all-to-all and a permute all
    messages go at once, which makes 2.
    """
    if kind in ("all_to_all", "ragged_all_to_all", "collective_permute"):
        return 2
    rounds = sum(atom_sizes) - len(atom_sizes)
    return 1 + (2 * rounds if kind == "all_reduce" else rounds)


def run_as(kind: str, atoms: Sequence[int], mesh: Mesh, topology: Topology) -> str:
    """Returns the kind of collective that a backend really runs for one of the given kind.

    The TPU compiler turns a reduce-scatter over all, and more than eight, devices into an
    all-reduce, which sends twice as much, but over the links of all torus dims at once, not of one.
    Seen with libtpu 0.0.42 on v4, v5e, v5p and v6e.
    """
    whole = kind == "reduce_scatter" and mesh.extent(atoms) == topology.count > 8
    return "all_reduce" if whole and topology.platform == "tpu" else kind


class Terms(NamedTuple):
    """What a collective costs, whatever the value's size: latency in s, pace in s per byte sent."""

    kind: str  # one of `KINDS`, as the backend runs it
    group: int  # devices that exchange with one another
    latency: float  # seconds of one that moves nothing
    pace: float  # seconds for each byte on the wire

    def cost(self, local_in_bytes: int, local_out_bytes: int) -> tuple[float, int]:
        """Returns (seconds, bytes each device sends), given its bytes before and after."""
        sent = wire_bytes(self.kind, self.group, local_in_bytes, local_out_bytes)
        return self.latency + sent * self.pace, sent


@lru_cache(maxsize=1 << 14)
def terms_of(kind: str, atoms: Axes, mesh: Mesh, topology: Topology) -> Terms:
    """Returns the latency and the pace of a collective over some atoms.

    Inside a host they are as measured, if they were; else each step takes the latency of the
    slowest link, and bytes go at the least bandwidth.
    """
    kind, group = run_as(kind, atoms, mesh, topology), mesh.extent(atoms)
    if kind == "slice" or not atoms:
        return Terms(kind, group, 0.0, 0.0)
    links = [topology.atom_links(mesh)[a] for a in atoms]
    if all(link == topology.chip.ici for link in links):
        like = "all_to_all" if kind == "ragged_all_to_all" else kind
        measured = topology.measured(like, group)
        if measured is not None:
            return Terms(kind, group, measured.latency, 1 / measured.bandwidth)
    steps = latency_steps(kind, [mesh.atom_sizes[a] for a in atoms])
    pace = 1 / min(x.bandwidth for x in links)
    if kind == "ragged_all_to_all":
        pace *= max(topology.detour(mesh, axis) for axis in {mesh.atoms[a].axis for a in atoms})
    return Terms(kind, group, max(x.latency for x in links) * steps, pace)


def collective_seconds(
    kind: str,
    atoms: Sequence[int],
    local_in_bytes: int,
    local_out_bytes: int,
    mesh: Mesh,
    topology: Topology,
) -> float:
    """Returns the predicted seconds of a collective of a kind of `KINDS` over some atoms."""
    return terms_of(kind, tuple(atoms), mesh, topology).cost(local_in_bytes, local_out_bytes)[0]

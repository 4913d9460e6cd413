"""The results as tables: one line for each program, one for each family."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.byte_rows import Moved, Row
from benchmarks.shardy_bytes import Peer

LEAST, MOST = 0.05, 20.0
"""A ratio beyond these counts as this much in a mean: a mean of logarithms knows no zero."""

SUMMED_UP = ("reshard",)
"""Families of very many small programs, of which only those lines are shown that say something."""


MORE_ARITHMETIC = 1.1
"""A program for which we compute more than this times what XLA does counts in no mean."""


class Result(NamedTuple):
    """A program's row and what Shardy did with it, where that was asked for."""

    row: Row
    peer: Peer | None = None

    @property
    def family(self) -> str:
        """As in `Program.family`."""
        return self.row.name.partition("/")[0]

    @property
    def peer_ratio(self) -> float | None:
        """Our bytes over Shardy's."""
        if self.row.spmd is None or self.peer is None or self.peer.bytes is None:
            return None
        return ratio(self.row.spmd.bytes, self.peer.bytes)


def ratio(ours: int, theirs: int) -> float:
    """Of bytes; 1 where nobody moves any."""
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else math.inf


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Of those that are there, each held between `LEAST` and `MOST`."""
    logs = [math.log(min(max(r, LEAST), MOST)) for r in ratios if r is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


HEADER = (
    "program", "spmd MB", "XLA MB", "given MB", "ratio", "collectives", "of given",
    "temp MiB", "of given", "MFLOP", "of given", "predicted MB", "Shardy MB", "plan s", "XLA s",
)  # fmt: skip


def program_lines(results: Sequence[Result], everything: bool) -> list[list[str]]:
    """One line for each program.

    Args:
      everything: whether families that are `SUMMED_UP` show each of their programs, not just
        those in which somebody moves less than we do.
    """
    return [_line(r) for r in results if everything or r.family not in SUMMED_UP or _is_worse(r)]


def _is_worse(result: Result) -> bool:
    return result.row.ratio is None or max(result.row.ratio, result.peer_ratio or 0) > 1


def _line(result: Result) -> list[str]:
    row = result.row
    return [
        row.name,
        _bytes(row.spmd, row.errors.get("spmd")),
        _bytes(row.alone, row.errors.get("alone")),
        _bytes(row.given, row.errors.get("given")),
        _number(row.ratio),
        str(row.spmd.collectives) if row.spmd else "",
        str(row.given.collectives) if row.given else "",
        f"{row.spmd.temporary / 2**20:.1f}" if row.spmd else "",
        f"{row.given.temporary / 2**20:.1f}" if row.given else "",
        f"{row.spmd.flops / 1e6:.0f}" if row.spmd else "",
        f"{row.given.flops / 1e6:.0f}" if row.given else "",
        "" if row.predicted is None else megabytes(row.predicted),
        _peer(result.peer),
        "" if row.planning is None else f"{row.planning:.2f}",
        f"{row.given.seconds:.2f}" if row.given else "",
    ]


def _bytes(moved: Moved | None, error: str | None) -> str:
    return error or "" if moved is None else megabytes(moved.bytes)


def _peer(peer: Peer | None) -> str:
    if peer is None:
        return ""
    return peer.failure if peer.bytes is None else megabytes(peer.bytes)


def megabytes(count: int) -> str:
    """In units of 10^6 bytes."""
    return f"{count / 1e6:.3f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


FAMILY_HEADER = (
    "family", "programs", "fewer bytes", "as many", "more", "mean ratio", "mean to Shardy",
)  # fmt: skip


def family_lines(results: Sequence[Result]) -> list[list[str]]:
    """One line for each family and one for all of them, which weighs every family alike."""
    families: dict[str, list[Result]] = {}
    for result in results:
        families.setdefault(result.family, []).append(result)
    means = {name: _means(found) for name, found in families.items()}
    lines = [
        [name, str(len(found)), *_tally(found), *map(_number, means[name])]
        for name, found in families.items()
    ]
    if len(families) > 1:
        over_all = [geometric_mean(mean[k] for mean in means.values()) for k in range(2)]
        tally = _tally(results)
        lines.append(["all", str(len(results)), *tally, *map(_number, over_all)])
    return lines


def _means(results: Sequence[Result]) -> tuple[float | None, float | None]:
    fair = [r for r in results if not buys_bytes(r.row)]
    return (
        geometric_mean(r.row.ratio for r in fair),
        geometric_mean(r.peer_ratio for r in fair),
    )


def buys_bytes(row: Row) -> bool:
    """Whether our program pays with arithmetic, the same on several devices, for sending less."""
    if row.spmd is None or row.given is None:
        return False
    return row.spmd.flops > MORE_ARITHMETIC * row.given.flops


def planning_line(results: Sequence[Result]) -> str:
    """How long planning took beside XLA's compilation of the peer, in a sentence."""
    shares = sorted(
        (r.row.planning / r.row.given.seconds, r.row.name)
        for r in results
        if r.row.planning is not None and r.row.given is not None
    )
    if not shares:
        return ""
    (middle, _), (most, where) = shares[len(shares) // 2], shares[-1]
    slow = sum(share > 0.1 for share, _ in shares)
    return (
        f"Planning took {middle:.1%} of XLA's compilation in the median, {most:.1%} at most "
        f"({where}); more than 10% for {slow} of {len(shares)}."
    )


def explained_line(results: Sequence[Result]) -> str:
    """How many of all collectives say where they come from and why they are there."""
    named, total = (sum(r.row.explained[i] for r in results) for i in range(2))
    return f"{named} of our {total} collectives name a source line and a reason."


def _tally(results: Sequence[Result]) -> list[str]:
    ratios = [r.row.ratio for r in results if r.row.ratio is not None]
    return [
        str(sum(r < 1 for r in ratios)),
        str(sum(r == 1 for r in ratios)),
        str(sum(r > 1 for r in ratios)),
    ]


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table for a page."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    rows = [header, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def as_json(result: Result) -> Mapping[str, object]:
    """Everything about a program, for a file."""

    def side(moved: Moved | None) -> object:
        return None if moved is None else {**moved._asdict(), "kinds": dict(moved.kinds)}

    row = result.row
    return {
        "name": row.name,
        "spmd": side(row.spmd),
        "xla_alone": side(row.alone),
        "xla_given": side(row.given),
        "ratio": row.ratio,
        "predicted_bytes": row.predicted,
        "planning_seconds": row.planning,
        "shardy": None if result.peer is None else result.peer._asdict(),
        "errors": dict(row.errors),
    }

"""Two plans side by side: what changed, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from spmd.explain.collectives import Collective
from spmd.explain.facts import Facts
from spmd.explain.leaves import Group, Leaf, group_leaves
from spmd.explain.tables import values_inside
from spmd.explain.text.layout import Lines, aligned, section
from spmd.explain.words import bytes_text, plural, seconds_text, source_text, spec_text, type_text
from spmd.ir.types import local_type

MOST = 12
"""Rows of each part that are shown, the largest; the others are counted."""


def diff_text(a: Facts, b: Facts) -> str:
    """What changed from one plan to another."""
    changes = (
        _leaves("arguments", a, b, (a.arguments, b.arguments)),
        _leaves("results", a, b, (a.results, b.results)),
        _values(a, b),
        _collectives(a.collectives, b.collectives),
    )
    lines = [line for lines in changes for line in lines] or ["nothing changed"]
    return "\n".join([*_costs(a, b), *lines]).rstrip() + "\n"


# ---------------------------------------------------------------------------------------------
# Costs.


def _costs(a: Facts, b: Facts) -> Lines:
    """What both plans are of, and their figures."""
    about = [
        (key, facts.title, f"{facts.plan.mesh} on {facts.plan.topology}")
        for key, facts in (("a", a), ("b", b))
    ]
    rows = [_figure("predicted time", a.timeline.seconds, b.timeline.seconds, seconds_text)]
    if a.measured and b.measured:
        rows.append(_figure("measured time", a.measured.seconds, b.measured.seconds, seconds_text))
    rows.append(_figure("sent by each device", a.sent_bytes, b.sent_bytes, bytes_text))
    if a.use and b.use:
        rows.append(_figure("peak memory, predicted", a.use.peak, b.use.peak, bytes_text))
    table = aligned([("", "a", "b", "b - a"), *rows], right=(1, 2, 3))
    return section("programs", [*aligned(about), *table])


def _figure(
    what: str, a: float, b: float, text: Callable[[float], str]
) -> tuple[str, str, str, str]:
    if a == b:
        return what, text(a), text(b), "the same"
    share = f" ({(b - a) / a:+.1%})" if a else ""
    return what, text(a), text(b), f"{'-' if b < a else '+'}{text(abs(b - a))}{share}"


# ---------------------------------------------------------------------------------------------
# Shardings.


def _leaves(what: str, a: Facts, b: Facts, given: tuple[Sequence[Leaf], Sequence[Leaf]]) -> Lines:
    """Arguments or results that lie otherwise; those whose names are alike together."""
    before, after = ({leaf.name: leaf for leaf in leaves} for leaves in given)

    def change(leaf: Leaf) -> tuple[str, str]:
        old, new = _spec(before.get(leaf.name), a), _spec(after.get(leaf.name), b)
        return type_text(leaf.type), f"{old} -> {new}" if old != new else ""

    def held(group: Group, leaves: Mapping[str, Leaf]) -> int:
        return sum(leaves[leaf.name].local.bytes for leaf in group.leaves if leaf.name in leaves)

    every = [*before.values(), *(leaf for name, leaf in after.items() if name not in before)]
    changed = [leaf for leaf in every if change(leaf)[1]]
    rows = []
    for group in group_leaves(changed, change):
        sizes = held(group, before), held(group, after)
        name = f"{group.pattern} ({len(group.leaves)})" if group.leaves[1:] else group.pattern
        text = f"{bytes_text(sizes[0])} -> {bytes_text(sizes[1])}"
        rows.append((max(sizes), (name, *change(group.leaves[0]), text)))
    rows.sort(key=lambda row: -row[0])
    title = f"{what}: {len(changed)} of {len(every)} lie otherwise"
    return _rows(title, [row for _, row in rows])


def _spec(leaf: Leaf | None, facts: Facts) -> str:
    return "none" if leaf is None else spec_text(leaf.sharding, facts.plan.mesh)


def _values(a: Facts, b: Facts) -> Lines:
    """Values inside that lie otherwise: those that one op at one source line makes together."""
    # How many there are may differ by what is computed twice: only their shardings are compared.
    before, after = _shardings_inside(a), _shardings_inside(b)
    keys = dict.fromkeys([*before, *after])
    both = [(key, before.get(key, _Inside()), after.get(key, _Inside())) for key in keys]
    changed = [(key, old, new) for key, old, new in both if old.shardings != new.shardings]
    changed.sort(key=lambda row: -max(row[1].bytes, row[2].bytes))
    rows = [
        (op, type_, source_text(source).partition(" <- ")[0], f"{old.text} -> {new.text}")
        for (op, type_, source), old, new in changed
    ]
    title = f"values inside: {len(changed)} kinds lie otherwise, the largest first"
    return _rows(title, rows, MOST // 2)


class _Inside(NamedTuple):
    """The shardings of values that one op makes, with the bytes of the largest on a device."""

    shardings: frozenset[str] = frozenset()
    bytes: int = 0

    @property
    def text(self) -> str:
        """`("data", None) and replicated`; `none` where there is no such value."""
        return " and ".join(sorted(self.shardings)) or "none"


_Key = tuple[str, str, str]


def _shardings_inside(facts: Facts) -> dict[_Key, _Inside]:
    """(op, type, source line) -> the shardings."""
    mesh = facts.plan.mesh
    found: dict[_Key, _Inside] = {}
    for op, type_, sharding, trail in values_inside(facts.stages):
        if op.startswith("copy for "):  # what copies cost is among the collectives
            continue
        key = (op, type_text(type_), trail)
        old = found.get(key, _Inside())
        size = local_type(type_, sharding, mesh).bytes
        found[key] = _Inside(old.shardings | {spec_text(sharding, mesh)}, max(old.bytes, size))
    return found


# ---------------------------------------------------------------------------------------------
# Collectives.


class _Sum(NamedTuple):
    """Collectives of one kind, at one place, over the same axes."""

    runs: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return f"{plural(self.runs, 'run')}, {bytes_text(self.bytes)}, {seconds_text(self.seconds)}"


def _collectives(a: Iterable[Collective], b: Iterable[Collective]) -> Lines:
    """Those that were added (+), removed (-) or resized (~), by layer and source line."""
    before, after = _sums(a), _sums(b)
    none = _Sum()
    changed: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    sizes: Counter[tuple[str, str]] = Counter()
    signs: Counter[str] = Counter()
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, none), after.get(key, none)
        if old[:2] == new[:2]:
            continue
        place, what = key[:2], f"{key[2]} over {key[3]}"
        sign = "~" if old.runs and new.runs else "+" if new.runs else "-"
        text = f"{old.text} -> {new.text}" if sign == "~" else (new if new.runs else old).text
        changed.setdefault(place, []).append((sign, what, text))
        sizes[place] += abs(new.bytes - old.bytes)
        signs[sign] += 1
    words = (("+", "added"), ("-", "removed"), ("~", "resized"))
    title = ", ".join(f"{signs[sign]} {word}" for sign, word in words if signs[sign])
    lines: list[str] = []
    places = [place for place, _ in sizes.most_common()]
    for place in places[:MOST]:
        layer, source = place
        text = source_text(source) or "no source line"
        is_said = all(f"({name})" in text for name in layer.split("/"))  # functions, no scope
        lines.append(text if is_said or not layer else f"{layer}, {text}")
        lines += [f"  {row}" for row in aligned(sorted(changed[place]))]
    if len(places) > MOST:
        lines.append(f"and at {len(places) - MOST} more places")
    return section(f"collectives: {title}", lines)


def _sums(collectives: Iterable[Collective]) -> dict[tuple[str, str, str, str], _Sum]:
    """(layer, source line, kind, axes) -> sum."""
    found: dict[tuple[str, str, str, str], _Sum] = {}
    for c in collectives:
        key = (c.layer, c.source, c.kind, ", ".join(c.axes))
        runs, sent, seconds = found.get(key, _Sum())
        found[key] = _Sum(runs + c.count, sent + c.bytes * c.count, seconds + c.seconds * c.count)
    return found


def _rows(title: str, rows: Sequence[Sequence[str]], most: int = MOST) -> Lines:
    """The first rows under a title."""
    lines = aligned(rows[:most])
    if len(rows) > most:
        lines.append(f"and {len(rows) - most} more")
    return section(title, lines)

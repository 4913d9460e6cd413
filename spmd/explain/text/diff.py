"""Two plans side by side: what changed, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from spmd.explain.costs import Collective, Total, totals
from spmd.explain.document import Lines, aligned, section
from spmd.explain.facts import Facts
from spmd.explain.leaves import Group, Leaf, group_leaves, values_inside
from spmd.explain.words import bytes_text, plural, seconds_text, source_text, spec_text, type_text
from spmd.ir.types import local_type

MOST = 12  # rows of each part that are shown, the largest; the others are counted


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
    rows = []
    for key in dict.fromkeys([*before, *after]):
        (old, held), (new, holds) = before.get(key, ("none", 0)), after.get(key, ("none", 0))
        if old != new:
            op, type_, source = key
            place = source_text(source).partition(" <- ")[0]
            rows.append((max(held, holds), (op, type_, place, f"{old} -> {new}")))
    rows.sort(key=lambda row: -row[0])
    title = f"values inside: {len(rows)} kinds lie otherwise, the largest first"
    return _rows(title, [row for _, row in rows], MOST // 2)


def _shardings_inside(facts: Facts) -> dict[tuple[str, str, str], tuple[str, int]]:
    """(op, type, source line) -> its values' shardings, and bytes of the largest on a device."""
    mesh = facts.plan.mesh
    found: dict[tuple[str, str, str], tuple[set[str], int]] = {}
    for op, type_, sharding, trail in values_inside(facts.plan):
        if not op.startswith("copy for "):  # what copies cost is among the collectives
            key = (op, type_text(type_), trail)
            specs, most = found.get(key, (set(), 0))
            size = local_type(type_, sharding, mesh).bytes
            found[key] = specs | {spec_text(sharding, mesh)}, max(most, size)
    return {key: (" and ".join(sorted(specs)), most) for key, (specs, most) in found.items()}


# ---------------------------------------------------------------------------------------------
# Collectives.


def _collectives(a: Iterable[Collective], b: Iterable[Collective]) -> Lines:
    """Those that were added (+), removed (-) or resized (~), by layer and source line."""

    def place(c: Collective) -> tuple[str, str, str]:
        return c.layer, c.source, f"{c.kind} over {', '.join(c.axes)}"

    def text(total: Total) -> str:
        sent, seconds = bytes_text(total.bytes), seconds_text(total.seconds)
        return f"{plural(total.runs, 'run')}, {sent}, {seconds}"

    # What never runs is not there.
    before, after = (totals((c for c in run if c.count), place) for run in (a, b))
    changed: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    sizes: Counter[tuple[str, str]] = Counter()
    signs: Counter[str] = Counter()
    for layer, source, what in dict.fromkeys([*before, *after]):
        old, new = before.get((layer, source, what)), after.get((layer, source, what))
        if old and new and (old.runs, old.bytes) == (new.runs, new.bytes):
            continue
        sign = "~" if old and new else "+" if new else "-"
        figures = " -> ".join(text(total) for total in (old, new) if total)
        changed.setdefault((layer, source), []).append((sign, what, figures))
        sizes[layer, source] += abs((new.bytes if new else 0) - (old.bytes if old else 0))
        signs[sign] += 1
    words = (("+", "added"), ("-", "removed"), ("~", "resized"))
    title = ", ".join(f"{signs[sign]} {word}" for sign, word in words if signs[sign])
    lines: list[str] = []
    places = [key for key, _ in sizes.most_common()]
    for layer, source in places[:MOST]:
        line = source_text(source) or "no source line"
        is_said = all(f"({name})" in line for name in layer.split("/"))  # functions, no scope
        lines.append(line if is_said or not layer else f"{layer}, {line}")
        lines += [f"  {row}" for row in aligned(sorted(changed[layer, source]))]
    if len(places) > MOST:
        lines.append(f"and at {len(places) - MOST} more places")
    return section(f"collectives: {title}", lines)


def _rows(title: str, rows: Sequence[Sequence[str]], most: int = MOST) -> Lines:
    lines = aligned(rows[:most])
    if len(rows) > most:
        lines.append(f"and {len(rows) - most} more")
    return section(title, lines)

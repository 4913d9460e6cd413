"""Profiles written by hand: the planes, lines and events that jax records, as text."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax


class Made(NamedTuple):
    """An event: times in microseconds, and stats."""

    name: str
    start: float
    end: float
    stats: Mapping[str, Any] = MappingProxyType({})


def profile(planes: dict[str, dict[str, list[Made]]]) -> Any:
    """A profile of planes -> lines -> events."""
    text = "".join(_plane(name, lines) for name, lines in planes.items())
    space = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    return jax.profiler.ProfileData.from_serialized_xspace(space)


def _plane(name: str, lines: dict[str, list[Made]]) -> str:
    events = [event for line in lines.values() for event in line]
    numbers = {n: i for i, n in enumerate(dict.fromkeys(e.name for e in events), 1)}
    keys = {k: i for i, k in enumerate(dict.fromkeys(k for e in events for k in e.stats), 1)}
    tables = [
        f'{what} {{ key: {i} value {{ id: {i} name: "{n}" }} }}'
        for what, table in (("event_metadata", numbers), ("stat_metadata", keys))
        for n, i in table.items()
    ]

    def event(made: Made) -> str:
        stats = " ".join(
            f"stats {{ metadata_id: {keys[k]} "
            + (f'str_value: "{v}"' if isinstance(v, str) else f"int64_value: {v}")
            + " }"
            for k, v in made.stats.items()
        )
        offset, length = round(made.start * 1e6), round((made.end - made.start) * 1e6)
        return (
            f"events {{ metadata_id: {numbers[made.name]} offset_ps: {offset} "
            f"duration_ps: {length} {stats} }}"
        )

    shown = [f'lines {{ name: "{n}" {" ".join(map(event, es))} }}' for n, es in lines.items()]
    return f'planes {{ name: "{name}" {" ".join(tables + shown)} }}\n'

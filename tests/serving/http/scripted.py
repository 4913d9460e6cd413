"""A model that writes what it is told, as long as it may, and a server with room for it."""

import dataclasses
from collections import Counter
from typing import Any

from tests.serving.engine.fake_backend import LIMITS, FakeBackend

LARGE = dataclasses.replace(LIMITS, slots=16, max_length=8192, rows=(16, 512), page=64, pages=1024)


class Scripted(FakeBackend):
    """Writes `script`, and then the end."""

    script = b""

    def __init__(self, **options: Any) -> None:
        super().__init__(LARGE, budget=512, **options)

    def _next(self, known: Any, seed: int, seen: set[int], counted: Counter[int]) -> int:
        at = counted.total()
        return self.script[at] if at < len(self.script) else 0

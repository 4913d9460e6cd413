"""A store within this process."""

import threading

from spmd.launch.store import JobStore


class Memory(JobStore):
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def put(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def claim(self, key: str, value: str) -> None:
        with self.changed:
            self.values.setdefault(key, value)

    def get(self, key: str, timeout_s: float = 0.0) -> str | None:
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, timeout_s)
            return self.values.get(key)

    def all(self, folder: str) -> dict[int, str]:
        start = f"{folder}/"
        with self.changed:
            return {int(k[len(start) :]): v for k, v in self.values.items() if k.startswith(start)}

"""Signs of life: who was silent for too long, and what is said of the lost."""

from __future__ import annotations

from collections.abc import Mapping

LEFT = "left"
"""Sign of a process that ended normally: its silence afterwards means nothing."""

SHOWN = 4
"""So many lost processes are named with their hosts."""


class Signs:
    """When each process last gave a sign of life.

    Args:
      processes: how many there are.
      timeout_s: after so many seconds of silence a process counts as lost.
      started: the clock's time from which silence counts.
    """

    def __init__(self, processes: int, timeout_s: float, started: float) -> None:
        self.timeout_s = timeout_s
        self._seen = dict.fromkeys(range(processes), ("", started))

    def silent(self, now: float, signs: Mapping[int, str]) -> dict[int, float]:
        """Process -> seconds of silence, for those that have been silent for too long.

        Args:
          now: the clock's time.
          signs: process -> its latest sign; another text than last time is a sign of life.
        """
        # Signs are counters, not times: hosts' clocks differ. Only this process's clock is read,
        # at the moment when it sees a counter change.
        for process, sign in signs.items():
            if self._seen[process][0] != sign:
                self._seen[process] = (sign, now)
        return {
            process: now - since
            for process, (sign, since) in self._seen.items()
            if sign != LEFT and now - since > self.timeout_s
        }


def describe_silent(silent: Mapping[int, float], who: Mapping[str, str] | None = None) -> str:
    """`process 1 was lost: no sign of life for 12 s; it was pid 4711 on host-b`.

    Args:
      silent: process -> seconds of silence.
      who: process as text -> its process id and host.
    """
    names = ", ".join(str(process) for process in sorted(silent))
    one = len(silent) == 1
    known = [who[str(process)] for process in sorted(silent) if who and str(process) in who]
    return (
        f"{'process' if one else 'processes'} {names} {'was' if one else 'were'} lost: no sign of "
        f"life for {min(silent.values()):.0f} s{was(', '.join(known[:SHOWN]))}; the end of its "
        "output or the scheduler's log (killed, out of memory, preempted) says why"
    )


def was(who: str) -> str:
    """`; it was pid 4711 on host-b`; nothing where that is not known."""
    return f"; it was {who}" if who else ""

"""Exit codes by which launchers and people tell why a process ended."""

EXIT_PREEMPTED = 75
"""Stopped by SIGTERM after its state was saved: start it again (`EX_TEMPFAIL` of sysexits.h)."""

EXIT_PEER_LOST = 76
"""Stopped because another process of the job was lost or failed: the cause is elsewhere."""

EXIT_HUNG = 77
"""Stopped by its watchdog: no progress within the limit."""

"""Jobs of several processes: joining, agreeing on a program, stopping together; a watchdog."""

from spmd.launch.agree import check_same, check_same_sources, exchange, from_first
from spmd.launch.initialize import initialize, is_main_process
from spmd.launch.peers import EXIT_HUNG, EXIT_PEER_LOST, EXIT_PREEMPTED, stop_agreed, stopping_peers
from spmd.launch.watchdog import Unwatched, Watch, Watchdog

__all__ = [
    "EXIT_HUNG", "EXIT_PEER_LOST", "EXIT_PREEMPTED", "Unwatched", "Watch", "Watchdog", "check_same",
    "check_same_sources", "exchange", "from_first", "initialize", "is_main_process", "stop_agreed",
    "stopping_peers",
]  # fmt: skip

"""Steps without end, each a sum over all devices; one process comes to grief after some.

Arguments: the process, what happens to it (kill, raise, exit, hang, term), a folder for a watchdog.
"""

import os
import signal
import sys
import time

import jax
import numpy as np

import spmd
from spmd import launch

HEARTBEAT_S = 2.0


def come_to_grief(how: str) -> None:
    """What happens to the victim."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RuntimeError("the disk is full")
    if how == "exit":
        sys.exit("error: no such file")
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    time.sleep(60)


def main() -> None:
    """Steps until the end of the world, or for a minute."""
    victim, how, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    spmd.initialize(timeout_s=60, heartbeat_timeout_s=HEARTBEAT_S)
    mesh = spmd.make_mesh(data=jax.device_count())
    step = spmd.jit(lambda x: x + x.sum(), mesh=mesh, in_specs=[("data",)], out_specs=("data",))
    x = spmd.mark_sharding(np.ones(8, np.float32), mesh, ("data",))
    x = jax.block_until_ready(step(x))  # compiled before the watchdog counts
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    with launch.stopping_peers(), launch.Watchdog(3 if how == "hang" else 60, folder) as dog:
        for number in range(600):
            if launch.stop_agreed(number, wanted=bool(asked)):
                print(f"stopped before step {number}", flush=True)
                time.sleep(0.0 if jax.process_index() == victim else 2.0)  # it takes longer to save
                sys.exit(launch.EXIT_PREEMPTED)
            if number == 3 and jax.process_index() == victim:
                come_to_grief(how)
            x = jax.block_until_ready(step(x))
            dog.beat(step=number)
            print(f"step {number}", flush=True)
            time.sleep(0.05)


if __name__ == "__main__":
    main()

"""Steps without end, each a sum over all devices; one process comes to grief after some.

Arguments: the process, what happens to it (kill, stop, exit, hang, term, or compile: it has a
program or a shape of its own), a folder for a watchdog.
"""

import itertools
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import launch
from tests.waiting import PATIENCE

HEARTBEAT_S = 5.0


def come_to_grief(how: str) -> None:
    """What happens to the victim."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if how == "exit":
        sys.exit("error: no such file")
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    time.sleep(PATIENCE)


def main() -> None:
    """Steps until somebody ends them."""
    victim, how, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    spmd.initialize(timeout_s=PATIENCE, heartbeat_timeout_s=HEARTBEAT_S)
    mesh = spmd.make_mesh(data=jax.device_count())
    step = spmd.jit(lambda x: x + x.sum(), mesh=mesh, in_specs=[("data",)], out_specs=("data",))
    x = spmd.mark_sharding(np.ones(8, np.float32), mesh, ("data",))
    x = jax.block_until_ready(step(x))  # compiled before the watchdog counts
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    with launch.stopping_peers(), launch.Watchdog(3 if how == "hang" else PATIENCE, folder) as dog:
        for number in itertools.count():
            if launch.stop_agreed(number, wanted=bool(asked)):
                print(f"stopped before step {number}", flush=True)
                time.sleep(0.0 if jax.process_index() == victim else 2.0)  # it takes longer to save
                sys.exit(launch.EXIT_PREEMPTED)
            if number == 3 and jax.process_index() == victim and how == "compile":
                own = spmd.jit(jnp.mean, mesh=mesh, in_specs=[("data",)]) if victim == 0 else step
                own(x if victim == 0 else np.ones(6, np.float32))
            elif number == 3 and jax.process_index() == victim:
                come_to_grief(how)
            x = jax.block_until_ready(step(x))
            dog.beat(step=number)
            print(f"step {number}", flush=True)
            time.sleep(0.05)


if __name__ == "__main__":
    main()

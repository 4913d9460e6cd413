"""A run on an object store in processes of its own: two that train, or one that is killed."""

import json
import os
import signal
import sys

import spmd
from models.training.checkpoints import remote
from tests.models.training.own_model import make_trainer

STEPS = 6


def kill_in_the_second_save() -> None:
    """When the arrays are on the store and the manifest is not, the process dies."""
    name_arrays, saves = remote._name_arrays, []

    def dying(folder, shapes):
        name_arrays(folder, shapes)
        saves.append(folder)
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    remote._name_arrays = dying


def main() -> None:
    """Half of a run, then the rest of it."""
    port, rank, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if port == "alone":
        kill_in_the_second_save()
        mesh = spmd.make_mesh(across=4, up=2)
        make_trainer(mesh, steps=STEPS, run_dir=url, save_every=2, eval_batches=0).run()
        return
    spmd.initialize(f"localhost:{port}", 2, rank)
    mesh = spmd.make_mesh(up=2, across=2)  # parameters are split over the processes
    for steps in (3, STEPS):
        outcome = make_trainer(mesh, steps=steps, run_dir=url, eval_batches=0).run()
    print(json.dumps({"loss": outcome.last["loss"], "first": outcome.first["step"]}))


if __name__ == "__main__":
    main()

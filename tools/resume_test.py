"""Kill a training run at random moments, resume it each time, and compare with one left alone.

The last signal is a SIGTERM, which has to save and exit with 75; all others are SIGKILLs, most of
them during a save, since there is nearly always one going on. At the end parameters, optimizer
state and the losses of all steps have to equal, bit for bit, those of the run left alone.

With --faults its disk fills up before some of the kills, and may have space again: it goes on
without saving, or ends with an error that says so.

Every run is a process of its own. All are forked from one that has imported everything and has
done nothing else, and share a cache of compiled programs: a run starts in two seconds.

Example:
    tools/run resume_test --kills 30
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from spmd.cli.flags import Parser, Switch, positive
from spmd.models.training.checkpoints.manifest import find_damage
from spmd.models.training.run.stop import STOPPED_EXIT_CODE
from spmd.scripts.flags.user_errors import one_message
from spmd.scripts.jobs.local import with_device_count
from tests.forked import Forked

DISK_MIB = 48
FILL = "fill"
"""On a small disk, the file of another program, which takes all space that is left."""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a file system in memory; says whether it is there: only root may do so."""
    folder.mkdir(parents=True, exist_ok=True)
    call = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    try:
        is_there = subprocess.run(call, capture_output=True, check=False).returncode == 0
    except OSError:
        is_there = False
    yield is_there
    if is_there:  # lazily: a process that was killed may not be gone yet
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def fill_up(disk: Path, moments: random.Random) -> None:
    """Fills a disk for a while; half of the times there is space again before the kill."""
    with contextlib.suppress(OSError), (disk / FILL).open("ab", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    time.sleep(moments.uniform(0, LONGEST_WAIT))
    if moments.random() < 0.5:
        (disk / FILL).unlink()
        time.sleep(moments.uniform(0, LONGEST_WAIT))


ROOT = Path(__file__).resolve().parent.parent

TEXT = "text.txt"
"""What is trained on, beside the runs' folders."""

SAVE_EVERY = 4
STEPS_A_KILL = 12
SPARE_STEPS = 48
"""For the few runs that get further than most before they are killed."""

LONGEST_WAIT = 0.8
"""Seconds between a run's first step and its kill, at most: two or three saves."""

LONGEST_RUN = 300.0
"""Seconds after which a run hangs."""

FULL_SHARE = 0.3
"""So many of the kills come after the disk was filled."""


class Failed(RuntimeError):
    """The resumed run differs from the one left alone."""


def command(folder: Path, steps: int, devices: int, save_every: int = SAVE_EVERY) -> list[str]:
    """A run of a tiny model that saves often."""
    return [
        "spmd.scripts.train_llama",
        *("--model=tiny", "--layers=1", "--noscan", f"--mesh=data={devices}", "--seq_len=16"),
        *("--global_batch=4", f"--data={folder.parent / TEXT}", f"--steps={steps}"),
        *("--log_every=1", "--eval_batches=0", "--sample_tokens=0", f"--save_every={save_every}"),
        *(f"--run_dir={folder}", "--resume=auto"),
    ]


def write_text(folder: Path) -> None:
    """Some text to train on: a copy, for files here may change while the test runs."""
    sources = sorted((ROOT / "models").rglob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    (folder / TEXT).write_text(text, encoding="utf-8")


def environment(devices: int, cache: Path) -> dict[str, str]:
    """That of the runs: virtual CPU devices, and a folder of compiled programs."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": with_device_count(os.environ.get("XLA_FLAGS", ""), devices),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


class Runs:
    """Starts runs, forked from a process that has imported the training script.

    Args:
        env: variables of theirs.
        log: where each writes what it says.
    """

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        self.env, self.log = env, log
        # What tensorboardX leaves of runs that were killed is cleaned up, and no news.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")

    def start(self, words: Sequence[str]) -> BaseProcess:
        """A new run."""
        self.log.unlink(missing_ok=True)
        return Forked(words[0], words[1:], self.log, self.env, preloaded=words[:1]).process

    def end(self, process: BaseProcess, expected: Container[int]) -> None:
        """Waits for the end of a run; its status has to be an expected one."""
        process.join(LONGEST_RUN)
        if process.exitcode is None:
            process.kill()
            raise Failed(f"a run hung for {LONGEST_RUN:.0f} s")
        if process.exitcode not in expected:
            raise Failed(f"a run ended with {process.exitcode}:\n{self.log.read_text()}")

    def steps(self) -> list[int]:
        """The steps that the run has told of."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")]


def steps_for(kills: int, *, faults: bool = False) -> int:
    """So many that the run is not over before it is killed for the last time."""
    return STEPS_A_KILL * kills * (2 if faults else 1) + SPARE_STEPS


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, each step once.

    Raises:
        Failed: a step is there twice.
    """
    found: dict[int, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" not in record:
            continue
        if record["step"] in found:
            raise Failed(f"step {record['step']} is twice in {folder / 'metrics.jsonl'}")
        found[record["step"]] = record["loss"]
    return found


def arrays(folder: Path, step: int) -> dict[str, Any]:
    """Every array of a checkpoint, by path, as numpy arrays."""
    import jax
    import orbax.checkpoint as ocp

    from spmd.models.training.checkpoints import tables

    checkpoint = folder / "checkpoints" / str(step)
    damage = find_damage(checkpoint)
    if damage is not None:
        raise Failed(f"{checkpoint}: {damage}")
    table = json.loads((checkpoint / "meta.json").read_text())["arrays"]
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = {
        path: jax.ShapeDtypeStruct(array["shape"], array["dtype"], sharding=device)
        for path, array in table.items()
    }
    with ocp.StandardCheckpointer() as reader:
        restored = reader.restore(checkpoint / "state", tables.nested(structs))
    return {path: np.asarray(leaf) for path, leaf in tables.by_path(restored).items()}


def compare(alone: Path, killed: Path, steps: int) -> None:
    """Raise `Failed` unless both runs are the same, to the bit."""
    if losses(alone) != losses(killed):
        raise Failed("the losses differ")
    ours, theirs = arrays(alone, steps), arrays(killed, steps)
    different = [path for path in ours if ours[path].tobytes() != theirs[path].tobytes()]
    if different or ours.keys() != theirs.keys():
        raise Failed(f"{len(different)} arrays differ, {different[:3]} among them")


def resume_test(
    folder: Path, kills: int, steps: int, devices: int, seed: int, *, faults: bool = False
) -> None:
    """Run alone, run with kills and perhaps faults, compare.

    Raises:
        Failed: they differ, or a run did what it must not.
    """
    runs = Runs(environment(devices, folder / "cache"), folder / "log.txt")
    alone = folder / "alone"
    write_text(folder)
    runs.end(runs.start(command(alone, steps, devices, save_every=0)), (0,))
    with contextlib.ExitStack() as stack:
        disk = folder / "disk"
        if faults and not stack.enter_context(small_disk(disk)):
            print("no disk is filled: nothing can be mounted here", flush=True)
            faults = False
        killed = (disk if faults else folder) / "killed"
        words = [*command(killed, steps, devices), f"--data={folder / TEXT}"]
        moments = random.Random(seed)
        during_saves = filled = 0
        for number in range(1, kills + 1):
            kind = signal.SIGTERM if number == kills else signal.SIGKILL
            is_full = faults and number < kills and moments.random() < FULL_SHARE
            process = runs.start(words)
            while process.is_alive() and not runs.steps():
                time.sleep(0.01)
            time.sleep(moments.uniform(0, LONGEST_WAIT))
            if is_full:
                fill_up(disk, moments)
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, kind)
            expected = {STOPPED_EXIT_CODE if kind == signal.SIGTERM else -kind}
            process.join(LONGEST_RUN)
            if is_full and "no space is left on the disk" in runs.log.read_text():
                expected.add(1)  # three saves in a row have failed
            runs.end(process, expected if runs.steps() else ())
            was_saving = any(killed.glob("checkpoints/*.orbax-checkpoint-tmp*"))
            (disk / FILL).unlink(missing_ok=True)
            during_saves += was_saving
            filled += is_full
            then = ", its disk was full" if is_full else ", during a save" if was_saving else ""
            step = f"{max(runs.steps())} of {steps}"
            print(f"{number}/{kills}: {kind.name} after step {step}{then}", flush=True)
        runs.end(runs.start(words), (0,))
        compare(alone, killed, steps)
        left = list(killed.rglob("*orbax-checkpoint-tmp*"))
        if left:
            raise Failed(f"{left[0]} is left")
        print(
            f"{kills} kills, {during_saves} of them during a save, {filled} with a full disk: "
            "the same run, bit for bit"
        )


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run resume_test", __doc__)
    add = parser.add_argument
    add("--kills", type=positive, default=30, help="how often the run is killed")
    add("--seed", type=int, default=0, help="of the moments")
    add("--faults", action=Switch, default=True, help="full disks")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the test in a folder of its own."""
    given = make_parser().parse_args(arguments)
    logging.set_verbosity(logging.WARNING)
    steps = steps_for(given.kills, faults=given.faults)
    with tempfile.TemporaryDirectory() as folder, one_message(Failed):
        resume_test(Path(folder), given.kills, steps, 2, given.seed, faults=given.faults)

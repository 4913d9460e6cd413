"""Kill a training run at random moments, resume it each time, and compare with one left alone.

The last signal is a SIGTERM, which has to save and exit with 75; all others are SIGKILLs, most of
them during a save, since there is nearly always one going on. At the end parameters, optimizer
state and the losses of all steps have to equal, bit for bit, those of the run left alone.

Example:
    scripts/resume_test --kills 30
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

from models.training.manifest import find_damage
from models.training.stop import STOPPED_EXIT_CODE

ROOT = Path(__file__).resolve().parent.parent

SAVE_EVERY = 4
STEPS_A_KILL = 24
LONGEST_WAIT = 2.0
"""Seconds between a run's first step and its kill, at most."""


class Failed(RuntimeError):
    """The resumed run differs from the one left alone."""


def command(folder: Path, steps: int, devices: int) -> list[str]:
    """A run of a tiny model that saves often."""
    return [
        *(sys.executable, str(ROOT / "scripts/train_llama.py")),
        *("--model=tiny", "--layers=1", f"--mesh=data={devices}", "--seq_len=16"),
        *("--global_batch=4", f"--data={ROOT / 'models'}", f"--steps={steps}", "--log_every=1"),
        *("--eval_batches=0", "--sample_tokens=0", f"--save_every={SAVE_EVERY}"),
        *(f"--run_dir={folder}", "--resume=auto"),
    ]


def environment(devices: int, cache: Path) -> dict[str, str]:
    """That of the runs: virtual devices, and one cache of compiled programs for all of them."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }


def run_to_end(words: Sequence[str], env: dict[str, str]) -> None:
    """Run, and show what it said if it failed."""
    result = subprocess.run(words, env=env, capture_output=True, text=True)
    if result.returncode:
        raise Failed(f"a run ended with {result.returncode}:\n{result.stdout}{result.stderr}")


def run_until_signal(
    words: Sequence[str], env: dict[str, str], number: int, wait: float
) -> tuple[int, int, bool]:
    """Start a run, wait after its first step, send a signal.

    Returns:
        Its exit status, the last step that it told of, and whether a save was cut off.
    """
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step "):
                break
        time.sleep(wait)
        process.send_signal(number)
        lines += process.stdout.readlines()
        status = process.wait()
    told = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")]
    if not told:
        raise Failed(f"a run ended with {status} before its first step:\n{''.join(lines)}")
    return status, max(told), _is_saving(words)


def _is_saving(words: Sequence[str]) -> bool:
    (folder,) = (word.partition("=")[2] for word in words if word.startswith("--run_dir="))
    return any(Path(folder).glob("checkpoints/*.orbax-checkpoint-tmp*"))


def steps_for(kills: int) -> int:
    """So many that the run is not over before it is killed for the last time."""
    return STEPS_A_KILL * (kills + 2)


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

    from models.training import tables

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


def resume_test(folder: Path, kills: int, steps: int, devices: int, seed: int) -> None:
    """Run alone, run with kills, compare.

    Raises:
        Failed: they differ, or a run did what it must not.
    """
    env = environment(devices, folder / "cache")
    alone, killed = folder / "alone", folder / "killed"
    run_to_end(command(alone, steps, devices), env)
    words = command(killed, steps, devices)
    moments = random.Random(seed)
    during_saves = 0
    for number in range(1, kills + 1):
        kind = signal.SIGTERM if number == kills else signal.SIGKILL
        status, step, was_saving = run_until_signal(
            words, env, kind, moments.uniform(0, LONGEST_WAIT)
        )
        during_saves += was_saving
        then = ", during a save" if was_saving else ""
        print(f"{number}/{kills}: {kind.name} after step {step} of {steps}{then}", flush=True)
        expected = STOPPED_EXIT_CODE if kind == signal.SIGTERM else -kind
        if status != expected:
            raise Failed(f"{kind.name}: the run ended with {status}, not {expected}")
    run_to_end(words, env)
    compare(alone, killed, steps)
    print(f"{kills} kills, {during_saves} of them during a save: the same run, bit for bit")


def define_flags() -> None:
    """Here and not at import: tests import more than one script, and flags are global."""
    flags.DEFINE_integer("kills", 30, "How often the run is killed.")
    flags.DEFINE_integer("steps", None, "Steps of the run. Default: enough for the kills.")
    flags.DEFINE_integer("seed", 0, "Of the moments.")
    flags.DEFINE_integer("devices", 2, "Virtual CPU devices.")
    flags.DEFINE_string("folder", None, "Where the runs are kept. Default: nowhere.")


def main(argv: Sequence[str]) -> None:
    """Run the test in a folder of its own."""
    del argv
    asked = flags.FLAGS
    logging.set_verbosity(logging.WARNING)
    steps = asked.steps or steps_for(asked.kills)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(asked.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            resume_test(folder, asked.kills, steps, asked.devices, asked.seed)
        except Failed as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)

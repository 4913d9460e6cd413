"""Turns a checkpoint of a Llama for n devices into one for m devices.

What is read: a folder in Hugging Face's format, a folder of ranks that this program wrote, or a
checkpoint of a training run. What is written: with --ranks one file of safetensors for each rank,
as tensor-parallel engines want them (key heads are repeated where there are fewer than ranks); with
--mesh a training run's checkpoint, in the pieces that the devices of that mesh hold (any mesh
restores it): a run's own, optimizer and all, or step 0 of a new run from weights; else a folder in
Hugging Face's format. No number changes unless --dtype says so. A run with --ranks or neither that
was stopped goes on where it was when it is started again.

Examples:
    scripts/convert_checkpoints --from Llama-3.1-8B --out 8b-for-4 --ranks 4
    scripts/convert_checkpoints --from 8b-for-4 --out 8b-for-16 --ranks 16
    scripts/convert_checkpoints --from 8b-for-16 --out 8b-whole
    scripts/convert_checkpoints --from runs/a --step 500 --out tuned --dtype bfloat16
    scripts/convert_checkpoints --from runs/a --out runs/b --mesh data=32,model=4
    scripts/convert_checkpoints --from Llama-3.1-8B --out runs/8b --mesh data=8
"""

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging
from rich.console import Console

from spmd.cli.flags import Parser, Switch
from spmd.cli.specs import mesh_axes
from spmd.installed import as_called
from spmd.models.llama.config import DTYPES, ConfigError
from spmd.models.llama.sharding import TABLES
from spmd.models.llama.weights.convert import write_hf, write_ranks, write_run
from spmd.models.llama.weights.files import WeightsError
from spmd.models.llama.weights.ranks import SHARDING_FILE, ranks_source
from spmd.models.llama.weights.sources import checkpoint_source, hf_source
from spmd.models.llama.weights.tensors import Source
from spmd.models.training.checkpoints.found import AUTO, CheckpointError
from spmd.models.training.checkpoints.relayout import relayout
from spmd.models.training.run.description import RunFolder
from spmd.scripts.flags.user_errors import on_disk, one_message

USER_ERRORS = (CheckpointError, ConfigError, WeightsError, OSError)
"""What a user can mend: one message instead of a traceback."""


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("scripts/convert_checkpoints", __doc__)
    add = parser.add_argument
    add("--from", required=True, type=on_disk, dest="source", help="the folder to read")
    add("--step", default=AUTO, help="of a training run; auto: the latest whole one")
    add("--out", required=True, type=on_disk, help="the folder to make")
    add("--ranks", type=int, help="files to make, one for each device; none: one whole model")
    add(
        "--mesh",
        type=mesh_axes,
        help="axes and sizes: a run's checkpoint for the devices of this mesh",
    )
    add("--sharding", choices=sorted(TABLES), help="what --mesh splits of weights (default: 2d)")
    add("--scan", action=Switch, default=True, help="with --mesh: weights of layers are stacked")
    add("--dtype", choices=DTYPES, help="what to convert to (default: nothing is converted)")
    return parser


def copy_run(given: argparse.Namespace, console: Console) -> None:
    """A run's checkpoint for another mesh.

    Raises:
        WeightsError: flags that do not go with it.
    """
    if given.dtype or given.sharding or not given.scan:
        raise WeightsError(
            "--mesh copies a run's checkpoint as it is: --dtype, --sharding and --noscan do not go "
            "with it"
        )
    source, target = (path / RunFolder.CHECKPOINTS for path in (given.source, given.out))
    step = relayout(source, target, given.mesh, step=given.step, console=console)
    console.print(f"wrote {target / str(step)}; go on from it with --run_dir {given.out} --resume")


def open_source(folder: Path, step: str) -> contextlib.AbstractContextManager[Source]:
    """The tensors of a folder, whatever kind it is.

    Raises:
        WeightsError: it is no folder, or --step is given and it holds no run.
    """
    if not folder.is_dir():
        raise WeightsError(f"--from: {folder} is no folder")
    if RunFolder(folder).checkpoints.is_dir():
        return checkpoint_source(folder, step)
    if step != AUTO:
        raise WeightsError(f"--step: {folder} is no folder of a training run")
    is_cut = (folder / SHARDING_FILE).exists()
    return ranks_source(folder) if is_cut else hf_source(folder)


def run(given: argparse.Namespace, console: Console) -> None:
    """Convert, and say what came of it."""
    if given.step != AUTO and not given.step.isdecimal():
        raise WeightsError(f"--step: {given.step!r} is no number, and not {AUTO}")
    if given.mesh and given.ranks is not None:
        raise WeightsError("--mesh makes a training run's checkpoint, --ranks files: give one")
    if not given.mesh and (given.sharding or not given.scan):
        raise WeightsError("--sharding and --noscan say how --mesh lays weights out; give --mesh")
    if given.mesh and RunFolder(given.source).checkpoints.is_dir():
        copy_run(given, console)
        return
    started = time.perf_counter()
    with open_source(given.source, given.step) as source:
        console.print(f"{source.about}: {source.config.parameter_count():,} parameters")
        source = source.astype(given.dtype)
        if given.mesh:
            how: dict[str, Any] = {"table": given.sharding or "2d", "scan_layers": given.scan}
            write_run(source, given.out, given.mesh, **how, console=console)
        elif given.ranks is None:
            write_hf(source, given.out, console=console)
        else:
            write_ranks(source, given.out, given.ranks, console=console)
    pattern = "**/*" if given.mesh else "*.safetensors"
    files = sorted(path for path in given.out.glob(pattern) if path.is_file())
    size = sum(file.stat().st_size for file in files)
    seconds = time.perf_counter() - started
    console.print(f"wrote {given.out}: {len(files)} files, {size / 1e9:.3f} GB, {seconds:.1f} s")
    if given.mesh:
        console.print(
            f"train from it with {as_called('scripts/train_llama.py')} "
            f"--config {given.source} --run_dir {given.out} --resume"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    logging.set_verbosity(logging.FATAL)  # orbax's tracebacks; we say it in one line
    with one_message(*USER_ERRORS):
        run(given, console)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # devices are for others
    main()

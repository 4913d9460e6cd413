r"""Train a Llama on text, partitioned over a mesh by `spmd`.

The model and the training step are single-device code. What is marked are parameters, inputs and
the activations in `models/llama/sharding.py`; the rest, the optimizer's state among it, is
inferred by the compiler, and created where it belongs.

Examples:
    python scripts/train_llama.py --mesh data=4,model=2
    python scripts/train_llama.py --run_dir runs/a --save_every 50 --resume
    python scripts/train_llama.py --settings runs/a/settings.yaml --run_dir runs/b --seed 1
    python scripts/train_llama.py --model llama2-7b --mesh data=8 --noscan --seq_len 4096 \
        --global_batch 16 --data '/corpus/*.txt' --run_dir runs/7b --save_every 500
    python scripts/train_llama.py --model llama3-70b --seq_len 8192 --global_batch 256 \
        --plan v5p-256
    python scripts/train_llama.py --init_from Llama-3.2-1B --export_hf Llama-3.2-1B-tuned
    scripts/launch local --processes 2 --devices_per_process 4 -- python scripts/train_llama.py

Exit codes: 0 all steps were taken; 1 an error, in one line; 2 flags that cannot be read; 75 saved
and stopped by SIGTERM or SIGINT, --resume goes on; 76 another process was lost; 77 a step took
longer than --watchdog_timeout; 78 in place of 1 where a launcher must not start it again.
"""

import argparse
import dataclasses
import io
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a checkout, which need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from absl import logging as absl_logging
from rich.console import Console

import spmd
from spmd import launch
from spmd.cli.specs import default_to_cpus
from spmd.models.llama import lora, planned, sharding
from spmd.models.llama.config import ConfigError
from spmd.models.llama.parameters import TEACHER
from spmd.models.llama.program import LlamaProgram, sample_text
from spmd.models.llama.weights.load import WeightsError, load
from spmd.models.llama.weights.save import copy_small_files
from spmd.models.training.checkpoints.found import Found
from spmd.models.training.data import source as data
from spmd.models.training.data.samples import PackedTokens
from spmd.models.training.errors import RunError
from spmd.models.training.paths import as_path
from spmd.models.training.program import TrainingProgram
from spmd.models.training.run.description import RunConfig, check_same_model
from spmd.models.training.run.loop import Outcome
from spmd.models.training.trainer import USER_ERRORS, Hooks, Trainer, exit_code
from spmd.scripts.flags import weights as weight_flags
from spmd.scripts.flags.run import format_axes, make_mesh, make_run
from spmd.scripts.flags.train import make_parser
from spmd.scripts.flags.user_errors import one_message

PROMPT = "def "


# The run


def make_trainer(run: RunConfig, given: argparse.Namespace, mesh: spmd.Mesh) -> Trainer:
    """The trainer that the flags ask for, with what is done before and after its steps."""
    of_flags, (train_data, held_out) = datasets(run)
    tokenizer = data.tokenizer_of(of_flags)
    launch.check_same(by_flag(run, given) | {"training text (hash)": train_data.fingerprint})
    of_data = {
        "seed": run.options.seed,
        "fingerprint": train_data.fingerprint,
        "tokenizer": data.identity(tokenizer),
    }

    teacher = weight_flags.teacher_config(run)
    if train_data.is_preferences and (teacher or not given.init_from):
        raise RunError(
            "the data are preferences: name the model that is tuned, and compared with, with "
            "--init_from" + (", and no --teacher" if teacher else "")
        )

    def first_params(program: TrainingProgram) -> Any:
        assert isinstance(program, LlamaProgram)
        shardings = program.base_shardings()
        params = weight_flags.load_params(given, run.model, shardings, trainer.console)
        if train_data.is_preferences and getattr(trainer.data, "references", None) is None:
            both = {"data": train_data, "held_out": held_out}
            found: dict[str, Any] = {**program.reference(params, both)}
            refer(found)
            if trainer.folder is not None and launch.is_main_process():
                np.savez(trainer.folder.reference, **found)
            trainer.console.print("computed the log-probabilities of all pairs under --init_from")
        if teacher:
            shardings = program.step.in_shardings[0][TEACHER]
            theirs = load(run.teacher, teacher, shardings, console=trainer.console)
            params = program.fresh_params(params, seed=run.options.seed) | {TEACHER: theirs}
        return params

    def refer(found: Mapping[str, Any]) -> None:
        """Gives both data sets the log-probabilities of their pairs."""
        trainer.data = dataclasses.replace(train_data, references=found["data"])
        trainer.held_out = dataclasses.replace(held_out, references=found["held_out"])

    def before(found: Found | None) -> list[str]:
        changes: list[str] = []
        if found:
            changes = check_same_model(found.meta["config"], run)
            text = found.meta.get("data", of_data)  # weights alone: of no data
            if text.get("tokenizer", of_data["tokenizer"]) != of_data["tokenizer"]:
                raise RunError(
                    "the checkpoint was trained with another tokenizer: its tokens mean something "
                    "else; name it with --tokenizer, or start anew"
                )
            if text["fingerprint"] != of_data["fingerprint"]:
                changes.append("the text that is trained on")
        if found and train_data.is_preferences and trainer.folder is not None:
            kept = (trainer.folder.kept or trainer.folder.path) / trainer.folder.reference.name
            refer(dict(np.load(io.BytesIO(kept.read_bytes()))))
        if trainer.folder is not None and launch.is_main_process():
            trainer.folder.write_config(run)
            settings = make_parser(None).settings_text(given)
            trainer.folder.settings.write_text(settings, encoding="utf-8")
            with weight_flags.tokenizer_files(tokenizer, given.init_from) as files:
                if files is not None:
                    trainer.folder.tokenizer.mkdir(exist_ok=True)
                    copy_small_files(files, trainer.folder.tokenizer)
        return changes

    def after(program: TrainingProgram, outcome: Outcome, watch: launch.Watch) -> None:
        assert isinstance(program, LlamaProgram)
        console, params = trainer.console, program.whole(outcome.params)
        with watch.may_take("exporting"):
            if given.export_lora:
                lora.save(outcome.params["lora"], run.lora, given.export_lora, given.init_from)
                console.print(f"exported: {as_path(given.export_lora).absolute()}")
            try:
                weight_flags.export_params(given, params, run.model, tokenizer, console)
            except WeightsError as error:
                if (folder := trainer.folder) is not None:
                    safe = f"step {outcome.state.step} is in {folder.checkpoints}: with --resume "
                    safe += "the same command exports it"
                else:
                    given.export_hf = str(Path(tempfile.mkdtemp()) / Path(given.export_hf).name)
                    weight_flags.export_params(given, params, run.model, tokenizer, console)
                    safe = f"the weights are in {given.export_hf} instead"
                raise WeightsError(f"{error}; {safe}") from error
        if given.sample_tokens:
            with watch.may_take("writing a sample"):
                text = sample_text(run, mesh, params, PROMPT, given.sample_tokens, tokenizer)
            console.print(f"--- a sample\n{text}\n---")
        if given.report:
            with watch.may_take("writing the report"):
                trainer.write_report(program, Path(given.report), prices=True)

    trainer = Trainer.of(
        lambda: LlamaProgram(run, mesh, train_data.struct(), teacher),
        train_data,
        held_out=held_out,
        options=run.options,
        hooks=Hooks(before=before, first_params=first_params, after=after),
        about={"config": run.to_json(), "data": of_data},
    )
    print_run(run, weight_flags.model_name(given), mesh, train_data, trainer.console)
    return trainer


def datasets(run: RunConfig) -> tuple[data.DataConfig, tuple[PackedTokens, PackedTokens]]:
    """What the flags say of data, and (training batches, held-out batches)."""
    of_flags = data.DataConfig(run.data, run.tokenizer, run.packing, run.valid_data)
    return of_flags, data.load_datasets(
        of_flags,
        seq_len=run.seq_len,
        batch_size=run.global_batch,
        seed=run.options.seed,
        vocab_size=run.model.vocab_size,
    )


# Printing


def print_run(
    run: RunConfig, name: str, mesh: spmd.Mesh, train_data: PackedTokens, console: Console
) -> None:
    """What runs on what."""
    model = run.model
    console.print(
        f"{name}: {model.parameter_count():,} parameters, "
        f"{model.num_hidden_layers} layers {'scanned' if model.scan_layers else 'unrolled'}, "
        f"{model.dtype}, {run.optimizer.name}"
        + (f"; trained are adapters alone: {run.lora}" if run.lora else "")
    )
    console.print(
        f"mesh {format_axes(mesh.shape)}: {mesh.size} of {jax.device_count()} "
        f"{jax.devices()[0].device_kind} devices"
    )
    microbatches = run.options.microbatches
    parts = f" in {microbatches} microbatches" if microbatches > 1 else ""
    console.print(
        f"{run.global_batch} x {run.seq_len} tokens a step{parts}, {run.options.steps} steps, from "
        f"{train_data.token_count:,} tokens of "
        f"{', '.join(run.data) or 'the Python standard library'}"
    )
    for note in train_data.notes if run.data else ():
        console.print(f"note: {note}")
    for sentence in notices(run):
        console.print(sentence)


def notices(run: RunConfig) -> Iterator[str]:
    """What is done otherwise than one might expect, a sentence each."""
    longest = run.model.max_position_embeddings
    if run.seq_len > longest:
        yield (
            f"note: sequences of {run.seq_len} tokens are longer than the {longest} that the model "
            "is meant for (max_position_embeddings)"
        )
    for dropped in sharding.dropped_marks(run.model, run.mesh, sharding.TABLES[run.sharding]):
        yield f"not marked: {dropped}"


def by_flag(run: RunConfig, given: argparse.Namespace) -> dict[str, str]:
    """What all processes have to agree on, by the flag that says it where there is one."""
    flags = {"optimizer.name": "--optimizer", "optimizer.total_steps": "--steps"}
    flags |= {f"optimizer.{name}": f"--{name}" for name in vars(given)}
    flags |= {name: f"--{name}" for name in vars(given)}
    values = run.flat()
    del values["run_dir"]  # whether they share it is checked by what they see in it
    return {flags.get(name, name): str(value) for name, value in values.items()}


def plan_run(given: argparse.Namespace) -> int:
    """Prints on which meshes of --plan's machines the run is fastest; 1 if it fits on none."""
    if not given.plan:
        raise RunError("--plan: name machines, as v5p-256,h200:8")
    axes, given.mesh, given.dcn = given.mesh, {}, {}
    run = make_run(given, spmd.Topology(given.plan[0]).platform or "cpu")
    structs, teacher = datasets(run)[1][0].struct(), weight_flags.teacher_config(run)
    kept = tuple(dict.fromkeys((run.model.remat, "full", "none")))
    tables = tuple(dict.fromkeys((run.sharding, "2d", "2d-sequence")))
    parts = tuple(run.options.microbatches << i for i in range(4))
    hosted = (True,) if run.options.offload_optimizer else (False, True)

    def step(
        mesh: spmd.Mesh,
        remat: Any = kept,
        sharding: Any = tables,
        microbatches: Any = parts,
        offload_optimizer: Any = hosted,
    ) -> spmd.Task:
        chosen = {"remat": remat, "sharding": sharding, "microbatches": microbatches}
        chosen["offload_optimizer"] = offload_optimizer
        return planned.task_of(mesh, run, structs, {}, teacher=teacher, **chosen)

    step.__name__ = weight_flags.model_name(given)
    axes = tuple(dict.fromkeys((*axes, *planned.axes_of(run.model))))
    found = spmd.plan(step, given.plan, axes=axes)
    print(found)
    if given.report:
        found.report(given.report)
    if found.best.verdict == "does not fit":
        return 1
    chosen = " ".join(
        f"--{'' if value else 'no'}{name}" if isinstance(value, bool) else f"--{name} {value}"
        for name, value in found.best.chosen.items()
    )
    print(f"train so: --mesh {format_axes(found.best.axes)} {chosen}")
    return 0


def quiet() -> None:
    """Libraries keep their tracebacks to themselves: of a save that fails we say it in one line."""
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("jax").setLevel(logging.ERROR)
    show = sys.unraisablehook

    def show_others(what: "sys.UnraisableHookArgs") -> None:
        # After a failed save tensorstore's threads answer to an event loop that is gone.
        if str(what.exc_value) != "Event loop is closed":
            show(what)

    sys.unraisablehook = show_others


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser(__doc__).parse_args(arguments)
    quiet()
    if given.plan is not None:
        with one_message(*USER_ERRORS, ConfigError, WeightsError):
            default_to_cpus()
            sys.exit(plan_run(given))
    with launch.stopping_peers(), one_message(*USER_ERRORS, ConfigError, WeightsError):
        spmd.initialize(heartbeat_timeout_s=given.heartbeat_timeout)
        devices = jax.devices()
        run = make_run(given, devices[0].platform)
        sys.exit(exit_code(make_trainer(run, given, make_mesh(run, devices)).run()))


if __name__ == "__main__":
    main()

"""`Trainer`: a training run of any model, from its first parameters to its last checkpoint.

    compile the step                         models/training/program.py
    find a checkpoint, or make a state       models/training/checkpoints/
    take steps, evaluate, save, stop         models/training/run/loop.py

What is said of the run, and what is checked before it, is here; so is the order of these things.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import jax
import optax
from rich.console import Console

import spmd
from models.training.checkpoints.found import CheckpointError, Found
from models.training.checkpoints.store import Checkpoints
from models.training.data.batches import Dataset, fingerprint, open_batches, structs_of
from models.training.errors import DataError
from models.training.options import Options
from models.training.program import Marks, Program
from models.training.run.background import Background
from models.training.run.compiled import keeping_compiled
from models.training.run.description import RunError, RunFolder
from models.training.run.loop import Outcome, Schedule, TrainingError, TrainState, train
from models.training.run.optimizer import OptimizerConfig, OptimizerError
from models.training.run.profile import ProfileError, Profiler
from models.training.run.records import JsonLines, TensorBoard
from models.training.run.sinks import Forgiving, Sinks, Terminal
from models.training.run.step import LossFn
from models.training.run.stop import STOPPED_EXIT_CODE, StopSignals
from spmd import launch

__all__ = ["USER_ERRORS", "Hooks", "Options", "Trainer", "exit_code"]

USER_ERRORS = (
    RunError,
    OptimizerError,
    ProfileError,
    DataError,
    TrainingError,
    CheckpointError,
    spmd.SpmdError,
    OSError,
)
"""What a user can mend: one message instead of a traceback."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a program adds to a run; every process calls each of them.

    Args:
        before: called with the checkpoint to go on from, or None; raises an error if that is not of
            this run, or returns what has changed since.
        first_params: makes the parameters to start from, such as weights of others; None draws
            them.
        after: called after the last step of a run that was not stopped, while the watchdog watches.
    """

    before: Callable[[Found | None], list[str]] = lambda found: []
    first_params: Callable[[Program], Any] = lambda program: None
    after: Callable[[Program, Outcome, launch.Watch], None] = lambda program, outcome, watch: None


class Trainer:
    """Trains a model whose parameters are any tree, over a mesh whose axes have any names.

    In a job of several processes all of them make the same trainer, after `spmd.initialize()`.

    Args:
        init: key -> parameters; traced, so that each device makes only its part.
        loss: (params, batch) -> mean loss, weighted by `batch["weights"]` if the batch has them.
        marks: of the parameters, by path: `{"*/kernel": ("rows", "columns")}`. The rest is
            inferred.
        data: step -> the whole batch of that step, a dict of numpy arrays; steps count from 0.
        mesh: where it runs.
        batch_marks: of a batch, by name.
        optimizer: which one, or one of optax.
        options: how long, and what is kept.
        held_out: as `data`, for evaluations; None makes none.
        hooks: what is done besides.

    Attributes:
        compile: makes the `Program`; it is called when the run begins.
        about: what checkpoints say of the run: `config` and `data`.
        console: where the run prints.

    Example:
        >>> trainer = Trainer(
        ...     init, loss, {"w": ("rows", None)}, data, mesh=spmd.make_mesh(rows=8),
        ...     batch_marks={"x": ("rows", None)}, optimizer=optax.adam(1e-3),
        ...     options=Options(steps=100, run_dir="runs/a", save_every=20),
        ... )
        >>> outcome = trainer.run()
    """

    def __init__(
        self,
        init: Callable[[jax.Array], Any],
        loss: LossFn,
        marks: Marks,
        data: Dataset,
        *,
        mesh: spmd.Mesh,
        batch_marks: Marks,
        optimizer: OptimizerConfig | optax.GradientTransformation,
        options: Options,
        held_out: Dataset | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        def compile_step() -> Program:
            return Program(
                init,
                loss,
                marks,
                structs_of(data),
                batch_marks,
                mesh=mesh,
                optimizer=optimizer,
                microbatches=options.microbatches,
                on_nonfinite=options.on_nonfinite,
            )

        self._set(compile_step, data, held_out, options, hooks or Hooks())

    @classmethod
    def of(
        cls,
        compile_step: Callable[[], Program],
        data: Dataset,
        *,
        options: Options,
        held_out: Dataset | None = None,
        hooks: Hooks | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Trainer:
        """A trainer of a program that is made elsewhere.

        Args:
            compile_step: makes it.
            data: as for `Trainer`.
            options: as for `Trainer`.
            held_out: as for `Trainer`.
            hooks: as for `Trainer`.
            about: what checkpoints say of the run.
        """
        trainer = cls.__new__(cls)
        trainer._set(compile_step, data, held_out, options, hooks or Hooks())
        trainer.about = dict(about or {})
        return trainer

    def _set(
        self,
        compile_step: Callable[[], Program],
        data: Dataset,
        held_out: Dataset | None,
        options: Options,
        hooks: Hooks,
    ) -> None:
        self.compile, self.data, self.held_out = compile_step, data, held_out
        self.options, self.hooks = options, hooks
        self.about: dict[str, Any] = {}
        self.folder = None if options.run_dir is None else RunFolder.at(options.run_dir)
        self.console = Console(
            file=cast(IO[str], Forgiving()),
            markup=False,
            highlight=False,
            soft_wrap=True,
            quiet=not launch.is_main_process(),
        )

    def run(self) -> Outcome:
        """Takes all steps that are left, or stops early on SIGTERM or SIGINT.

        Returns:
            The state after the last step, and what the steps were like.

        Raises:
            RunError, CheckpointError: the folder holds another run, or cannot be used.
            TrainingError: loss or gradients are not finite.
            LaunchError: processes differ in what they are to do.
        """
        self._agree()
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(self._watched())
            stop = stack.enter_context(StopSignals(lambda: watch.doing))
            checkpoints, found = self._open(stack)
            program = self._compiled(watch)
            with watch.may_take("making the first state"):
                state = self._start(program, checkpoints, found)
            with self._sinks(state.step) as sinks:
                outcome = self._train(program, state, stop, watch, sinks, checkpoints, found)
            self._tell(outcome, program, stop)
            if not outcome.is_stopped:
                self.hooks.after(program, outcome, watch)
        return outcome

    # The parts of a run, in order.

    @contextlib.contextmanager
    def _watched(self) -> Iterator[launch.Watch]:
        """What hears of progress; too long without any ends the job."""
        timeout = self.options.watchdog_timeout
        if not timeout:
            yield launch.Unwatched()
            return
        where = Path(tempfile.gettempdir()) / f"watchdog-{os.getpid()}"
        if self.folder is not None:
            where = self.folder.path / "watchdog"
        with launch.Watchdog(timeout, where) as dog:
            yield dog

    def _agree(self) -> None:
        """All processes have the same options, sources and data, or each gets an error."""
        options = {name: str(value) for name, value in dataclasses.asdict(self.options).items()}
        del options["run_dir"]  # whether they share it is checked by what they see in it
        launch.check_same(options, label="options of the trainer")
        launch.check_same({"data (hash)": fingerprint(self.data)}, label="data")
        launch.check_same_sources()

    def _open(self, stack: contextlib.ExitStack) -> tuple[Checkpoints | None, Found | None]:
        """The checkpoints of the run folder, and the one to go on from."""
        if self.folder is None:
            return None, None
        options = self.options
        self.folder.make()
        stack.enter_context(self.folder.kept_up())
        stack.enter_context(keeping_compiled(self.folder.compiled))
        checkpoints = Checkpoints(
            self.folder.checkpoints,
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            about=self.about,
        )
        stack.enter_context(checkpoints)
        found = find_checkpoint(checkpoints, options.resume, self.console)
        for change in self.hooks.before(found):
            self.console.print(f"changed since the checkpoint: {change}")
        return checkpoints, found

    def _compiled(self, watch: launch.Watch) -> Program:
        started = time.perf_counter()
        with watch.may_take("compiling"):
            program = self.compile()
        step = program.step
        self.console.print(f"partitioned and compiled in {time.perf_counter() - started:.1f} s")
        self.console.print(step.explain() if self.options.verbose else step.summary())
        if self.folder is not None:
            self.write_report(program, self.folder.report, prices=False)
        return program

    def _start(
        self, program: Program, checkpoints: Checkpoints | None, found: Found | None
    ) -> TrainState:
        """The state to go on from: a checkpoint's, or a fresh one, perhaps with given weights."""
        seed = self.options.seed
        if checkpoints is None or found is None:
            return program.fresh_state(self.hooks.first_params(program), seed=seed)
        started = time.perf_counter()
        state = checkpoints.restore(found, program.targets())
        seconds = time.perf_counter() - started
        self.console.print(f"resuming after step {found.step}, restored in {seconds:.1f} s")
        if state.opt_state is None:
            self.console.print("the checkpoint holds weights alone: the optimizer starts anew")
            return program.fresh_state(state.params, found.step)
        return state

    def _sinks(self, step: int) -> Sinks:
        """Where numbers go; nowhere but on process 0."""
        if not launch.is_main_process():
            return Sinks()
        options, folder = self.options, self.folder
        sinks = Sinks([Terminal(self.console, options.steps, options.lines_every)])
        if folder is not None and "jsonl" in options.metrics:
            lines = functools.partial(JsonLines, folder.metrics, after=step)
            sinks.append(Background(str(folder.metrics), lines))
        if folder is not None and "tensorboard" in options.metrics:
            events = functools.partial(TensorBoard, folder.tensorboard, after=step)
            sinks.append(Background(str(folder.tensorboard), events))
        return sinks

    def _train(
        self,
        program: Program,
        state: TrainState,
        stop: StopSignals,
        watch: launch.Watch,
        sinks: Sinks,
        checkpoints: Checkpoints | None,
        found: Found | None,
    ) -> Outcome:
        options, folder = self.options, self.folder
        schedule = Schedule(
            steps=options.steps,
            eval_every=options.eval_every,
            save_every=options.save_every,
            evaluates_first=options.evaluates_first and found is None,
            max_skipped=options.max_skipped,
        )
        evaluate = None
        if self.held_out is not None and options.eval_batches:
            evaluate = program.evaluation(self.held_out, options.eval_batches, watch)
        shardings = program.step.in_shardings[2]
        with open_batches(self.data, shardings, state.step) as batches:
            return train(
                program.step,
                state,
                batches,
                schedule,
                cost=program.cost,
                sinks=sinks,
                evaluate=evaluate,
                saver=checkpoints,
                profiler=Profiler(options.profile, folder.profile) if folder else None,
                should_stop=stop.is_requested,
                watch=watch,
            )

    # What is said.

    def _tell(self, outcome: Outcome, program: Program, stop: StopSignals) -> None:
        """What training achieved, and if it was stopped, how to go on."""
        if outcome.first is None or outcome.last is None or outcome.typical_seconds is None:
            if not outcome.is_stopped:
                steps = self.options.steps
                self.console.print(f"nothing left to do: {steps} steps have been taken")
        else:
            rate = program.cost.tokens / outcome.typical_seconds
            held_out = "" if outcome.eval_loss is None else f", held out {outcome.eval_loss:.3f}"
            skipped = f"; {outcome.skipped} steps skipped" if outcome.skipped else ""
            self.console.print(
                f"loss {outcome.first['loss']:.3f} -> {outcome.last['loss']:.3f}{held_out}; "
                f"{1000 * outcome.typical_seconds:.0f} ms a step, {rate:,.0f} "
                f"{program.cost.unit}/s; {outcome.seconds:.0f} s in all{skipped}"
            )
        if not outcome.is_stopped:
            return
        then = "nothing was saved: there is no run_dir"
        if self.folder is not None:
            then = f"saved in {self.folder.checkpoints}, resuming goes on"
        if self.folder is not None and outcome.last is None:
            then = "there was nothing new to save, resuming goes on"
        self.console.print(f"stopped by {stop.name} after step {outcome.state.step}: {then}")

    def write_report(self, program: Program, path: Path, *, prices: bool) -> None:
        """The page on the partitioning; with what other decisions would have cost takes a while."""
        if not launch.is_main_process():
            return
        try:
            program.step.report(path, prices=prices)
            shown = path.absolute() if self.folder is None else self.folder.shown(path)
            self.console.print(f"report: {shown}")
        except OSError as error:  # training is worth more
            self.console.print(f"the report could not be written: {error}")


def exit_code(outcome: Outcome) -> int:
    """What a program of a run exits with: 0, or 75 (try again) if it was stopped."""
    return STOPPED_EXIT_CODE if outcome.is_stopped else 0


def find_checkpoint(
    checkpoints: Checkpoints, wanted: int | str | None, console: Console
) -> Found | None:
    """Where a run goes on; None to start anew.

    Raises:
        RunError: it is to start anew, and the folder holds a run.
        CheckpointError: the wanted step has no checkpoint, or all are damaged.
    """
    if wanted is None:
        steps = checkpoints.steps()
        if not steps:
            return None
        raise RunError(
            f"run_dir: {checkpoints.folder.parent} holds a run that has come to step {steps[0]}; "
            "go on from there with --resume (Options.resume), or name another folder"
        )
    found = checkpoints.find(wanted)
    for note in checkpoints.notes:
        console.print(note)
    if found is None:
        console.print("no checkpoint yet: starting anew")
    return found

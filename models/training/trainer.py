"""`Trainer`: a training run of any model, from its first parameters to its last checkpoint.

    compile the step                         models/training/program.py
    find a checkpoint, or make a state       models/training/run/start.py
    take steps, evaluate, save, stop         models/training/run/loop.py
    print, write metrics and the report      models/training/run/output.py

What is checked before is here, and the order of these things.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

import spmd
from models.training.checkpoints.found import CheckpointError, Found
from models.training.checkpoints.store import Checkpoints
from models.training.data.batches import Dataset, fingerprint, open_batches, structs_of
from models.training.errors import DataError, RunError, TrainingError
from models.training.options import Options
from models.training.program import Marks, Program
from models.training.run import output
from models.training.run.compiled import keeping_compiled
from models.training.run.description import RunFolder
from models.training.run.loop import Outcome, Schedule, TrainState, train
from models.training.run.optimizer import OptimizerConfig, OptimizerError
from models.training.run.profile import ProfileError, Profiler
from models.training.run.sinks import Sinks
from models.training.run.start import find_checkpoint, first_state
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
        optimizer: which one, or one of optax. A schedule of ours ends with the run, unless it says
            where.
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
            rule = optimizer
            if isinstance(rule, OptimizerConfig):
                rule = rule.ending_at(options.steps)
            return Program(
                init,
                loss,
                marks,
                structs_of(data),
                batch_marks,
                mesh=mesh,
                optimizer=rule,
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
        self.console = output.make_console()

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
                state = first_state(
                    program,
                    checkpoints,
                    found,
                    self.hooks.first_params,
                    seed=self.options.seed,
                    console=self.console,
                )
            with output.make_sinks(self.options, self.folder, self.console, state.step) as sinks:
                outcome = self._train(program, state, stop, watch, sinks, checkpoints, found)
            self._tell(outcome, program, stop.name)
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
            evaluates_first=options.eval_first and found is None,
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

    def _tell(self, outcome: Outcome, program: Program, signal: str | None) -> None:
        says = output.achieved(outcome, self.options.steps, program.cost)
        if says:
            self.console.print(says)
        if outcome.is_stopped:
            self.console.print(output.stopped(outcome, signal, self.folder))

    def write_report(self, program: Program, path: Path, *, prices: bool) -> None:
        """The page on the partitioning; with what other decisions would have cost takes a while."""
        output.write_report(program.step, path, self.folder, self.console, prices=prices)


def exit_code(outcome: Outcome) -> int:
    """What a program of a run exits with: 0, or 75 (try again) if it was stopped."""
    return STOPPED_EXIT_CODE if outcome.is_stopped else 0

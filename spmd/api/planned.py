"""Programs with a plan: reports about shardings, costs and reasons, and texts of each stage."""

import difflib
import json
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from spmd.api.tracing import kind_text
from spmd.compiler import Request, Stages
from spmd.errors import ArgumentError
from spmd.explain.costs import Collective, list_collectives
from spmd.explain.memory import Memory
from spmd.explain.prices import Prices
from spmd.ir.program import Program
from spmd.ir.text import format_program
from spmd.mesh.sharding import Sharding, format_sharding
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.predict.memory import MemoryUse, peak_memory
from spmd.predict.timeline import Timeline

if TYPE_CHECKING:
    from spmd.explain.data import PlanReport
    from spmd.explain.facts import Facts
    from spmd.explain.measured import Measured


STAGES = (
    "stablehlo", "program", "propagated", "planned", "local", "optimized", "emitted", "hlo"
)  # fmt: skip
"""Stages after which `as_text` prints the program, in order; `hlo` of compiled programs alone."""


class Planned:
    """A program that is planned and partitioned, and the reports that need no run of it."""

    def __init__(
        self, request: Request, stages: Stages, options: Options, target: Topology | None = None
    ) -> None:
        self.request, self.stages, self.options = request, stages, options
        self.target = target or request.mesh.topology
        self.mesh, self.donated = request.mesh, request.donated
        self.donate_argnums = self.donated
        self.in_avals, self.out_avals = jax.tree.map(
            lambda x: jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type),
            (request.args, request.out),
        )
        self.name = request.name or stages.plan.program.name
        self.in_tree: Any = jax.tree.structure(request.args)
        self.kind = kind_text(self.name, request.arg_names, jax.tree.leaves(request.args))
        self.out_info, self.out_tree = request.out, jax.tree.structure(request.out)
        self.measured: Measured | None = None

    @property
    def args_info(self) -> Any:
        """A pytree like `in_avals`, of jax's `ArgInfo`s: the type, and whether it is donated."""
        given = enumerate(jax.tree.leaves(self.in_avals))
        infos = [jax.stages.ArgInfo(aval, i in self.donated) for i, aval in given]
        return jax.tree.unflatten(self.in_tree, infos)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collective ops of one device's program in order, with bytes, count and seconds."""
        return list_collectives(self.stages.optimized, self.stages.plan.topology)

    @property
    def timeline(self) -> Timeline:
        """The predicted start and end of each op in one run, on compute or on the links of axes."""
        return self.stages.timeline

    @property
    def cost(self) -> float:
        """The predicted seconds of one run, in which collectives overlap independent arithmetic."""
        return self.timeline.seconds

    @cached_property
    def predicted_memory(self) -> MemoryUse:
        """The predicted bytes of one device: its buffers, and when each is live."""
        platform = self.stages.plan.topology.platform
        return peak_memory(self.stages.optimized.program, self.donated, platform)

    @property
    def memory(self) -> Memory:
        """The bytes of one device by purpose; predicted, as XLA has not compiled it yet."""
        return Memory.predicted(self.predicted_memory)

    @cached_property
    def prices(self) -> Prices:
        """How many more seconds a run with other decisions takes: without a mark, for example."""
        return Prices(self.stages.plan, self.options)

    # Reports are loaded when asked for: training and serving go without.

    def _facts(self, prices: bool = False) -> "Facts":
        from spmd.explain.facts import Facts

        file = os.path.basename(self.request.function[0]) if self.request.function else ""
        return Facts(
            self.stages,
            self.collectives,
            self.predicted_memory,
            self.name,
            f"{self.name} of {file}" if file else self.name,
            None if self.memory.is_predicted else self.memory,
            self.prices if prices else None,
            self.measured,
        )

    def _report(self, prices: bool = False) -> "PlanReport":
        return self._facts(prices).report()

    def to_json(self, *, prices: bool = False) -> dict[str, Any]:
        """Returns the plan as data for `json.dump`: all that `explain` and `report` show.

        `docs/plan_json.md` describes it; `spmd.explain.from_json` reads it. `prices` is as for
        `explain`.
        """
        return self._report(prices).to_json()

    def __repr__(self) -> str:
        from spmd.explain.text import brief

        return brief(type(self).__name__, self._facts())

    def _repr_html_(self) -> str:
        from spmd.explain.page.page import notebook_cell

        return notebook_cell(self._report())

    def explain(self, value: str | None = None, *, prices: bool = True) -> str:
        """Returns a text: how values are sharded, why, and what it costs; or all about one value.

        Args:
          value: an argument's or a result's name or a pattern of names (`params/*/w`), a value's
            number as in `%12`, or a source line (`model.py:12`) for all that is made there.
          prices: whether to say what other decisions would have cost. That asks the planner again,
            which takes some seconds for large programs.

        Raises:
          ArgumentError: no value has this name.
        """
        from spmd.explain.text import explain_program, explain_value

        if value is not None:
            return explain_value(self.stages, value, self.prices if prices else None)
        return explain_program(self._report(prices))

    def summary(self) -> str:
        """Returns the short form of `explain`, for a terminal."""
        from spmd.explain.text import summarize

        return summarize(self._facts(), self.prices.costly_mark)

    def report(self, path: str | os.PathLike[str], *, prices: bool = True) -> None:
        """Writes what `explain` says as one self-contained HTML page with pictures.

        Args:
          path: the file to write.
          prices: as for `explain`.
        """
        from spmd.explain.page.page import render

        Path(path).write_text(render(self._report(prices)), encoding="utf-8")

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the predicted timeline as a trace, and the measured one where there is one.

        Open it in https://ui.perfetto.dev or chrome://tracing. The predicted run is one process,
        with a track for compute, one for each set of links and one for loops; iterations of a
        loop follow each other as the first one was predicted. What the first device did in the
        last step that `Compiled.measure` profiled is another process. Both begin at 0.

        Args:
          path: the file to write, JSON in the Trace Event Format.
        """
        from spmd.explain.trace import trace_of

        step = () if self.measured is None else self.measured.step
        Path(path).write_text(json.dumps(trace_of(self._report(), step)), encoding="utf-8")

    def as_text(self, stage: str = "planned") -> str:
        """Returns the program as text after a stage of `spmd.api.STAGES`, the same in each process.

        Raises:
          ArgumentError: there is no such stage, or it is `hlo` and this is not compiled by XLA.
        """
        stages, mesh = self.stages, self.mesh

        def sharded(states: Iterable[Sharding | None]) -> str:
            texts = ["made for each use" if s is None else format_sharding(s, mesh) for s in states]
            return format_program(stages.program, texts.__getitem__, mesh)

        def local(program: Program) -> str:
            orders = dict(zip(program.body.args, stages.optimized.argument_orders, strict=True))
            shown = {v: f"in memory: {', '.join(map(str, o))}" for v, o in orders.items() if o}
            return format_program(program, lambda value: shown.get(value, ""), mesh)

        texts: dict[str, Callable[[], str]] = {
            "stablehlo": lambda: str(self.request.module),
            "program": lambda: format_program(stages.program),
            "propagated": lambda: sharded(map(Sharding, stages.propagated.proposals)),
            "planned": lambda: sharded(stages.plan.states),
            "local": lambda: local(stages.partitioned.program),
            "optimized": lambda: local(stages.optimized.program),
            "emitted": lambda: stages.emitted.module,
        }
        if stage in texts:
            return texts[stage]()
        close = difflib.get_close_matches(stage, STAGES, n=1)
        fix = f"write {close[0]!r}" if close else "name a stage"
        if stage == "hlo":
            fix = "`hlo` needs the program compiled: use .compile(...) instead of .lower(...)"
        required = f"one of {', '.join(STAGES)}"
        raise ArgumentError(f"unknown stage {stage!r}", required=required, fix=fix)

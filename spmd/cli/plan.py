"""Finds the mesh of a machine on which a program is fastest, without the machine.

The program is one of
  llama3-70b              a named model: its training step
  path/config.json        a model in Hugging Face's format: its training step
  script.py:build         a function: (mesh, **choices) -> (function, arguments), or a spmd.Task
  package.module:build    the same, imported
  model.mlir              a StableHLO file

Each of its parameters is a flag, as in --batch 512; one with several values is free, and the
search chooses: --batch 256,512. Those of named models are --batch, --seq_len, --remat, --sharding,
--microbatches, --offload_optimizer, --stage_microbatches, --stage_schedule, --matmul, --dtype,
--param_dtype, --optimizer, --attention, --layers. A machine is chip:shape, as v5e:16x16, h200:8,
h200:4x8 (hosts x GPUs), or a slice as clouds name it, as v5p-256.

With --serve the program is a model to be served, and the plan is for a traffic and its targets:
spmd plan --serve --help has its flags.

Examples:
    spmd plan llama3-70b v5p-256 --batch 256 --seq_len 8192
    spmd plan llama3-8b h200:8 b200:8 --batch 64 --price h200=3.5,b200=5.9 --report plans.html
    spmd plan train.py:build v6e-16 --axes data,model --batch 128,256
    spmd plan model.mlir v5e-8 --mesh data=8 --mesh data=4,model=2
    spmd plan --serve llama3.1-8b h200:1 v6e:2x4 --traffic prompt=345,answer=160,rate=20

Exit status: 0; 1 if nothing that was planned fits; 2 for flags and programs that cannot be used.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import spmd
from spmd.api import static_module
from spmd.auto import auto_specs
from spmd.cli.flags import Parser, Switch, words
from spmd.cli.specs import default_to_cpus, mesh_axes
from spmd.errors import ArgumentError
from spmd.frontend.importer.module import boundary_names
from spmd.plan import read_choice

LLAMA, SERVING = "spmd.models.llama.planned", "spmd.serving.planned"


def make_parser() -> Parser:
    """Returns the parser of the flags of `spmd plan`."""
    made = Parser("spmd plan", __doc__)
    add = made.add_argument
    add("program", help="a model's name, config.json, script.py:build, module:build or .mlir file")
    add("machines", nargs="+", help="what to plan for, as v5p-256, v5e:16x16, h200:8")
    add("--serve", action=Switch, help="plan how to serve a model; its own flags")
    add("--axes", type=words, help="names of the mesh axes, major first (data,model)")
    add("--mesh", type=mesh_axes, action="append", help="this mesh alone (repeatable)")
    add("--price", type=prices, default={}, help="of a device an hour, as v5p=4.2,h200=3.5")
    add("--seconds", type=float, default=55.0, help="how long to search")
    add("--top", type=int, default=10, help="so many rows of the table")
    add("--report", metavar="FILE", help="also write a page that compares the candidates")
    add("--out", metavar="FILE", help="write the best: settings (.yaml), or its specs as code")
    add("--json", metavar="FILE", help="write the best plan as data, for spmd diff and spmd check")
    add("--compile", type=int, default=0, metavar="N", help="have the machine's compiler confirm N")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `spmd plan` with these flags (None: `sys.argv`) and returns its exit status."""
    flags = list(sys.argv[1:] if arguments is None else arguments)
    if "--serve" in flags:
        flags.remove("--serve")
        return int(importlib.import_module(SERVING).main(flags))
    given, rest = make_parser().parse_known_args(flags)
    default_to_cpus()
    build, axes = program(given.program)
    found = spmd.plan(
        build,
        given.machines,
        axes=given.axes or axes,
        meshes=given.mesh,
        prices=given.price,
        most_seconds=given.seconds,
        **read_choices(build, rest),
    )
    print(found.text(given.top))
    for row in found.rows[: given.compile]:
        print(row.compiled_text())
    if given.report:
        found.report(given.report)
        print(f"\nreport: {given.report}", file=sys.stderr)
    if given.json:
        best = found.best
        more = {"choices": best.chosen, "settings": best.work.settings}
        data = json.dumps(best.lowered.to_json() | more, default=str)
        Path(given.json).write_text(data, encoding="utf-8")
    if given.out:
        Path(given.out).write_text(found.best.recipe(Path(given.out).suffix), encoding="utf-8")
    return 0 if found.best.verdict != "does not fit" else 1


def program(name: str) -> tuple[Callable[..., Any], Sequence[str]]:
    """Returns (the build that a name on the command line means, its usual axes)."""
    place, _, function = name.rpartition(":")
    if place:
        if (build := getattr(_module(place), function, None)) is None:
            raise ArgumentError(
                f"{place} has no function {function!r}",
                required="a function: (mesh, **choices) -> (function, arguments)",
                fix="define one that returns train_step, (params, opt_state, batch)",
            )
        return build, ("data", "model")
    if name.endswith((".mlir", ".mlirbc", ".bc")):
        return partial(_stablehlo, name), ("data", "model")
    llama = importlib.import_module(LLAMA)
    build = partial(llama.training_step, model=name)
    build.__name__ = name  # type: ignore[attr-defined]
    return build, llama.axes_of(llama.config_of(name))


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ArgumentError(
            f"there is no file {place}", fix="name a Python file, as train.py:build"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module


def _stablehlo(path: str, mesh: Any) -> spmd.Lowered:
    """A build of a StableHLO file: every argument as the planner likes it best."""
    module, options = static_module(path, None), spmd.Options(topology=mesh.topology)
    open_ = [None] * len(boundary_names(module)[0])
    return spmd.lower_stablehlo(module, mesh, auto_specs(module, mesh, open_), None, options)


def read_choices(build: Callable[..., Any], words_: Sequence[str]) -> dict[str, Any]:
    """Reads `--batch 256,512 --remat=full` as parameters of a build."""
    given: dict[str, Any] = {}
    rest = list(words_)
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if not name.startswith("--") or not (value or rest):
            raise ArgumentError(f"{name!r} is no flag with a value", fix="write --batch 512")
        given[name.removeprefix("--").replace("-", "_")] = read_choice(value or rest.pop(0))
    return given


def prices(text: str) -> dict[str, float]:
    """Parses "v5p=4.2,h200=3.5" as {"v5p": 4.2, "h200": 3.5}."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): float(price) for name, _, price in pairs}

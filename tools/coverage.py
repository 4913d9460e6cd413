"""Writes docs/coverage.md and docs/coverage_programs.md: what becomes of every op, and what is run.

With --check it writes nothing, and fails if a page is out of date.

Example:
    tools/run coverage --check
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from spmd.cli.flags import Parser, Switch
from spmd.frontend.importer.handlers import SAME

ROOT = Path(__file__).resolve().parent.parent
OPS_PAGE = ROOT / "docs" / "coverage.md"
PROGRAMS_PAGE = ROOT / "docs" / "coverage_programs.md"

HEAD = """# Supported ops

For those who want to know whether their program compiles: every op of StableHLO and CHLO, every
known [custom call](#custom-calls), and what the compiler does with it. No op is silently
replicated. [Programs that are run](coverage_programs.md) has the whole programs that tests compare
with `jax.jit`. `tools/run coverage` writes both pages.

| what the table says | what it means |
| --- | --- |
| rule + local lowering | the rule says how the op may be split, the lowering what one device does |
| canonicalized | `frontend/canonicalize.py` or StableHLO's own passes write it with other ops |
| refused | a program with it is an error that names the op, its source line and the reason |
| executed | a test runs it under random shardings and compares with the whole program or numpy |

## Ops

| op | how | executed |
| --- | --- | --- |
"""
CALLS_HEAD = """
## Custom calls

Two lines of the table stand for many calls:

- `custom_call:num_batch_dims` is every call that says how many of its leading dims are a batch.
  jax writes that on its calls of LAPACK, cuSOLVER, cuSPARSE, MAGMA and their ROCm counterparts:
  `*_potrf_ffi`, `*_getrf_ffi`, `*_geqrf_ffi`, `*_orgqr_ffi`, `*_gesdd_ffi`, `*_gesvdj_ffi`,
  `*_syevd_ffi`, `*_geev_ffi`, `*_gees_ffi`, `*_gehrd_ffi`, `*_sytrd_ffi`, `*_trsm_ffi`,
  `*_gtsv_ffi`, `cu_lu_pivots_to_permutation`, ...
- `custom_call:in_manual_region` is every call without a rule inside a `jax.shard_map` over all axes
  of the mesh. Such kernels are written for one device, and stay as they are.

Any other call needs a rule of its own: [custom kernels](custom_calls.md) says how to write one.
Calls in which jax writes what depends on symbolic dims (`stablehlo.dynamic_reduce_window`,
`dynamic_rng_bit_generator`, `dynamic_top_k`, `dynamic_approx_top_k`) are the ops that they stand
for, once the dims have sizes.
Calls for TPUs are lowered in tests. Those for NVIDIA GPUs run in `tests/accelerators`, which
repeats every op's cases and training steps on the GPUs at hand.

| call | how | executed |
| --- | --- | --- |
"""

PROGRAMS_HEAD = """# Programs that are run

For those who want to know whether programs like theirs were tried: the whole programs that the
tests run (`benchmarks/corpus/`), models of flax and equinox, every optimizer of optax, and what
else people write. [Supported ops](coverage.md) has the ops; `tools/run coverage` writes both pages.

Each runs partitioned and under plain `jax.jit`, on the meshes {meshes} of the axes data,
(shard,) model. The results are equal within the tolerance of their dtypes, and random bits are
identical. Only arguments are marked, as `benchmarks/corpus/program.py` has it. `scripts/test` runs
programs that have a mesh in the column `quick on`, and `scripts/test -m heavy` runs the others.

| program | what it is | quick on |
| --- | --- | --- |
"""

STRUCTURE = {
    "custom_call:Sharding": "a mark",
    **dict.fromkeys(SAME, "a mark: it returns its operand"),
    "sdy.constant": "read as `stablehlo.constant`",
    "sdy.data_flow_edge": "left out, its sharding is a mark",
    "sdy.func_data_flow_edge": "left out, its sharding is a mark",
    "sdy.manual_computation": "a region for one device along some axes (`jax.shard_map`)",
    "sdy.mesh": "its axes are written in those of the mesh that is compiled for",
    "sdy.named_computation": "inlined, its shardings are marks",
    "sdy.propagation_barrier": "left out",
    "sdy.return": "the end of a region",
    "sdy.sharding_group": "left out",
    "stablehlo.case": "control flow: its regions are partitioned",
    "stablehlo.composite": "inlined, if not registered; one named like a CHLO op becomes that op",
    "stablehlo.custom_call": "by its target, see below",
    "stablehlo.get_tuple_element": "folded when the program is read",
    "stablehlo.if": "control flow: its regions are partitioned",
    "stablehlo.return": "the end of a region",
    "stablehlo.tuple": "folded when the program is read",
    "stablehlo.while": "control flow: its regions are partitioned",
}


def how(name: str) -> str:
    """What becomes of an op, in a few words; empty if nobody knows."""
    from spmd.frontend.canonicalize import CANONICAL
    from spmd.frontend.importer.ops import LEGALIZED, REFUSED
    from spmd.ir.dialect import registry
    from spmd.lowering.local import table as local

    has_rule = name in registry.registered_ops() and name in local.registered_ops()
    if name in REFUSED and has_rule:
        return "rule + local lowering in `jax.shard_map`; refused outside, unless of one device"
    if name in REFUSED:
        return f"refused: {REFUSED[name].reason}"
    if name in CANONICAL:
        return "canonicalized"
    if name in LEGALIZED:
        return "canonicalized by StableHLO's passes"
    if has_rule:
        return "rule + local lowering"
    return STRUCTURE.get(name, "")


def names_of(dialects: tuple[str, ...]) -> set[str]:
    """Every op of some dialects that a table names."""
    from spmd.frontend.canonicalize import CANONICAL
    from spmd.frontend.importer.ops import LEGALIZED, REFUSED
    from spmd.ir.dialect import registry

    names = {*CANONICAL, *LEGALIZED, *REFUSED, *STRUCTURE, *registry.registered_ops()}
    return {name for name in names if name.startswith(dialects)}


def executed() -> set[str]:
    """Names of the ops that the tests run, as they say with eight CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    more = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command, env = [sys.executable, "-m", "tests.ir.dialect.executed"], {**os.environ, **more}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def programs() -> str:
    """The page about the corpus."""
    from benchmarks.corpus.program import MESHES, QUICK_MESH
    from benchmarks.corpus.programs import PROGRAMS

    lines = []
    for program in PROGRAMS:
        what = (program.make.__doc__ or "").partition("\n")[0].strip()
        quick = "-" if program.heavy else QUICK_MESH
        lines.append(f"| `{program.name}` | {what} | {quick} |\n")
    return PROGRAMS_HEAD.format(meshes=", ".join(MESHES)) + "".join(lines)


def rows(names: Iterable[str], ran: set[str]) -> str:
    """Table rows; what is refused or a mere bracket has nothing to execute."""
    lines = []
    for name in names:
        what = how(name)
        runs = "yes" if name in ran else "no"
        if what.startswith("refused") or name == "stablehlo.return":
            runs = "-"
        lines.append(f"| `{name}` | {what or '**missing**'} | {runs} |\n")
    return "".join(lines)


def ops() -> str:
    """The page about ops and custom calls."""
    from spmd.frontend.importer.ops import dialect_ops

    ran = executed()
    names = sorted({*dialect_ops(), *names_of(("stablehlo.", "chlo.", "sdy."))})
    calls = sorted(names_of(("custom_call:",)))
    return HEAD + rows(names, ran) + CALLS_HEAD + rows(calls, ran)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run coverage", __doc__)
    parser.add_argument("--check", action=Switch, help="write nothing; fail if a page is old")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pages, or checks them."""
    given = make_parser().parse_args(arguments)
    for page, text in ((OPS_PAGE, ops()), (PROGRAMS_PAGE, programs())):
        if not given.check:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            sys.exit(f"error: {page.relative_to(ROOT)} is out of date: run tools/run coverage")

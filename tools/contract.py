"""What `spmd check` catches: regressions and harmless changes put into examples, one at a time.

Each change is an edit of an example's text. The plan of the edited program is compared with that of
the program as it is, as `spmd.explain.assert_plan` does.

MaxText's step is among them where its package is.

Example:
    tools/run contract
"""

import contextlib
import functools
import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

import spmd
from spmd.cli.flags import Parser
from spmd.explain.contract import breaches
from spmd.explain.data import PlanReport

EXAMPLES = Path(__file__).parents[1] / "examples"
TOPOLOGY = "v5e:2x4"


class Edit(NamedTuple):
    """A change of an example that makes its plan worse."""

    example: str
    what: str
    old: str
    new: str


WHOLE = "spmd.mark_sharding({0}, mesh, (None,) * {0}.ndim) if 'mesh' in globals() else {0}"
REGRESSIONS = (
    Edit("mlp", "a lost mark of the batch", 'batch["x"] = spmd.mark_sharding(batch["x"], mesh, '
         '("data", None))', 'batch["x"] = spmd.mark_sharding(batch["x"], mesh, (None, None))'),
    Edit("mlp", "a lost mark of a weight", 'mesh, (None, "model"))', "mesh, (None, None))"),
    Edit("mlp", "activations gathered", "    return jnp.mean((hidden",
         f"    hidden = {WHOLE.format('hidden')}\n    return jnp.mean((hidden"),
    Edit("mlp", "the loss computed again", "grads), loss\n",
         "grads), loss + loss_fn(jax.tree.map(jnp.tanh, params), batch)\n"),
    Edit("mlp", "the batch's mark on another axis", '(batch["x"], mesh, ("data", None))',
           '(batch["x"], mesh, (None, "data"))'),
    Edit("fsdp", "weights kept whole", 'params, mesh, {"*": ("data", None)}',
         'params, mesh, {"*": (None, None)}'),
    Edit("fsdp", "a batch kept whole", 'batch, mesh, {"*": ("data", None)}',
         'batch, mesh, {"*": (None, None)}'),
    Edit("fsdp", "nothing donated", ", donate_argnums=(0, 1))", ")"),
    Edit("fsdp", "rows moved in each layer", "            x += jax.nn",
         "            x = jnp.roll(x, 1, 0)\n            x += jax.nn"),
    Edit("fsdp", "the batch split by columns", 'batch, mesh, {"*": ("data", None)}',
         'batch, mesh, {"*": (None, "data")}'),
    Edit("fsdp", "moments in a wider type", "optimizer = optax.adamw(1e-3)",
         "optimizer = optax.chain(optax.trace(0.9), optax.adamw(1e-3))"),
    Edit("moe", "experts kept whole", 'split, whole = ("expert", None, None)',
         "split, whole = (None, None, None)"),
    Edit("moe", "texts over data alone", '(("data", "expert"), None))', '("data", None))'),
    Edit("moe", "logits gathered", "    loss = optax.softmax",
         f"    logits_BSV = {WHOLE.format('logits_BSV')}\n    loss = optax.softmax"),
    Edit("moe", "tokens gathered before the experts", "    out_BSH, balance = mixture",
         f"    x_BSH = {WHOLE.format('x_BSH')}\n    out_BSH, balance = mixture"),
    Edit("flax_nnx", "a table kept whole", '"embed/*": ("model", "data")',
         '"embed/*": (None, None)'),
    Edit("flax_nnx", "an MLP kept whole", '"*/up/kernel/*": ("data", "model")',
         '"*/up/kernel/*": (None, None)'),
    Edit("flax_nnx", "the text kept whole", 'text, mesh, ("data", None))',
         "text, mesh, (None, None))"),
    Edit("flax_nnx", "attention's output over one axis", '("model", None, "data"),  # heads',
         '(None, None, "data"),  # heads'),
    Edit("flax_nnx", "logits gathered", "        return optax.softmax",
         f"        logits = {WHOLE.format('logits')}\n        return optax.softmax"),
    Edit("llama_2d", "an MLP kept whole", '"layers/gate": (None, "data", "model")',
         '"layers/gate": (None, None, None)'),
    Edit("llama_2d", "a head gathered", '"head": ("data", "model")', '"head": (None, None)'),
    Edit("maxtext_step", "the batch kept whole", 'mesh, {"*": ("data", None)}',
         'mesh, {"*": (None, None)}'),
    Edit("maxtext_step", "a lost mark of the MLP", '"model/*mlp/wo/*": ("model", None, "data")',
         '"model/*mlp/wo/*": (None, None, None)'),
    Edit("maxtext_step", "the logits' weights whole", 'logits_dense/kernel*": ("data", "model")',
         'logits_dense/kernel*": (None, None)'),
    Edit("maxtext_step", "nothing donated", ", donate_argnums=0)", ")"),
    Edit("maxtext_step", "activations in a wider type", '"hardware": "cpu"',
         '"hardware": "cpu", "dtype": "float32"'),
    Edit("maxtext_step", "logits in a wider type", '"hardware": "cpu"',
         '"hardware": "cpu", "logits_dot_in_fp32": True'),
)  # fmt: skip


def _rename(old: str, new: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"\b{old}\b", new, text)


def _in_function(line: str) -> Callable[[str], str]:
    """Puts a line at the beginning of the first function whose body begins with `    loss`."""
    return lambda text: re.sub(r"(?m)^(def \w+\(.*\):\n)", rf"\g<1>    {line}\n", text, count=1)


HARMLESS: dict[str, Callable[[str], str]] = {
    "comments above": lambda text: "# one\n# two\n\n" + text,
    "blank lines inside": lambda text: text.replace("\n    ", "\n\n    ", 3),
    "a function renamed": _rename("loss_fn", "objective"),
    "a variable renamed": _rename("grads", "gradients"),
    "an import renamed": lambda text: text.replace("import jax\n", "import jax\nimport math\n", 1),
    "a docstring": _in_function('"""Computes."""'),
    "an unused constant": _in_function("unused = 3"),
    "another learning rate": lambda text: text.replace("1e-3", "3e-4").replace("0.1 *", "0.2 *"),
    "other numbers in the data": lambda text: text.replace("default_rng(", "default_rng(1 + "),
    "a name scope": lambda text: text.replace(
        "spmd.jit(train_step", 'spmd.jit(jax.named_scope("step")(train_step)'
    ),
}
"""Ten for each example."""


class _Found(Exception):
    def __init__(self, report: PlanReport) -> None:
        self.report = report


def plan_of(text: str, name: str) -> PlanReport:
    """Runs a program up to its first compilation, and returns the plan of that."""

    def compile_(self: Any, *args: Any, **_: Any) -> None:
        raise _Found(self.lower(*args, topology=spmd.Topology(TOPOLOGY))._report())

    ran = compile(text, f"{name}.py", "exec")
    quiet = contextlib.redirect_stdout(io.StringIO())
    jit = jax.jit

    def by_jax_(fn: Any = None, *args: Any, **options: Any) -> Any:
        is_beside = getattr(fn, "__name__", "") == "train_step"  # which the example compares with
        if not is_beside:
            return jit(*filter(None, [fn]), *args, **options)
        return functools.partial(jax.eval_shape, lambda *each: fn(*each))  # jax keeps no trace

    by_jax = mock.patch.object(jax, "jit", by_jax_)
    with mock.patch.object(spmd.Jitted, "compile", compile_), by_jax, quiet:
        try:
            exec(ran, {"__name__": "example"})
        except _Found as found:
            return found.report
    raise ValueError(f"{name} compiles nothing")


def edited(text: str, edit: Edit) -> str:
    """Returns the program with a change; ValueError if that is not there to be changed."""
    if edit.old not in text:
        raise ValueError(f"{edit.example} has no {edit.old!r}")
    return text.replace(edit.old, edit.new)


def found_by_check() -> Iterator[tuple[str, str, bool, str]]:
    """Yields (example, change, whether it is a regression, the first breach or nothing)."""
    names = dict.fromkeys(edit.example for edit in REGRESSIONS)
    if importlib.util.find_spec("maxtext") is None:
        del names["maxtext_step"]
    for name in names:
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        kept = plan_of(text, name)
        changed = [(e.what, True, edited(text, e)) for e in REGRESSIONS if e.example == name]
        changed += [(what, False, change(text)) for what, change in HARMLESS.items()]
        for what, is_regression, program in changed:
            worse = breaches(kept, plan_of(program, name))
            yield name, what, is_regression, worse[0] if worse else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each change, and the counts; 1 if a harmless one is a breach."""
    Parser("tools/run contract", __doc__).parse_args(arguments)
    rows = list(found_by_check())
    for name, what, is_regression, breach in rows:
        kind = "regression" if is_regression else "harmless"
        print(f"{name:10} {kind:10} {what:36} {breach or '-'}")
    caught = sum(bool(breach) for *_, is_regression, breach in rows if is_regression)
    alarms = sum(bool(breach) for *_, is_regression, breach in rows if not is_regression)
    bad = sum(is_regression for *_, is_regression, _ in rows)
    print(f"{caught} of {bad} regressions caught, {alarms} of {len(rows) - bad} false alarms")
    return 1 if alarms else 0

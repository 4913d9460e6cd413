"""Programs that several tests compile: an MLP training step and a tiny Llama's."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from benchmarks.hlo.runs import Runs, arrays
from benchmarks.llama_step import train_step
from spmd.measure.hlo import parse_module_text
from spmd.mesh.sharding import Mark, Sharding
from spmd.models.llama import fresh, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import named_config
from spmd.planning.plan import Plan


def in_order(text: str) -> str:
    """Values numbered as they appear: jax releases drop different ones of two that are equal."""
    numbers: dict[str, int] = {}
    return re.sub(r"%\d+", lambda found: f"%{numbers.setdefault(found[0], len(numbers))}", text)


class Training(NamedTuple):
    """A training step with everything needed to run it, partitioned or not."""

    step: Any
    plain_step: Any
    optimizer: optax.GradientTransformation
    params: Any
    marked_params: Any
    batch: Any
    marked_batch: Any
    mesh: spmd.Mesh

    def jit(self, **options: Any) -> spmd.Jitted:
        chosen = spmd.Options(check=True, **options)
        return spmd.jit(self.step, mesh=self.mesh, donate_argnums=(0, 1), options=chosen)

    def compile(self, **options: Any) -> spmd.Compiled:
        return self.jit(**options).compile(*self.structs())

    def lower(self, **options: Any) -> spmd.Lowered:
        return self.jit(**options).lower(*self.structs())

    def run(self, steps: int, **options: Any) -> tuple[Any, Any, list[float]]:
        """Parameters, optimizer state and losses of a few partitioned steps."""
        compiled = self.compile(**options)
        state = compiled.init(1, self.optimizer.init, self.marked_params)
        return take(compiled, self.marked_params, state, self.marked_batch, steps)

    def structs(self) -> tuple[Any, Any, Any]:
        state = jax.eval_shape(self.optimizer.init, self.params)
        return self.marked_params, state, self.marked_batch


def take(
    step: Any, params: Any, state: Any, batch: Any, steps: int
) -> tuple[Any, Any, list[float]]:
    """Parameters, optimizer state and losses of so many steps with one batch."""
    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, state, losses


def mlp(mesh: spmd.Mesh) -> Training:
    """Two matrices, AdamW; parameters, inputs and the hidden layer are marked."""
    params = {
        "w_in": jnp.asarray(np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32)),
        "w_out": jnp.asarray(np.linspace(1, -1, 32 * 8, dtype=np.float32).reshape(32, 8)),
    }
    batch = {
        "x": np.sin(np.arange(8 * 16, dtype=np.float32)).reshape(8, 16),
        "y": np.ones((8, 8), np.float32),
    }
    optimizer = optax.adamw(1e-2)

    def step(params: Any, opt_state: Any, batch: Any, mark: Any = True) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h = jax.nn.relu(batch["x"] @ params["w_in"])
            if mark:
                h = spmd.mark_sharding(h, mesh, ("data", "model"))
            return jnp.mean((h @ params["w_out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def plain_step(params: Any, opt_state: Any, batch: Any) -> Any:
        return step(params, opt_state, batch, mark=False)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        return step(params, opt_state, batch)

    specs = {"w_in": ("data", "model"), "w_out": ("model", "data")}
    marked = spmd.mark_tree(jax.tree.map(jnp.copy, params), mesh, specs)
    marked_batch = spmd.mark_tree(batch, mesh, {"*": ("data", None)})
    return Training(train_step, plain_step, optimizer, params, marked, batch, marked_batch, mesh)


def llama_optimizer(name: str) -> optax.GradientTransformation:
    """AdamW, or Adafactor factoring even the tiny model's matrices."""
    if name == "adamw":
        return optax.adamw(1e-3)
    return optax.adafactor(1e-3, min_dim_size_to_factor=8)


def llama(mesh: spmd.Mesh, optimizer: str, scan: bool, **config: Any) -> Training:
    """A tiny Llama's training step, marked by the default tables."""
    cfg = dataclasses.replace(named_config("tiny"), scan_layers=scan, **config)
    opt, params, batch = llama_optimizer(optimizer), llama_params(cfg), llama_batch(cfg)
    marks = sharding.activation_marks(mesh, cfg)
    marked = sharding.mark_params(jax.tree.map(jnp.copy, params), mesh, cfg)
    steps = train_step(cfg, opt, marks), train_step(cfg, opt)
    return Training(*steps, opt, params, marked, batch, sharding.mark_batch(batch, mesh), mesh)


@lru_cache(maxsize=8)
def llama_params(cfg: LlamaConfig) -> Any:
    return jax.jit(lambda key: fresh.init(key, cfg))(jax.random.key(0))


def llama_batch(cfg: LlamaConfig) -> dict[str, np.ndarray[Any, Any]]:
    """Eight sequences of random tokens."""
    tokens = np.random.RandomState(0).randint(0, cfg.vocab_size, (8, 17)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def assert_marks_hold(plan: Plan) -> None:
    """Marked values are split as marked: along a closed dim just so, along an open one at first."""
    program = plan.program
    owners = {*program.body.args, *(v for op in program.walk() if op.is_mark for v in op.results)}
    returned = list(zip(program.body.results, plan.results, strict=True))
    for value, mark in plan.propagated.marks.items():
        # A result's mark holds for what is returned, not for the value, which may be there twice.
        found = [s for v, s in returned if v == value]
        states = [plan.states[value]] if value in owners else found
        assert any(state is not None and _keeps(mark, state) for state in states), mark.reason


def _keeps(mark: Mark, state: Sharding) -> bool:
    dims = zip(mark.dims, mark.open, state.dims, strict=True)
    kept = (have[: len(wanted) if is_open else None] == wanted for wanted, is_open, have in dims)
    return not state.partial and all(kept)


def arrays_made(text: str) -> set[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of whatever is ever whole in an optimized module: not inside of fusions."""
    module = parse_module_text(text)
    runs = Runs(module).counts()
    every = (i for name, own in module.computations.items() if runs[name] for i in own)
    return {array for i in every if not i.type.startswith("(") for array in arrays(i.type)}


def sent_by_kind(collectives: Iterable[Any]) -> Counter[str]:
    """Bytes that one device sends in each kind of collective, ours or those of an HLO text."""
    sent: Counter[str] = Counter()
    for c in collectives:
        sent[c.kind] += c.bytes * c.count
    return sent

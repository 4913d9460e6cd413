"""Optimizers in a compiled training step: optax's as they are; torch's SGD, Adam and AdamW in jax.

The parameter groups of a torch optimizer are read before each step, so that its learning rate
schedulers work. Their numbers are computed here in double precision, as PyTorch does, and are
arguments of the program: another learning rate needs no other program.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd.api import path_name
from spmd.errors import ArgumentError, described
from spmd.torch.arrays import State, array_of, tensor_of


def optimizer_of(given: Any, state: State) -> "OptaxOptimizer | TorchOptimizer":
    """Wraps an optimizer of optax or torch for a training step; ArgumentError for anything else."""
    if isinstance(given, torch.optim.Optimizer):
        return TorchOptimizer(given, state)
    if callable(getattr(given, "init", None)) and callable(getattr(given, "update", None)):
        return OptaxOptimizer(given, state)
    raise ArgumentError(
        f"a {type(given).__name__} is no optimizer",
        actual=described(given),
        required="one of torch.optim, made of the module's parameters, or one of optax",
        fix="pass torch.optim.AdamW(module.parameters(), lr=1e-3), or optax.adamw(1e-3)",
    )


class OptaxOptimizer:
    """An optax optimizer of all parameters that require a gradient, whose names are `trained`."""

    key = ()  # what the program depends on; `written` and `filled` are of torch's optimizers
    written = filled = frozenset[str]()

    def __init__(self, optimizer: Any, state: State) -> None:
        self._optimizer = optimizer
        self.trained = tuple(n for n, p in state.parameters.items() if p.requires_grad)

    def init(self, params: dict[str, Any]) -> Any:
        """Returns the optimizer's state before the first step."""
        return self._optimizer.init(params)

    def scalars(self, steps: int) -> Any:
        """Returns the numbers that step `steps` (from 0) takes as arguments: none for optax."""
        return ()

    def update(self, grads: Any, state: Any, params: Any, scalars: Any) -> tuple[Any, Any]:
        """Returns (new parameters, new state) after a step; a gradient of None counts as zeros."""
        whole = {n: jnp.zeros_like(params[n]) if g is None else g for n, g in grads.items()}
        updates, state = self._optimizer.update(whole, state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), state

    def saved(self, state: Any, steps: int) -> dict[str, Any]:
        """Returns `{"state": {path in the pytree: tensor on the CPU}}`, to be saved."""
        leaves = jax.tree_util.tree_flatten_with_path(state)[0]
        return {"state": {path_name(path): tensor_of(leaf) for path, leaf in leaves}}

    def load(self, given: Mapping[str, Any] | None) -> tuple[dict[str, Any], int]:
        """Returns ({path in the state: array} of `given`, empty if None; 0 as number of steps)."""
        tensors = given["state"] if given else {}
        return {n: array_of(t, f"optimizer state {n!r}") for n, t in tensors.items()}, 0


class _Rule(NamedTuple):
    # group -> names of the tensors that it keeps for each parameter
    slots: Callable[[Mapping[str, Any]], tuple[str, ...]]
    # group, number of the step from 1 -> numbers
    scalars: Callable[[Mapping[str, Any], int], dict[str, float]]
    # gradient, tensors by slot, parameter, group, scalars -> new parameter, new tensors
    update: Callable[..., tuple[Any, dict[str, Any]]]
    flags: tuple[str, ...]  # entries of a group that the program depends on


def _sgd(grad: Any, slots: Any, param: Any, group: Any, now: Any) -> tuple[Any, dict[str, Any]]:
    grad = grad + now["weight_decay"] * param
    if not slots:
        return param - now["lr"] * grad, {}
    buffer = now["momentum"] * slots["momentum_buffer"] + now["share"] * grad
    move = grad + now["momentum"] * buffer if group["nesterov"] else buffer
    return param - now["lr"] * move, {"momentum_buffer": buffer}


def _adam_scalars(group: Mapping[str, Any], step: int) -> dict[str, float]:
    beta1, beta2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    return {
        "keep1": beta1,
        "take1": 1 - beta1,
        "keep2": beta2,
        "take2": 1 - beta2,
        "rate": lr / (1 - beta1**step),
        "scale": (1 - beta2**step) ** 0.5,
        "eps": group["eps"],
        "shrink": 1 - lr * decay if decoupled else 1.0,
        "weight_decay": 0.0 if decoupled else decay,
    }


def _adam(grad: Any, slots: Any, param: Any, group: Any, now: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (new parameter, new slots) after a step of Adam, AdamW or AMSGrad, as `group` says.

    Slots are torch's name -> moment; `now` is `_adam_scalars` of the step. Papers: Kingma, Ba
    2015; Loshchilov, Hutter 2019; Reddi 2018.
    """
    grad = grad + now["weight_decay"] * param
    first = now["keep1"] * slots["exp_avg"] + now["take1"] * grad
    second = now["keep2"] * slots["exp_avg_sq"] + now["take2"] * grad * grad
    new, largest = {"exp_avg": first, "exp_avg_sq": second}, second
    if group["amsgrad"]:
        largest = new["max_exp_avg_sq"] = jnp.maximum(slots["max_exp_avg_sq"], second)
    move = first / (jnp.sqrt(largest) / now["scale"] + now["eps"])
    return param * now["shrink"] - now["rate"] * move, new


_SGD = _Rule(
    lambda group: ("momentum_buffer",) if group["momentum"] else (),
    lambda group, _: {n: float(group[n]) for n in ("lr", "weight_decay", "momentum")},
    _sgd,
    ("momentum", "nesterov", "maximize", "dampening"),
)
_ADAM = _Rule(
    lambda group: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2],
    _adam_scalars,
    _adam,
    ("amsgrad", "maximize"),
)
RULES = {torch.optim.SGD: _SGD, torch.optim.Adam: _ADAM, torch.optim.AdamW: _ADAM}


class TorchOptimizer:
    """Computes in jax what a torch optimizer does; a step does not change the latter's tensors.

    The state is `{slot: {parameter: array}}`, by torch's names: `exp_avg`, `momentum_buffer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        if type(optimizer) not in RULES:
            raise ArgumentError(
                f"the optimizer {type(optimizer).__name__} of torch is not known here",
                required=", ".join(kind.__name__ for kind in RULES),
                fix="take one of these, or the same of optax",
            )
        self.optimizer = optimizer
        self._rule = RULES[type(optimizer)]
        # Name of each of its parameters, in its order -> number of its group.
        self._group_of: dict[str, int] = {}
        names = {id(parameter): name for name, parameter in state.parameters.items()}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ArgumentError(
                        f"group {number} of the optimizer has a parameter that is not the module's",
                        actual=f"a parameter of shape {tuple(parameter.shape)}",
                        fix="make the optimizer of module.parameters(), of this very module",
                    )
                self._group_of[names[id(parameter)]] = number
        self._parameters = state.parameters
        self.trained = tuple(n for n in self._group_of if state.parameters[n].requires_grad)
        # The slots of each group that its flags have asked for so far: torch keeps those, too.
        self._slots: list[tuple[str, ...]] = [()] * len(optimizer.param_groups)
        # "slot/parameter" of what the last trace of `update` wrote, and of all that has a value: a
        # parameter that no gradient has reached yet has none.
        self.written: set[str] = set()
        self.filled: set[str] = set()

    @property
    def key(self) -> Any:
        """(Flags such as `amsgrad`, slots), each by group: what the program depends on."""
        groups = self.optimizer.param_groups
        for number, group in enumerate(groups):
            self._slots[number] = max(self._slots[number], self._rule.slots(group), key=len)
        flags = [tuple(bool(group[flag]) for flag in self._rule.flags) for group in groups]
        return tuple(flags), tuple(self._slots)

    def init(self, params: dict[str, Any]) -> Any:
        """Returns the state before the first step: {slot: {trained parameter: zeros}}."""
        state: dict[str, dict[str, Any]] = {}
        for name in self.trained:
            for slot in self._slots[self._group_of[name]]:
                state.setdefault(slot, {})[name] = jnp.zeros_like(params[name])
        return state

    def scalars(self, steps: int) -> Any:
        """Returns (list of each group's {name: number}, {parameter: share}) of the next step.

        `steps` are done. With dampening a share is how much of a gradient the momentum takes.
        """
        # With dampening also how much of each gradient its buffer takes: of the first one all.
        shares = {
            name: np.float32(1 - group["dampening"] * (f"momentum_buffer/{name}" in self.filled))
            for name in self.trained
            if (group := self._group(name)).get("dampening")
        }
        return [
            {name: np.float32(x) for name, x in self._rule.scalars(group, steps + 1).items()}
            for group in self.optimizer.param_groups
        ], shares

    def update(self, grads: Any, state: Any, params: Any, scalars: Any) -> tuple[Any, Any]:
        """Returns (new parameters, new state); where a gradient is None neither changes."""
        params = dict(params)
        state = {slot: dict(tensors) for slot, tensors in state.items()}
        (groups, shares), self.written = scalars, set()
        for name, grad in grads.items():
            if grad is None:
                continue  # neither moved nor decayed
            group, now = self._group(name), groups[self._group_of[name]]
            now = {**now, "share": shares.get(name, 1.0)}
            own = {slot: state[slot][name] for slot in self._rule.slots(group)}
            grad = -grad if group["maximize"] else grad
            param, new = self._rule.update(grad, own, params[name], group, now)
            params[name] = param.astype(params[name].dtype)
            for slot, array in new.items():
                self.written.add(f"{slot}/{name}")
                state[slot][name] = array.astype(own[slot].dtype)
        return params, state

    def saved(self, state: Any, steps: int) -> dict[str, Any]:
        """Returns the state in the form of the torch optimizer's own `state_dict()`, on the CPU."""
        found: dict[str, Any] = self.optimizer.state_dict()
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        found["state"] = {}
        for name, number in zip(self._group_of, numbers, strict=True):
            tensors = {
                slot: tensor_of(arrays[name], dtype=self._parameters[name].dtype)
                for slot, arrays in state.items()
                if f"{slot}/{name}" in self.filled
            }
            if steps and tensors:
                step = {} if self._rule is _SGD else {"step": torch.tensor(float(steps))}
                found["state"][number] = step | tensors
        return found

    def load(self, given: Mapping[str, Any] | None) -> tuple[dict[str, Any], int]:
        """Loads `given`, if any, from `saved` or `state_dict()`, into the torch optimizer.

        Returns ({"slot/parameter": array} of what that holds now, the number of steps taken).
        """
        if given:
            self.optimizer.load_state_dict({k: given[k] for k in ("state", "param_groups")})
        arrays, steps = {}, set()
        for name in self.trained:
            own = self.optimizer.state.get(self._parameters[name], {})
            for slot in self._rule.slots(self._group(name)):
                if own.get(slot) is not None:
                    arrays[f"{slot}/{name}"] = array_of(own[slot], f"{slot} of {name!r}")
            if own:
                steps.add(int(own.get("step", 1)))
        if len(steps) > 1:
            raise ArgumentError(
                "the optimizer's parameters were updated different numbers of times",
                actual=f"steps {sorted(steps)}",
                required="one number of steps for all of them",
                fix="make a new optimizer, without its state",
            )
        self.filled = set(arrays)
        return arrays, max(steps, default=0)

    def _group(self, name: str) -> Mapping[str, Any]:
        group: Mapping[str, Any] = self.optimizer.param_groups[self._group_of[name]]
        return group

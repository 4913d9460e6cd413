"""Runs a torch module as a pure jax function of its tensors, its inputs and a random key.

torchax computes each op with jax. Four things that it does unlike PyTorch are corrected here:
`torch.no_grad` and `detach` stop gradients, BatchNorm updates its running statistics, random
numbers come from a key that is an argument, and tensors made without a device, or held in a plain
attribute, can be used together with those that are traced.
"""

import sysconfig
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as torch_tree  # torchax's own, which knows transformers' outputs
import torchax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.extend.source_info_util import register_exclusion
from torch._decomp.decompositions import native_batch_norm
from torch.nn.utils.stateless import _reparametrize_module
from torchax.tensor import Environment, OperatorNotFound, Tensor
from torchax.view import View

from spmd.errors import FrontendError, UnsupportedOpError
from spmd.installed import COMPILER
from spmd.torch.arrays import Inputs, array_of

_LIBRARIES = [str(Path(str(package.__file__)).parent) for package in (torch, torchax, jax)]

for _path in _LIBRARIES:
    register_exclusion(_path)  # the line of an op is the user's, or that of the model's code

_LOCK = threading.Lock()  # a module is changed while it is traced: one trace at a time


class ModuleTrace(Environment):  # type: ignore[misc]  # torchax has no types
    """A context in which torch ops run as jax ops; `draws`: whether they drew random numbers."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.draws = False
        self._key = key
        for norm in (torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit):
            self.override_op_definition(norm.default, _batch_norm)
        for op in (torch.ops.aten.detach.default, torch.Tensor.detach, torch.detach):
            self.override_op_definition(
                op, lambda tensor: Tensor(jax.lax.stop_gradient(tensor.jax()), tensor._env)
            )

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Computes a torch op in jax, in `no_grad` without gradient; FrontendError in autocast."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise FrontendError(
                "torch.autocast chooses no dtypes here",
                fix="convert what is to be narrower, as in module.to(torch.bfloat16)",
            )
        if torch.is_grad_enabled():
            return super().dispatch(func, types, args, kwargs)
        leaves = torch_tree.tree_leaves((args, kwargs))
        given = {id(t): t._elem for t in leaves if isinstance(t, Tensor)}
        result = super().dispatch(func, types, args, kwargs)
        for tensor in [t for t in torch_tree.tree_leaves(result) if isinstance(t, Tensor)]:
            if given.get(id(tensor)) is not tensor._elem:  # `w.to(dtype)` may be `w` itself
                tensor._elem = jax.lax.stop_gradient(tensor._elem)
        return result

    def t2j_iso(self, torchtensors: Any) -> Any:
        """Returns tensors as jax values, untraced ones as constants (trainable: FrontendError)."""

        def known(x: Any) -> Any:
            if isinstance(x, Tensor | View):
                return x
            if x.requires_grad:
                raise FrontendError(
                    f"the module uses a parameter of shape {tuple(x.shape)} that is not its own",
                    required="every parameter in module.named_parameters()",
                    fix="assign it to an attribute of the module as a torch.nn.Parameter",
                )
            return Tensor(jnp.asarray(array_of(x, "a tensor that the module holds")), self)

        return super().t2j_iso(torch_tree.tree_map_only(torch.Tensor, known, torchtensors))

    def get_and_rotate_prng_key(self, generator: Any = None) -> Any:
        """Returns a new random key, and notes that one was drawn; the generator is ignored."""
        self.draws = True
        self._key, key = jax.random.split(self._key)
        return key

    def _should_use_torchax_tensor(self, device: Any) -> bool:
        """Whether a tensor made on `device` is to be traced; made without a device it always is."""
        return device is None or bool(super()._should_use_torchax_tensor(device))


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *more: float
) -> Any:
    """Computes `native_batch_norm` like PyTorch; training updates `mean`, `variance` in place."""
    result = native_batch_norm(x, weight, bias, mean, variance, training, *more)
    for running in (mean, variance) if training else ():
        if running is not None:
            running._elem = jax.lax.stop_gradient(running._elem)
    return result


class ModuleRun(NamedTuple):
    """A module's result, {name: new value} of changed buffers, whether it drew random numbers."""

    result: Any
    changed: dict[str, Any]
    draws: bool


def run(
    module: Any,
    fn: Callable[..., Any],
    arrays: Mapping[str, Any],
    inputs: Inputs,
    leaves: Mapping[str, Any],
    key: Any,
) -> ModuleRun:
    """Runs `fn(module, *inputs)` with jax arrays or tracers in place of tensors.

    `arrays` are those for parameters and buffers, `leaves` those for the tensors of `inputs`, both
    by name. Random numbers come from `key`. UnsupportedOpError for an op that torchax lacks,
    FrontendError for Python that needs a tensor's values, or if a parameter is changed.
    """
    env = ModuleTrace(key)
    state = {name: Tensor(array, env) for name, array in arrays.items()}
    args, kwargs = inputs.rebuild(
        {name: Tensor(jnp.asarray(leaf), env) for name, leaf in leaves.items()}
    )
    with (
        _LOCK,
        _left_alone(module),
        _scopes(module),
        _explained(),
        _refusals(),
        torch.enable_grad(),
        env,
        _reparametrize_module(module, state, tie_weights=True),
    ):
        result = fn(module, *args, **kwargs)
    changed = {}
    for name, array in arrays.items():
        (new,) = env.t2j_iso([state[name]])
        if new is array:
            continue
        if new.shape != array.shape:
            raise FrontendError(
                f"the module gives {name!r} another shape",
                actual=f"{new.shape} in place of {array.shape}",
                fix="keep its shape, or keep the tensor outside of the module",
            )
        changed[name] = new.astype(array.dtype)
    for name, _ in module.named_parameters():
        if name in changed:
            raise FrontendError(
                f"the forward pass changes the parameter {name!r}",
                required="parameters that only an optimizer changes",
                fix="compute with a new tensor, or make it a buffer",
            )
    return ModuleRun(result, changed, env.draws)


def run_pure(
    module: Any,
    fn: Callable[..., Any],
    arrays: Mapping[str, Any],
    inputs: Inputs,
    leaves: Mapping[str, Any],
) -> Any:
    """Returns the result of `run`; FrontendError if it draws random numbers or changes buffers."""
    ran = run(module, fn, arrays, inputs, leaves, key_of((0, 0)))
    if ran.draws or ran.changed:
        raise FrontendError(
            "the module draws random numbers"
            if ran.draws
            else f"the module changes its buffer {next(iter(ran.changed))!r}",
            required="results that depend on the arguments alone",
            fix="export it in evaluation mode: module.eval()",
        )
    return ran.result


def as_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Returns traced tensors of a result as jax values; others become constants."""
    return [t.jax() if hasattr(t, "jax") else jnp.asarray(array_of(t, "a result")) for t in tensors]


@contextmanager
def _left_alone(module: Any) -> Iterator[None]:
    """Restores the attributes of a module and its parts at the end, so that none stays traced."""
    before = [(part, dict(part.__dict__)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)


@contextmanager
def _scopes(module: Any) -> Iterator[None]:
    """Puts the ops of each part of a module in a `jax.named_scope` of its name, for reports."""
    names = {id(part): name for name, part in module.named_modules()}
    around, call = [""], torch.nn.Module.__call__

    def scoped(part: Any, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(part))
        if not name:  # the module itself, or none of its parts
            return call(part, *args, **kwargs)
        inside = name.removeprefix(f"{around[-1]}.")
        around.append(name)
        try:
            with jax.named_scope(inside.replace(".", "/")):
                return call(part, *args, **kwargs)
        finally:
            around.pop()

    with mock.patch.object(torch.nn.Module, "__call__", scoped):
        yield


@contextmanager
def _refusals() -> Iterator[None]:
    """Makes uses of `autograd.Function` or `tensor.data`, wrong in jax, raise FrontendError."""
    apply = torch.autograd.Function.apply

    def refuse_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, Tensor | View) for arg in args):
            return apply.__func__(cls, *args, **kwargs)  # another thread's
        raise FrontendError(
            f"the module calls {cls.__name__}, a torch.autograd.Function",
            required="ops whose gradient jax finds itself",
            fix="write its forward pass as a plain function; to hold less in memory, set "
            "spmd.Options(memory_limit=...) in place of checkpointing",
        )

    def refuse_data(*_: Any) -> Any:
        raise FrontendError(
            "the module uses tensor.data",
            required="no memory shared behind autograd's back: arrays of jax share none",
            fix="use tensor.detach()",
        )

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse_function)),
        mock.patch.object(Tensor, "data", property(refuse_data, refuse_data)),
    ):
        yield


@contextmanager
def _explained() -> Iterator[None]:
    """Raises UnsupportedOpError if torchax lacks an op, FrontendError if a value is needed."""
    try:
        yield
    except OperatorNotFound as error:
        name = str(error).removeprefix("Operator with name ").partition(" ")[0]
        raise UnsupportedOpError(
            f"torchax cannot compute the torch op {name}",
            op=name,
            source=_line_of(error.__traceback__),
            fix="write this line of the module with other ops",
        ) from error
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.NonConcreteBooleanIndexError,
        jax.errors.TracerArrayConversionError,
    ) as error:
        raise FrontendError(
            "the module's Python depends on the values of a tensor",
            source=_line_of(error.__traceback__),
            actual=str(error).strip().partition("\n")[0],
            required="the same ops for all values: a module is traced once for each shape",
            fix="use torch.where in place of `if`, and no .item(), .tolist() or boolean indices",
        ) from error


def _line_of(traceback: TracebackType | None) -> str | None:
    """Returns `file:line (function)` of the innermost frame not in spmd, torch or jax, or None."""
    skipped = (*_LIBRARIES, *COMPILER, sysconfig.get_path("stdlib") + "/contextlib")
    found = [
        f"{code.co_filename}:{line} ({code.co_qualname})"
        for frame, line in walk_tb(traceback)
        if not (code := frame.f_code).co_filename.startswith(skipped)
    ]
    return found[-1] if found else None


# From a module's function to that of a program.


class TracedFunction(NamedTuple):
    """A traced function, `call`, with the shapes and dtypes of its `results`, a pytree.

    `is_zero` is such a pytree of bools: whether each result is a constant 0, as the gradient of a
    parameter is that the loss does not depend on.
    """

    call: Callable[..., Any]
    results: Any
    is_zero: Any


def trace(fn: Callable[..., Any], *args: Any) -> TracedFunction:
    """Returns `fn` traced for the shapes and dtypes of `args`; its `call` does not run `fn`."""
    closed, results = jax.make_jaxpr(fn, return_shape=True)(*args)
    flat, tree = jaxpr_as_fun(closed), jax.tree.structure(results)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(tree, flat(*jax.tree.leaves(args)))

    return TracedFunction(call, results, jax.tree.unflatten(tree, list(_is_zero(closed.jaxpr))))


def _is_zero(jaxpr: Any) -> Iterator[bool]:
    """Yields for each result of a jaxpr whether it is a constant 0, broadcast or not."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for atom in jaxpr.outvars:
        while not isinstance(atom, Literal) and atom in makers:
            eqn = makers[atom]
            if eqn.primitive.name != "broadcast_in_dim":
                break
            atom = eqn.invars[0]
        yield isinstance(atom, Literal) and not np.any(atom.val)


def random_arguments(seed: int, call: int) -> tuple[Any, Any]:
    """Returns (seed, number of the call) as uint32: the arguments of which `key_of` makes a key."""
    return np.uint32(seed % 2**32), np.uint32(call % 2**32)


def key_of(random: Any) -> Any:
    """Returns the jax random key of a call, inside a program, from its `random_arguments`."""
    seed, call = random
    return jax.random.fold_in(jax.random.key(seed), call)


def split(tree: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (the entries of `tree` under `names`, its other entries)."""
    return {n: tree[n] for n in names}, {n: v for n, v in tree.items() if n not in names}

"""The second peer: Shardy's own partitioner, counted on the collectives that it inserts.

It propagates, inserts reshards (and all-reduces) where ops disagree, and turns these into its
collectives, all of it on the module that jax makes of the program with our argument shardings.
Bytes follow the same ring model. Some modules abort the process, so a worker goes through the
programs and a new one carries on behind the program that killed it:

    python -m benchmarks.shardy_bytes NAME...
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

import spmd
from benchmarks.byte_rows import first_line, lower_with_jax, placed_arguments
from benchmarks.programs.catalog import program_named
from spmd.reshard.comm import wire_bytes

PIPELINE = (
    "builtin.module(symbol-dce,sdy-propagation-pipeline,"
    "sdy-export-pipeline{enable-insert-explicit-collectives=true})"
)
"""The export pipeline inserts reshards, makes collectives of them and fuses reduce-scatters."""

KINDS = {
    "sdy.all_gather": "all_gather",
    "sdy.all_reduce": "all_reduce",
    "sdy.reduce_scatter": "reduce_scatter",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "collective_permute",
    "sdy.all_slice": "slice",
}

AXES = {
    "sdy.all_gather": "gathering_axes",
    "sdy.all_reduce": "reduction_axes",
    "sdy.reduce_scatter": "reduce_scatter_axes",
    "sdy.all_to_all": "params",
}
"""The attribute that names the axes along which devices exchange."""


class Peer(NamedTuple):
    """What Shardy did with a program."""

    bytes: int | None  # bytes that one device sends in one run, or None
    collectives: int = 0  # how many run
    failure: str = ""  # `aborts`, or why it failed


Work = Callable[[Sequence[str]], Iterator[tuple[str, Peer]]]
"""Names of programs -> (name, result) of each, ending early where the process dies."""


def work(names: Sequence[str]) -> Iterator[tuple[str, Peer]]:
    """Results of one worker process until it ends or dies."""
    command = [sys.executable, "-m", "benchmarks.shardy_bytes", *names]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            name, *rest = json.loads(line)
            yield name, Peer(*rest)


def partition_all(
    names: Sequence[str], progress: Callable[[str], None], work: Work = work
) -> dict[str, Peer]:
    """Shardy's bytes of each program, by name; one that kills a worker `aborts`.

    Args:
      names: of programs in the catalog.
      progress: called with each name when it is done.
      work: goes through programs in a process of its own.
    """
    found: dict[str, Peer] = {}
    left = list(names)
    while left:
        for name, peer in work(left):
            found[name] = peer
            progress(name)
        left = [name for name in left if name not in found]
        if left:
            found[left[0]] = Peer(None, failure="aborts")
            progress(left.pop(0))
    return found


def main(names: Sequence[str]) -> None:
    """Prints one line of JSON for each program."""
    for name in names:
        try:
            peer = partition(name)
        except ValueError as error:
            peer = Peer(None, failure=f"fails: {error}")
        except Exception as error:  # why it fails is what the table says
            peer = Peer(None, failure=f"fails: {first_line(error)}")
        print(json.dumps([name, *peer]), flush=True)


def partition(name: str) -> Peer:
    """Runs the pipeline on one program and counts."""
    mesh, built = program_named(name).make()
    jitted = spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate)
    placed = placed_arguments(jitted.lower(*built.args), built.args)
    module = lower_with_jax(built, placed).compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        inline_calls(module)
        PassManager.parse(PIPELINE).run(module.operation)
        return count(module, mesh.shape)


def inline_calls(module: Any) -> None:
    """Replaces calls by what they call: Shardy's reshards don't look into functions.

    MLIR's own inliner isn't registered for functions in jaxlib.
    """
    functions = {
        ir.StringAttr(op.attributes["sym_name"]).value: op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    done: set[str] = set()

    def visit(op: Any) -> None:
        for region in op.regions:
            for block in region.blocks:
                for inner in list(block.operations):
                    if inner.operation.name == "func.call":
                        callee = ir.FlatSymbolRefAttr(inner.attributes["callee"]).value
                        flatten(callee)
                        inline_call(inner.operation, functions[callee])
                    else:
                        visit(inner.operation)

    def flatten(name: str) -> None:
        if name not in done:
            done.add(name)
            visit(functions[name])

    flatten("main")


def inline_call(call: Any, function: Any) -> None:
    """Copies a function's body in front of a call, whose results it then replaces."""
    block = function.regions[0].blocks[0]
    copies = dict(zip(block.arguments, call.operands, strict=True))
    for op in block.operations:
        if op.operation.name == "func.return":
            for result, value in zip(call.results, op.operation.operands, strict=True):
                result.replace_all_uses_with(copies[value])
            break
        copy = op.operation.clone(ir.InsertionPoint(call))
        _rewire(copy, copies)
        copies.update(zip(op.operation.results, copy.results, strict=True))
    call.erase()


def _rewire(op: Any, copies: Mapping[Any, Any]) -> None:
    """Makes an op, and what is inside it, read copies."""
    for index, operand in enumerate(op.operands):
        if operand in copies:
            op.operands[index] = copies[operand]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _rewire(inner.operation, copies)


def count(module: Any, axes: Mapping[str, int]) -> Peer:
    """Bytes and number of the collectives that `main` runs."""
    (main_op,) = (
        op
        for op in module.body.operations
        if op.operation.name == "func.func"
        and ir.StringAttr(op.attributes["sym_name"]).value == "main"
    )
    found = list(_collectives(main_op.operation, 1, axes))
    return Peer(sum(sent * times for sent, times in found), sum(t for sent, t in found if sent))


def _collectives(op: Any, times: int, axes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(bytes, executions) of every collective inside an op."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _collectives_of(inner.operation, times, axes)


def _collectives_of(op: Any, times: int, axes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    if op.name in KINDS:
        yield sent_bytes(op, axes), times
    elif op.name == "func.call":
        raise ValueError(f"{op.attributes['callee']} is called, not inlined")
    elif op.name.startswith("sdy.") and op.name not in ("sdy.return", "sdy.constant"):
        raise ValueError(f"{op.name} is left over")
    elif op.name == "stablehlo.while":
        inside = list(_collectives(op, 1, axes))
        trips = trip_count(op) if inside else 0
        yield from ((sent, times * runs * trips) for sent, runs in inside)
    elif op.name == "stablehlo.convolution" and splits_positions(op):
        raise ValueError("convolutions exchange no halos")
    elif op.name in ("stablehlo.case", "stablehlo.if"):
        raise ValueError(f"{op.name}: branches are not compared")
    else:
        yield from _collectives(op, times, axes)


def splits_positions(convolution: Any) -> bool:
    """Whether devices hold different positions of the result: they need their neighbours' then."""
    labels = re.search(r"->\s*\[([^\]]*)\]", str(convolution.attributes["dimension_numbers"]))
    if labels is None or "sdy.sharding" not in convolution.attributes:
        return False
    dims = _dims(str(convolution.attributes["sdy.sharding"]))
    return any(
        label.strip().isdecimal() and axes.strip()
        for label, axes in zip(labels[1].split(","), dims, strict=True)
    )


def sent_bytes(op: Any, axes: Mapping[str, int]) -> int:
    """Bytes that a device sends in one of Shardy's collectives, by the ring model."""
    kind = KINDS[op.name]
    group = 1
    if kind == "collective_permute":
        group = 2
    elif kind != "slice":
        group = _extent(str(op.attributes[AXES[op.name]]), axes)
    after = local_bytes(op.results[0].type, str(op.attributes["out_sharding"]), axes)
    return wire_bytes(kind, group, after * group if kind == "reduce_scatter" else after, after)


def local_bytes(type_: Any, sharding: str, axes: Mapping[str, int]) -> int:
    """Bytes of one device's piece of a tensor with a sharding `<@mesh, [{"a", "b"}, {}]>`."""
    tensor = ir.RankedTensorType(type_)
    dims = _dims(sharding)
    sizes = [-(-size // _extent(dim, axes)) for size, dim in zip(tensor.shape, dims, strict=True)]
    element = tensor.element_type
    bits = element.width if hasattr(element, "width") else 32
    return -(-math.prod(sizes) * max(bits, 8) // 8)


def _dims(sharding: str) -> list[str]:
    """The axes of each dim of `<@mesh, [{"a", "b"}, {}]>`, as text."""
    return re.findall(r"\{([^{}]*)\}", sharding[sharding.index("[") : sharding.rindex("]")])


def _extent(text: str, axes: Mapping[str, int]) -> int:
    """Product of the sizes of the axes in a text: `"a"` is a whole one, `"a":(2)4` has size 4."""
    found = re.findall(r'"(\w+)"(?::\(\d+\)(\d+))?', text)
    return math.prod(int(part) if part else axes[name] for name, part in found)


def trip_count(loop: Any) -> int:
    """How often a while runs, by `i < n` with constant start and end, and a step of one.

    Raises:
      ValueError: it cannot be told.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    test = condition.operations[len(condition.operations) - 1].operation.operands[0].owner
    if getattr(test, "name", "") != "stablehlo.compare" or "LT" not in str(
        test.attributes["comparison_direction"]
    ):
        raise ValueError("a loop's trip count is unknown")
    counter = ir.BlockArgument(test.operands[0]).arg_number
    step = body.operations[len(body.operations) - 1].operation.operands[counter].owner
    if getattr(step, "name", "") != "stablehlo.add" or constant(step.operands[1]) != 1:
        raise ValueError("a loop's step is unknown")
    return constant(test.operands[1]) - constant(loop.operands[counter])


def constant(value: Any) -> int:
    """The integer that a scalar value always is.

    Raises:
      ValueError: it isn't a constant.
    """
    owner = value.owner
    if getattr(owner, "name", "") not in ("stablehlo.constant", "sdy.constant"):
        raise ValueError("a bound of a loop is not constant")
    return int(ir.DenseIntElementsAttr(owner.attributes["value"])[0])


if __name__ == "__main__":
    main(sys.argv[1:])

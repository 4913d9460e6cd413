"""Modules that somebody damaged or made up: an error of ours, soon, and the process lives on."""

import io
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir.dialects import stablehlo

import spmd
from spmd.frontend import bytecode
from spmd.frontend.importer.contents import DEEPEST_CALLS
from spmd.frontend.importer.module import import_module, parse_module, signature

SECONDS = 25.0
BODY = "return %x : tensor<8x4xf32>"


def function(body: str = BODY, arguments: str = "%x: tensor<8x4xf32>") -> str:
    return f"func.func @main({arguments}) -> tensor<8x4xf32> {{\n{body}\n}}\n"


def unary(line: str) -> str:
    """A function of one line that defines %y."""
    return function(f"{line}\nreturn %y : tensor<8x4xf32>")


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """In this process's own time: other programs on the machine do not count."""
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


def refused(source: Any, words: str = "") -> str:
    with pytest.raises(spmd.SpmdError) as caught:
        spmd.compile_stablehlo(source, spmd.make_mesh(data=4, model=2))
    text = str(caught.value)
    assert words in text, text
    return text


def read(source: Any) -> bool:
    """Whether a module can be read; the only other way out is an error of ours."""
    try:
        module = parse_module(source)
        signature(module)
        import_module(module)
    except spmd.SpmdError:
        return False
    return True


@pytest.fixture(scope="module")
def module() -> Any:
    """A real program: products, a loop, a gather, a sort, calls, locations."""

    def program(x: jax.Array, w: jax.Array, i: jax.Array) -> Any:
        h = jax.nn.relu(x @ w)
        h = jax.lax.fori_loop(0, 3, lambda n, h: jnp.tanh(h @ w) * n, h)
        return jnp.sort(jnp.take(h, i, axis=0), axis=1), h.at[i].add(1.0).sum()

    shapes = jnp.zeros((8, 16)), jnp.zeros((16, 16)), jnp.zeros((4,), jnp.int32)
    return jax.jit(program).lower(*shapes).compiler_ir("stablehlo")


@pytest.fixture(scope="module")
def text(module: Any) -> str:
    return str(module.operation.get_asm(enable_debug_info=True))


@pytest.fixture(scope="module")
def binary(module: Any) -> bytes:
    file = io.BytesIO()
    module.operation.write_bytecode(file)
    return file.getvalue()


@pytest.fixture(scope="module")
def artifact(text: str) -> bytes:
    found: bytes = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
    return found


# Damaged text.


def test_truncated_text(text: str, artifact: bytes) -> None:
    assert read(text) and read(artifact)
    for end in range(0, len(text), len(text) // 50):
        read(text[:end] + "\n")
    assert not read(text[: len(text) // 2] + "\n")


def test_mutated_text(text: str) -> None:
    pieces = ("-1", "0", "9223372036854775807", "[", ")", "tensor<?xf32>", "dense<1>", chr(34), "@")
    rng = random.Random(0)
    readable = 0
    for _ in range(100):
        at = rng.randrange(len(text))
        cut = rng.choice((0, 1, 1, 3))
        readable += read(text[:at] + rng.choice(pieces) + text[at + cut :] + "\n")
    assert readable < 100


@pytest.mark.parametrize("escape", [r"\FF", r"\C3\28", r"\80"])
@pytest.mark.parametrize(
    "line",
    [
        '%y = func.call @"{}"(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>',
        '%y = stablehlo.add %x, %x : tensor<8x4xf32> loc("{}")',
        '%y = stablehlo.custom_call @f(%x) {{backend_config = "{}"}} '
        ": (tensor<8x4xf32>) -> tensor<8x4xf32>",
    ],
)
def test_strings_that_are_not_utf8(line: str, escape: str) -> None:
    refused(unary(line.format(escape)), "codec can't decode")


def test_bytes_that_are_utf8_and_others() -> None:
    assert read(unary(r'%y = stablehlo.add %x, %x : tensor<8x4xf32> loc("\C3\A9")'))
    refused(function().encode() + b"\xff\xfe", "codec can't decode")
    refused(b"\x00\x01\x02" * 100)
    refused(b"")


@pytest.mark.parametrize("path", ["missing.mlir", "x" * 5000, "a\0b", "/"])
def test_paths_without_a_module(path: str) -> None:
    refused(path)


# Damaged bytecode. Each of these reads takes a process, so there are few.


def test_truncated_bytecode_and_several_whole_ones_in_one_process(
    binary: bytes, artifact: bytes
) -> None:
    assert not read(binary[: int(0.7 * len(binary))])
    assert not read(artifact[: len(artifact) // 2])
    first, second = bytecode.bytecodes_to_texts([binary, artifact])
    assert read(first) and read(second)


def test_bytecode_that_aborts_the_reader(binary: bytes) -> None:
    name = binary.index(b"stablehlo")
    refused(binary[:name] + b"\xff\xfe" + binary[name + 2 :], "the module cannot be read")


def test_a_hanging_reader(binary: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "_SECONDS", 0.05)
    (tmp_path / "jaxlib.py").write_text("while True:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)  # the reader imports this in place of MLIR
    refused(binary, "still reading")


# Modules that nobody meant.

TENSOR = "tensor<8x4xf32>"
WRONG: dict[str, tuple[str, str]] = {
    "nothing": ("\n", "no function to compile"),
    "no MLIR": ("hello\nworld\n", "cannot be read"),
    "unknown dialect": (unary(f'%y = "torch.relu"(%x) : ({TENSOR}) -> {TENSOR}'), "torch.relu"),
    "dynamic shape": (
        "func.func @main(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {\nreturn %x : tensor<?x4xf32>\n}",
        "argument arg0 has the shape (?, 4), and ? has no value"),
    "unranked": (
        "func.func @main(%x: tensor<*xf32>) -> tensor<*xf32> {\nreturn %x : tensor<*xf32>\n}",
        "tensor<*xf32>"),
    "attribute of another kind": (
        unary(f'%y = "stablehlo.transpose"(%x) {{permutation = "hello"}} : ({TENSOR}) -> {TENSOR}'),
        ""),
    "too few elements": (unary('%y = stablehlo.constant dense<"0x00000000"> : tensor<8x4xf64>'),
        ""),
    "calls itself": (unary(f"%y = func.call @main(%x) : ({TENSOR}) -> {TENSOR}"),
        "@main calls itself"),
    "call each other": (
        unary(f"%y = func.call @f(%x) : ({TENSOR}) -> {TENSOR}")
        + unary(f"%y = func.call @g(%x) : ({TENSOR}) -> {TENSOR}").replace("@main", "@f")
        + unary(f"%y = func.call @f(%x) : ({TENSOR}) -> {TENSOR}").replace("@main", "@g"),
        "@f calls itself"),
    "calls what is not there": (unary(f"%y = func.call @f(%x) : ({TENSOR}) -> {TENSOR}"), "f"),
    "calls a declaration": (
        unary(f"%y = func.call @f(%x) : ({TENSOR}) -> {TENSOR}")
        + f"func.func private @f({TENSOR}) -> {TENSOR}\n",
        "@f has no body"),
    "two functions, no main": (
        function().replace("@main", "@f") + function().replace("@main", "@g"), "functions: f, g"),
    "custom call": (unary(f"%y = stablehlo.custom_call @evil(%x) : ({TENSOR}) -> {TENSOR}"),
        "evil"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    source, words = WRONG[name]
    refused(source, words)


# Modules that are too much.


def nested_branches(depth: int) -> str:
    lines = [f'%r{i} = "stablehlo.case"(%p) ({{' for i in range(depth)]
    value = "%x"
    for i in reversed(range(depth)):
        lines.append(f'"stablehlo.return"({value}) : ({TENSOR}) -> ()')
        lines.append(f"}}) : (tensor<i32>) -> {TENSOR}")
        value = f"%r{i}"
    body = "\n".join([*lines, f"return {value} : {TENSOR}"])
    return function(body, f"%x: {TENSOR}, %p: tensor<i32>")


NESTED: dict[str, Callable[[int], str]] = {
    "branches": nested_branches,
    "attributes": lambda n: unary(
        f"%y = stablehlo.add %x, %x {{a = {'[' * n}{']' * n}}} : {TENSOR}"
    ),
    "locations": lambda n: unary(
        f'%y = stablehlo.add %x, %x : {TENSOR} loc({"callsite(" * n}"a"{" at unknown)" * n})'
    ),
    "types": lambda n: f"func.func @main(%x: {'tuple<' * n}{TENSOR}{'>' * n}) {{\nreturn\n}}\n",
    "brackets alone": lambda n: "(" * n + "\n",
}


@pytest.mark.parametrize("kind", NESTED)
def test_absurd_nesting(kind: str) -> None:
    refused(NESTED[kind](100_000), "nests more than 1000 brackets")
    assert read(NESTED[kind](900)) in (True, False)


def test_nesting_of_loops_and_branches() -> None:
    assert read(nested_branches(20))
    refused(nested_branches(100), "nest more than 64 deep")


def chain(length: int, calls: int) -> str:
    """f0 calls f1 so many times, which calls f2 so many times, ..."""
    parts = [unary(f"%y = func.call @f0(%x) : ({TENSOR}) -> {TENSOR}")]
    for i in range(length):
        lines = [
            f"%{n + 1} = func.call @f{i + 1}(%{n}) : ({TENSOR}) -> {TENSOR}" for n in range(calls)
        ]
        body = "\n".join([*lines, f"return %{calls} : {TENSOR}"])
        parts.append(function(body, f"%0: {TENSOR}").replace("@main", f"@f{i}"))
    parts.append(function().replace("@main", f"@f{length}"))
    return "\n".join(parts)


def test_calls_that_multiply_and_long_chains_of_them() -> None:
    refused(chain(40, 2), "ops with its calls inlined")
    assert read(chain(DEEPEST_CALLS - 2, 1))
    refused(chain(5000, 1), "call each other more than")


def test_huge_splat_takes_no_memory() -> None:
    size = 2**40
    program = import_module(
        parse_module(
            "func.func @main() -> tensor<8x4xf32> {\n"
            f"%c = stablehlo.constant dense<2.5> : tensor<{size}x4xf32>\n"
            f"%y = stablehlo.slice %c [0:8, 0:4] : (tensor<{size}x4xf32>) -> tensor<8x4xf32>\n"
            "return %y : tensor<8x4xf32>\n}"
        )
    ).program
    dense = program.body.ops[0].kind.attrs["value"]
    assert dense.splat
    assert len(dense.data) == 4
    assert dense.type.shape == (size, 4)

"""Functions with a symbolic batch at several sizes: what is joined, what is not, and why."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from spmd.cli.flags import Parser
from spmd.scripts.flags import bundle as bundle_flags
from spmd.serving.bundle.function import BundleError, Function, Role, StateLeaf
from spmd.serving.bundle.memory import compile_bundle
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.write import write_bundle
from spmd.serving.engine.batches import Batches
from spmd.serving.engine.statistics import Statistics
from spmd.serving.engine.workers import JointCall
from spmd.serving.tensor_backend import BundleInfer
from tests.serving.conftest import LAYER, layer, struct, write_layer

(B,) = export.symbolic_shape("b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("batch") / "bundle"
    write_layer(path, specs={"x": ("data",)})
    return path


@pytest.fixture(scope="module")
def infer(folder, mesh_of):
    return BundleInfer(load_bundle(folder, mesh_of(2, 4), symbols={"b": (4, 1, 8)}))


def test_one_function_at_several_sizes(infer):
    bundle = infer.bundle
    assert list(bundle.functions) == ["layer[b=1]", "layer[b=4]", "layer[b=8]"]
    assert bundle.symbols == {"b": (1, 4, 8)}
    assert len(bundle.weights) == 1
    assert infer.name == "layer"
    assert (infer.batch_sizes, infer.not_batched) == ((1, 4, 8), "")
    assert [(spec.name, spec.shape) for spec in infer.inputs] == [("x", (-1, 8))]
    assert [spec.shape for spec in infer.outputs] == [(-1,), (-1, 4)]
    with pytest.raises(BundleError, match=r"there is no function for x \[3, 8\]; there are layer"):
        infer.infer({"x": np.ones((3, 8), np.float32)})


@pytest.mark.parametrize("counts", [[1], [3], [8], [1, 1], [2, 1, 4], [5, 3], [1] * 8])
def test_joined_is_as_alone(infer, counts):
    """Rows go through other programs when they are joined: rounding may differ, nothing else."""
    batches = Batches(infer, statistics := Statistics())
    rng = np.random.default_rng(sum(counts))
    requests = [{"x": rng.standard_normal((n, 8)).astype(np.float32)} for n in counts]
    alone = [batches.call(request)() for request in requests]
    first = batches.call(requests[0])
    assert isinstance(first, JointCall)
    for request, one, other in zip(requests, alone, first.joint(requests), strict=True):
        np.testing.assert_array_equal(one["most"], other["most"])
        np.testing.assert_allclose(one["y"], other["y"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(one["y"], layer(LAYER, request["x"])["y"], rtol=1e-5, atol=1e-6)
    assert (statistics.rows, statistics.calls.count) == (2 * sum(counts), len(counts) + 1)
    assert statistics.batches[sum(counts)].count >= 1


@pytest.mark.parametrize("rows", [0, 9])
def test_too_many_rows_or_none(infer, rows):
    with pytest.raises(ValueError, match=f"may have 1 to 8 rows, not {rows}: send several"):
        Batches(infer, Statistics()).call({"x": np.ones((rows, 8), np.float32)})


NOT: dict[str, Any] = {
    "a mean": (lambda x: x - x.mean(0), (struct(B, 4),), "rows of a batch change each other's"),
    "turned around": (lambda x: jnp.flip(x, 0), (struct(B, 4),), "rows of a batch change each"),
    "one of all": (lambda x: x.sum(0), (struct(B, 4),), "first dim of output result [4] is not b"),
    "a scale": (lambda x, s: x * s, (struct(B, 4), struct()), "first dim of input i1 [] is not b"),
    "pairs": (lambda x: x @ x.T, (struct(B, 4),), "output result [b, b] has b in another dim"),
    "twice": (lambda x: jnp.concatenate([x, x]), (struct(B, 4),), "result [2*b, 4] is not b"),
}


@pytest.mark.parametrize("name", NOT)
def test_what_is_not_joined_runs_at_its_sizes(name, mesh_of):
    function, structs, reason = NOT[name]
    names = tuple(f"i{i}" for i in range(len(structs)))
    roles: tuple[Role, ...] = tuple("input" for _ in structs)
    exported = Function("f", function, structs, names, roles)
    infer = BundleInfer(compile_bundle([exported], mesh_of(2), symbols={"b": (2, 6)}))
    assert infer.batch_sizes == ()
    assert reason in infer.not_batched
    given: list[Any] = [
        np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32),
        np.float32(3),
    ]
    given = given[: len(structs)]
    (found,) = infer.infer(dict(zip(names, given, strict=True))).values()
    np.testing.assert_allclose(found, function(*given), rtol=1e-5, atol=1e-6)


def test_a_state_is_not_joined(mesh_of):
    def count(state, x):
        return state + 1, x * state

    exported = Function("f", count, (struct(), struct(B)), ("s", "x"), ("state", "input"))
    state = StateLeaf((), "float32")
    bundle = compile_bundle([exported], mesh_of(2), state=state, symbols={"b": (1, 2)})
    assert "f has a state" in BundleInfer(bundle).not_batched


def test_a_size_of_the_state_is_one(mesh_of):
    exported = Function(
        "f", lambda s, x: (s, x), (struct(B), struct(B)), ("s", "x"), ("state", "input")
    )
    with pytest.raises(BundleError, match="b cannot have 2 sizes: the state has it"):
        compile_bundle(
            [exported], mesh_of(2), state=StateLeaf((B,), "float32"), symbols={"b": (1, 2)}
        )


def flags(folder, *given):
    parser = Parser("test", "Flags of bundles.")
    bundle_flags.add_flags(parser)
    return parser.parse_args([str(folder), "--mesh", "data=1", "--cache_dir", "none", *given])


def test_sizes_are_flags(folder, tmp_path):
    for given, sizes in (
        ("--batch_sizes=3,2", (2, 3)), ("--max_batch_size=3", (1, 2, 3)), ("--symbols=b=2", 2)
    ):  # fmt: skip
        assert bundle_flags.load(flags(folder, given)).symbols == {"b": sizes}
    with pytest.raises(BundleError, match=r"--symbols b=128; a batch may have several, by --batch"):
        bundle_flags.load(flags(folder))
    with pytest.raises(BundleError, match="b has a size in --symbols"):
        bundle_flags.load(flags(folder, "--batch_sizes=1", "--symbols=b=2"))
    with pytest.raises(SystemExit):
        flags(folder, "--batch_sizes=0")
    write_bundle(tmp_path / "fixed", [Function("f", jnp.sin, (struct(2),), ("x",), ("input",))])
    with pytest.raises(BundleError, match=r"f has no batch: it takes x \[2\], and the first dim"):
        bundle_flags.load(flags(tmp_path / "fixed", "--max_batch_size=4"))

"""Sizes of a bundle's arrays: symbolic dims, as somebody says or memory allows; specs on a mesh."""

import dataclasses
import json
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import spmd
from spmd.errors import ArgumentError
from spmd.mesh.topology import CHIPS
from spmd.models.function import Role
from spmd.serving.bundle import symbols
from spmd.serving.bundle.function import BundleError, Function, StateLeaf
from spmd.serving.bundle.manifest import MANIFEST, LeafEntry
from spmd.serving.bundle.memory import compile_bundle
from spmd.serving.bundle.placement import spec_for
from spmd.serving.bundle.programs import plan_functions
from spmd.serving.bundle.read import Modules, load_bundle
from spmd.serving.bundle.write import write_bundle
from tests.serving.bundle.test_hostile_bundles import edit as change_manifest
from tests.serving.conftest import struct

A, B, M, P, D = 2, 4, 3, 4, 8
"""Groups, slots of a group, pages of a slot, positions of a page, width."""

SPECS = {"state/pool": ("data", None, None, "model"), "weights/k": ("model", None)}
PLACE = struct(A, dtype="int32")
WEIGHTS = {"k": np.random.default_rng(0).standard_normal((D, D), np.float32)}


def write_row(weights, state, x_AD, page_A, at_A):
    pool, row_AD = state["pool"], spmd.ops.linear(x_AD, weights["k"])
    slots_A1 = jnp.zeros((A, 1), jnp.int32)
    pool = spmd.ops.paged_update(
        pool, row_AD[:, None], page_A[:, None, None], slots_A1, at_A[:, None]
    )
    return {"pool": pool}, {"pages": jnp.full((), pool.shape[1])}


def read_slots(weights, state, table_ABM):
    read_ABMPD = jax.vmap(lambda pool, table: pool[table])(state["pool"], table_ABM)
    firsts_AN = state["pool"][:, :, 0, 0]
    return state, {"sums": read_ABMPD.sum((2, 3)) @ weights["k"], "firsts": firsts_AN}


def functions(*constraints):
    (n,) = export.symbolic_shape("n", constraints=constraints)
    held = {"k": struct(D, D)}, {"pool": struct(A, n, P, D)}
    names = ("weights", "state")
    roles: tuple[Role, ...] = ("weights", "state")
    write = Function(
        "write", write_row, (*held, struct(A, D), PLACE, PLACE), (*names, "x", "page", "at"),
        (*roles, "input", "input", "input"),
    )  # fmt: skip
    table = struct(A, B, M, dtype="int32")
    read = Function("read", read_slots, (*held, table), (*names, "table"), (*roles, "input"))
    return [write, read], {"pool": StateLeaf((A, n, P, D), "float32", 0.5)}


CONSTRAINTS = ("n >= 4", "mod(n, 2) == 0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("symbols") / "bundle"
    exported, state = functions(*CONSTRAINTS)
    write_bundle(path, exported, weights=WEIGHTS, state=state, specs=SPECS)
    return path


@pytest.fixture(scope="module")
def load(folder, tmp_path_factory):
    cache_dir = tmp_path_factory.mktemp("cache")

    def loaded(mesh, **given):
        return load_bundle(folder, mesh, cache_dir=cache_dir, **given)

    return loaded


def test_the_manifest_names_the_symbol_and_its_dims(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["symbols"] == {"n": {"at_least": 4, "at_most": None, "multiple_of": 2}}
    assert manifest["state"][0]["shape"] == [A, "n", P, D]
    read = manifest["functions"]["read"]
    assert read["arguments"][1]["leaves"][0]["shape"] == [A, "n", P, D]
    assert [leaf["shape"] for leaf in read["outputs"]] == [[A, "n"], [A, B, D]]
    assert manifest["functions"]["write"]["composites"] == {
        "spmd.linear": 1,
        "spmd.paged_update": 1,
    }


def same_as_jax(bundle, size):
    rng = np.random.default_rng(size)
    state = {"pool": np.full((A, size, P, D), 0.5, np.float32)}
    for _ in range(3):
        x = rng.standard_normal((A, D)).astype(np.float32)
        page, at = (rng.integers(0, limit, A).astype(np.int32) for limit in (size, P))
        state, pages = jax.jit(write_row)(WEIGHTS, state, x, page, at)
        assert bundle.run("write", x, page, at)["pages"] == pages["pages"] == size
    np.testing.assert_allclose(bundle.state["state/pool"], state["pool"], rtol=1e-5, atol=1e-5)
    table = rng.integers(0, size, (A, B, M)).astype(np.int32)
    _, wanted = read_slots(WEIGHTS, state, table)
    ours = bundle.run("read", table)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, wanted)


def test_same_as_jax_at_the_size_that_is_given(load, mesh_of):
    size = 10
    bundle = load(mesh_of(2, 4), symbols={"n": size})
    assert bundle.symbols == {"n": size}
    assert bundle.manifest.state[0].shape == (A, size, P, D)
    assert bundle.state["state/pool"].addressable_shards[0].data.shape == (1, size, P, D // 4)
    same_as_jax(bundle, size)


def test_the_next_start_plans_nothing_and_another_size_does(load, mesh_of, monkeypatch):
    from_memory = {"options": on_devices_of(1 << 20), "memory_share": 0.5}
    load(mesh_of(2, 4), symbols={"n": 4})
    chosen = load(mesh_of(2, 4), **from_memory).symbols
    monkeypatch.setattr("spmd.serving.bundle.programs.lower_stablehlo", None)
    load(mesh_of(2, 4), symbols={"n": 4})
    assert load(mesh_of(2, 4), **from_memory).symbols == chosen
    with pytest.raises(TypeError):
        load(mesh_of(2, 4), symbols={"n": 12})


def on_devices_of(size):
    chip = dataclasses.replace(CHIPS["cpu"], hbm_bytes=size)
    return spmd.Options(topology=spmd.Topology("cpu:8", chip))


def test_memory_decides(load, mesh_of):
    """What is held and what functions need fit, and little is left."""
    share = 0.5
    bundle = load(mesh_of(2, 4), options=on_devices_of(1 << 20), memory_share=share)
    size = bundle.symbols["n"]
    assert size % 2 == 0
    peaks = [program.emitted.peak_bytes for program in bundle.programs.values()]
    assert 0.9 * share * (1 << 20) < max(peaks) <= share * (1 << 20)
    held = [*bundle.weights.values(), *bundle.state.values()]
    assert sum(x.addressable_shards[0].data.nbytes for x in held) < max(peaks)
    same_as_jax(bundle, size)


def test_memory_is_left_for_what_is_loaded_next(load, folder, mesh_of):
    mesh, given = mesh_of(2, 4), {"options": on_devices_of(1 << 20), "memory_share": 0.5}
    bundle = load(mesh, beside=folder, **given)
    held = sum(
        x.addressable_shards[0].data.nbytes
        for part in (bundle.weights, bundle.state)
        for x in part.values()
    )
    peak = max(program.emitted.peak_bytes for program in bundle.programs.values())
    assert 0.9 * (1 << 19) < peak + held <= 1 << 19


def sort_pool(weights, state, at_A):
    """Needs as much as the pool has, although it takes and gives little."""
    del weights
    flat = jnp.sort(state["pool"].reshape(A, -1), axis=1)
    return state, {"found": jnp.take_along_axis(flat, at_A[:, None], axis=1)}


def test_a_function_that_needs_more_than_it_seems_to(mesh_of):
    exported, state = functions(*CONSTRAINTS)
    write, _ = exported
    sort = Function(
        "sort", sort_pool, (*write.args[:2], PLACE), ("weights", "state", "at"),
        ("weights", "state", "input"),
    )  # fmt: skip
    bundle = compile_bundle(
        [*exported, sort], mesh_of(2, 4), weights=WEIGHTS, specs=SPECS, state=state,
        options=on_devices_of(1 << 20), memory_share=0.5,
    )  # fmt: skip
    peaks = {name: program.emitted.peak_bytes or 0 for name, program in bundle.programs.items()}
    assert max(peaks, key=peaks.__getitem__) == "sort"
    assert 0.9 * (1 << 19) < peaks["sort"] <= 1 << 19


def test_what_is_compiled_behind_is_planned_behind(mesh_of, tmp_path, monkeypatch):
    """Once, and as weights and state lie; what needs more memory than there is left is told."""
    (write, read), state = functions(*CONSTRAINTS)
    both: Any = ("weights", "state", "at"), ("weights", "state", "input")
    sort = Function("sort", sort_pool, (*write.args[:2], PLACE), *both)
    again = dataclasses.replace(write, name="again")
    own = Function("own", lambda w, x: w["own"] + x, ({"own": struct(A)}, struct(A)), both[0][::2],
                   both[1][::2])  # fmt: skip
    write_bundle(
        tmp_path / "bundle", [write, read, sort, own, again], state=state, specs=SPECS,
        weights={**WEIGHTS, "own": np.ones(A, np.float32)},
    )  # fmt: skip
    planned, lower = [], Modules.lower

    def noting(self, entry, asked):
        planned.append((entry.name, asked))
        return lower(self, entry, asked)

    monkeypatch.setattr(Modules, "lower", noting)
    given = {"options": on_devices_of(1 << 20), "memory_share": 0.5}
    bundle = load_bundle(
        tmp_path / "bundle", mesh_of(2, 4), first=lambda _: ["write", "read"], **given
    )
    assert bundle.functions.keys() - bundle.programs.keys() <= {"sort", "again"}  # not `own`
    same_as_jax(bundle, bundle.symbols["n"])
    with pytest.raises(BundleError, match=r"sort needs .* may be used; give a smaller n"):
        list(bundle.arrivals())
    assert bundle.programs.keys() == {"write", "read", "own", "again"}
    assert {name for name, _ in planned[-2:]} == {"sort", "again"}
    assert len({*planned}) == len(planned)


def test_an_upper_bound_ends_it_where_axes_of_a_split_dim_divide(mesh_of):
    exported, state = functions("n <= 30", "mod(n, 4) == 0")
    bundle = compile_bundle(exported, mesh_of(2), weights=WEIGHTS, state=state)
    assert bundle.symbols == {"n": 28}
    exported, state = functions("n <= 1000")  # of which a hundredth would fit without effort
    assert compile_bundle(exported, mesh_of(1), weights=WEIGHTS, state=state).symbols == {"n": 1000}
    exported, state = functions("n <= 30")
    specs = {"state/pool": (None, ("data", "model"))}
    bundle = compile_bundle(exported, mesh_of(2, 4), weights=WEIGHTS, state=state, specs=specs)
    assert bundle.symbols == {"n": 24}
    assert bundle.notes == ()
    same_as_jax(bundle, 24)


def test_sizes_that_a_kernel_refuses_are_too_large(mesh_of, monkeypatch):
    def plan(*given, **more):
        if more["symbols"]["n"] > 200:
            raise ArgumentError("too many pages")
        return plan_functions(*given, **more)

    monkeypatch.setattr(symbols, "plan_functions", plan)
    exported, state = functions("n <= 1000")
    bundle = compile_bundle(exported, mesh_of(2), weights=WEIGHTS, state=state)
    assert 180 <= bundle.symbols["n"] <= 200
    exported, state = functions("n >= 300")
    with pytest.raises(ArgumentError, match="too many pages"):
        compile_bundle(exported, mesh_of(2), weights=WEIGHTS, state=state)


def test_xla_takes_more_than_there_is_room(load, mesh_of, monkeypatch):
    """Predictions decide; where XLA does otherwise, the bundle says so."""
    given = {"options": on_devices_of(1 << 20), "memory_share": 0.25}
    monkeypatch.setattr(symbols, "_allocated", lambda program: 1 << 20)
    (note,) = load(mesh_of(2, 4), **given).notes
    assert "may be too much: XLA allocates 1 MiB of each device for write, beside the" in note


@pytest.mark.parametrize("given", [{}, *({name: "0.5"} for name in symbols.XLA_SHARES)])
def test_xla_takes_most_of_a_gpu_unless_it_is_told(given):
    for share, taken in ((None, "0.92"), (0.3, "0.3"), (1.0, "0.92")):
        symbols.take_gpu_memory(share, environment := dict(given))
        assert environment == (given or {"XLA_CLIENT_MEM_FRACTION": taken})  # jax refuses both


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"symbols": {"m": 4}}, "the bundle has no symbol 'm'; it has n"),
        ({"symbols": {"n": 5}}, "n=5 cannot be: n is a multiple of 2, at least 4"),
        ({"symbols": {"n": 2}}, "n=2 cannot be: n is a multiple of 2, at least 4"),
        ({"memory_share": 1.5}, "the share of memory has to be above 0 and at most 1: 1.5"),
        ({"memory_share": 0.0005}, "there is no room for n=4, the least: weights and state take"),
    ],
)
def test_sizes_that_cannot_be(folder, mesh_of, given, message):
    with pytest.raises(BundleError, match=re.escape(message)):
        load_bundle(folder, mesh_of(2, 4), options=on_devices_of(1 << 20), **given)


def test_a_symbol_of_inputs_alone_has_to_be_given(tmp_path, mesh_of):
    (b,) = export.symbolic_shape("b")
    function = Function("f", lambda x: x.sum(0) * x.shape[0], (struct(b, 4),), ("x",), ("input",))
    write_bundle(tmp_path / "bundle", [function])
    with pytest.raises(BundleError) as caught:
        load_bundle(tmp_path / "bundle", mesh_of(2))
    assert "the symbol b has no value" in str(caught.value)
    assert "symbols={'b': 128} or --symbols b=128" in str(caught.value)
    bundle = load_bundle(tmp_path / "bundle", mesh_of(2), symbols={"b": 6})
    np.testing.assert_allclose(bundle.run("f", np.ones((6, 4), np.float32)), 36)
    with pytest.raises(BundleError, match=r"x has the shape \[6, 4\], not \[5, 4\]"):
        bundle.run("f", np.ones((5, 4), np.float32))


@pytest.mark.parametrize("constraints", [["n >= 4", "n*n >= 20"], ["k >= n"]])
def test_constraints_that_a_manifest_has_no_words_for(tmp_path, constraints):
    exported, state = functions(*constraints)
    with pytest.raises(BundleError, match="symbols of a bundle can be told `n >= 2`"):
        write_bundle(tmp_path / "bundle", exported, weights=WEIGHTS, state=state)


def test_functions_have_to_agree_and_not_decide_by_the_size(tmp_path):
    (first, _), state = functions("n >= 4")
    (_, second), _ = functions("n >= 8")
    with pytest.raises(BundleError, match="function read: the symbol n is a multiple of 1, at lea"):
        write_bundle(tmp_path / "bundle", [first, second], weights=WEIGHTS, state=state)
    (n,) = export.symbolic_shape("n")
    function = Function(
        "f", lambda x: x * 2 if x.shape[0] > 8 else x, (struct(n),), ("x",), ("input",)
    )
    with pytest.raises(BundleError, match="function f cannot be exported for all sizes of its sym"):
        write_bundle(tmp_path / "bundle", [function])


def all_states(**fields):
    def edit(m):
        arguments = (f["arguments"][1]["leaves"][0] for f in m["functions"].values())
        for leaf in (m["state"][0], *arguments):
            leaf.update(fields)

    return edit


HOSTILE = [
    (lambda m: m.pop("symbols"), "the symbol 'n' is only in shapes, or in none"),
    (
        lambda m: m["symbols"].update(k=m["symbols"]["n"]),
        "symbol 'k' is only in shapes, or in none",
    ),
    (lambda m: m["state"][0].update(shape=[A, "__import__('os').abort()"]), "is no size of a dim"),
    (lambda m: m["weights"][0].update(shape=["n", D]), "weights have symbolic dims"),
    (lambda m: m["symbols"]["n"].update(multiple_of=0), "n has no bounds of a size"),
    (lambda m: m["symbols"]["n"].update(at_least="4"), "at_least is '4', not a whole number"),
    (lambda m: m["symbols"]["n"].update(at=4), "unknown member 'at'"),
    (all_states(shape=[A, "2*n", P, D]), "cannot be used: the module cannot have these shapes"),
    (
        lambda m: m["functions"]["read"]["outputs"][0].update(shape=[A, "n + 2"]),
        "gives tensor<2x4xf32> where the manifest says firsts float32[2, 6]",
    ),
]


@pytest.mark.parametrize(("edit", "message"), HOSTILE)
def test_a_damaged_manifest_is_one_error(folder, tmp_path, mesh_of, edit, message):
    copy = shutil.copytree(folder, tmp_path / "bundle")
    change_manifest(copy, edit)
    with pytest.raises(BundleError) as caught:
        load_bundle(copy, mesh_of(2), symbols={"n": 4})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MESH = spmd.Mesh(None, (2, 4), ("data", "model"))


def test_the_first_pattern_counts_on_the_refined_mesh():
    specs = {"a/*": ("model", "..."), "a/w": ("data", None), "b": ("replica",)}
    found = spec_for(LeafEntry("a/w", (8, 8), "float32"), specs, MESH)
    assert found == ((("model.0", "model.1"), ...), ())
    assert spec_for(LeafEntry("b", (8,), "float32"), specs, MESH) == ((None,), ())
    assert spec_for(LeafEntry("c", (8,), "float32"), specs, MESH) is None

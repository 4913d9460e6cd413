"""Two plans side by side."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.explain.words import bytes_text, seconds_text


def lower(mesh: Any, w_spec: Any, options: Any = None) -> Any:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            with jax.named_scope("mlp"):
                return ((jax.nn.relu(x @ params["w_in"]) @ params["w_out"]) ** 2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"w_in": jnp.ones((64, 256)), "w_out": jnp.ones((256, 64))}
    specs = ({"w_in": w_spec, "w_out": w_spec and w_spec[::-1]}, ("data", None))
    jitted = spmd.jit(step, mesh=mesh, in_specs=specs, donate_argnums=0, options=options)
    return jitted.lower(params, jnp.ones((512, 64)))


@pytest.fixture(scope="module")
def two(devices8: Any) -> Any:
    mesh = spmd.make_mesh(data=4, model=2)
    return lower(mesh, ("data", "model")), lower(mesh, (None, "model"))


def test_figures_of_both_and_their_difference(two: Any) -> None:
    a, b = two
    lines = spmd.explain.diff(a, b).splitlines()
    rows = {line.split("  ")[1]: line for line in lines if "  " in line}
    sent = lambda p: sum(c.bytes * c.count for c in p.collectives)  # noqa: E731
    for what, text, of in (
        ("predicted time", seconds_text, lambda p: p.cost),
        ("sent by each device", bytes_text, sent),
        ("peak memory, predicted", bytes_text, lambda p: p.predicted_memory.peak),
    ):
        row = rows[what]
        assert re.search(rf"{re.escape(text(of(a)))} +{re.escape(text(of(b)))}", row), row
        change = f"{'-' if of(b) < of(a) else '+'}{text(abs(of(b) - of(a)))}"
        assert ("the same" if of(a) == of(b) else change) in row


def test_what_changed_is_added_the_other_way_round(two: Any) -> None:
    text = spmd.explain.diff(*two)
    assert "arguments: 2 of 3 kinds differ" in text
    assert "results: 2 of 2 kinds differ" in text
    assert re.search(r'params/w_in +f32\[64,256\] +\("data", "model"\) -> \(None, "model"\)', text)
    removed = re.findall(r"(\w+) over data +mlp .*test_diff.py:\d+ \(loss\).* -> none", text)
    assert "all_gather" in removed

    def changes(text: str, what: str) -> list[str]:
        return sorted(re.findall(rf"(?m)^  (\w+ over \w+) .* {what}", text))

    there, back = spmd.explain.diff(*two), spmd.explain.diff(*reversed(two))
    assert changes(there, ".* -> none$") == changes(back, "none -> ") != []
    assert changes(there, "none -> ") == changes(back, ".* -> none$")


def test_nothing_changed(two: Any) -> None:
    a, _ = two
    lines = spmd.explain.diff(a, lower(a.mesh, ("data", "model"))).splitlines()
    assert lines[-1] == "nothing changed"
    assert len(lines) < 10
    assert sum("the same" in line for line in lines) == 3


def test_other_meshes_and_functions(two: Any) -> None:
    a, _ = two
    assert "data=4, model=2" in spmd.explain.diff(a, lower(spmd.make_mesh(data=8), (None, None)))
    unlike = spmd.jit(lambda x: x + 1, mesh=a.mesh).lower(jnp.ones(8))
    assert re.search(r"params/w_in .* -> none", spmd.explain.diff(a, unlike))

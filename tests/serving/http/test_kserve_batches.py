"""Triton's client and a bundle with a symbolic batch: every call of it, alone and in a crowd."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tritonclient.http as triton
from jax import export
from tritonclient.utils import InferenceServerException

from spmd.serving.bundle.function import Function
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.write import write_bundle
from spmd.serving.load import load_model
from tests.serving.conftest import struct
from tests.serving.http.conftest import triton_client
from tests.serving.http.live import Live, serving
from tests.waiting import wait_until

RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.standard_normal((48, 16), np.float32)}
IMAGES = RNG.standard_normal((4, 4, 4, 3), np.float32)


def model(weights: Any, image: Any) -> Any:
    return jnp.tanh(image.reshape(image.shape[0], 48) @ weights["w"])


@pytest.fixture(scope="module")
def live(tmp_path_factory: Any, mesh_of: Any) -> Iterator[Live]:
    folder: Path = tmp_path_factory.mktemp("batches") / "vit"
    (b,) = export.symbolic_shape("b")
    structs = {"w": struct(48, 16)}, struct(b, 4, 4, 3)
    exported = Function("main", model, structs, ("w", "image"), ("weights", "input"))
    write_bundle(folder, [exported], weights=WEIGHTS, name="vit")
    bundle = load_bundle(folder, mesh_of(2), symbols={"b": (1, 2, 4)})
    with serving(load=False) as running:
        running.service.become_ready(load_model(bundle, folder))
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with triton_client(live) as made:
        yield made


def given(images: Any, binary: bool = True) -> list[Any]:
    image = triton.InferInput("image", list(images.shape), "FP32")
    image.set_data_from_numpy(images, binary_data=binary)
    return [image]


def result(binary: bool = True) -> list[Any]:
    return [triton.InferRequestedOutput("result", binary_data=binary)]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_infer(client: Any, binary_in: bool, binary_out: bool, rows: int) -> None:
    images = IMAGES[:rows]
    answer = client.infer("vit", given(images, binary_in), "1", outputs=result(binary_out))
    np.testing.assert_allclose(answer.as_numpy("result"), model(WEIGHTS, images), atol=1e-5)


def test_what_it_says_of_its_batch(client: Any) -> None:
    assert client.get_model_metadata("vit")["inputs"][0]["shape"] == [-1, 4, 4, 3]
    config = client.get_model_config("vit", "1")
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["preferred_batch_size"] == [1, 2, 4]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert config["output"] == [{"name": "result", "data_type": "TYPE_FP32", "dims": [16]}]
    with pytest.raises(InferenceServerException, match="1 to 4 rows, not 5: send several"):
        client.infer("vit", given(np.concatenate([IMAGES, IMAGES[:1]])))


def test_a_crowd_is_joined(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits while a call runs is one call of the largest size that it fills."""
    workers, batches = live.service.tensors()
    run, go_on, begun = batches._infer.infer, threading.Event(), threading.Event()

    def held(tensors: Any) -> Any:
        begun.set()
        go_on.wait()
        return run(tensors)

    monkeypatch.setattr(batches._infer, "infer", held)
    parts = [IMAGES[:1], *(IMAGES[i % 2 : i % 2 + rows] for i, rows in enumerate([1, 2, 3, 1, 1]))]

    def ask(images: Any) -> Any:
        with triton_client(live) as client:  # a client belongs to one thread
            return client.infer("vit", given(images)).as_numpy("result")

    before = live.service.statistics.calls.count
    with ThreadPoolExecutor(len(parts)) as pool:
        answers = [pool.submit(ask, parts[0])]
        wait_until(begun.is_set)
        answers += [pool.submit(ask, part) for part in parts[1:]]
        wait_until(lambda: workers.waiting == len(parts) - 1)
        go_on.set()
        for images, answer in zip(parts, answers, strict=True):
            np.testing.assert_allclose(answer.result(), model(WEIGHTS, images), atol=1e-5)
    assert live.service.statistics.calls.count < before + len(parts)

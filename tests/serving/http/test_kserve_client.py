"""KServe's protocol as Triton's own client speaks it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from serving.engine.infer import DATATYPES, Array, TensorSpec
from serving.http.language import Loaded
from serving.http.limits import Options
from tests.serving.http.live import Live, get, post, serving
from tests.waiting import PATIENCE


class Echo:
    """Gives back an array of every dtype; floats come back with a NaN in front."""

    inputs = tuple(TensorSpec(name, dtype.name, (-1, 3)) for name, dtype in DATATYPES.items())
    outputs = inputs

    def infer(self, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
        for name, array in tensors.items():
            assert array.dtype == DATATYPES[name] and array.flags.aligned
        return {name: _with_nan(array) for name, array in tensors.items()}


def _with_nan(array: Array) -> Array:
    if array.dtype.kind in "biu":
        return array
    return np.concatenate([np.full((1, 3), np.nan, array.dtype), array])


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(load=False, options=Options(body_bytes=1 << 16)) as running:
        running.service.become_ready(Loaded("echo", infer=Echo()))
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(
        live.url.removeprefix("http://"), network_timeout=PATIENCE, connection_timeout=PATIENCE
    ) as made:
        yield made


def values() -> dict[str, Array]:
    numbers = np.arange(6).reshape(2, 3) % 2
    return {name: numbers.astype(dtype) for name, dtype in DATATYPES.items()}


def given(arrays: Mapping[str, Array], binary: bool = True) -> list[Any]:
    made = []
    for name, array in arrays.items():
        made.append(triton.InferInput(name, array.shape, name))
        made[-1].set_data_from_numpy(array, binary_data=binary or name in ("FP16", "BF16"))
    return made


def wanted(binary: bool, *names: str) -> list[Any]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_every_dtype_there_and_back(client: Any, binary: bool, packed: str | None) -> None:
    # JSON has no NaN, and the client refuses these two types in JSON.
    outputs = wanted(binary, *(n for n, a in values().items() if binary or a.dtype.kind in "biu"))
    answer = client.infer(
        "echo", given(values(), binary), outputs=outputs, request_id="7", model_version="1",
        request_compression_algorithm=packed, response_compression_algorithm=packed,
    )  # fmt: skip
    assert answer.get_response()["id"] == "7"
    for name in (output.name() for output in outputs):
        found, sent = answer.as_numpy(name), _with_nan(values()[name])
        assert found.dtype == sent.dtype
        np.testing.assert_array_equal(found.astype(np.float64), sent.astype(np.float64))


def test_outputs_choose_between_bytes_and_json(client: Any) -> None:
    outputs = wanted(False, "INT64", "BOOL") + wanted(True, "FP32")
    answer = client.infer("echo", given(values()), outputs=outputs)
    assert [o["name"] for o in answer.get_response()["outputs"]] == ["INT64", "BOOL", "FP32"]
    assert "data" in answer.get_output("INT64") and "data" not in answer.get_output("FP32")
    np.testing.assert_array_equal(answer.as_numpy("BOOL"), values()["BOOL"])
    assert np.isnan(answer.as_numpy("FP32")[0]).all()
    with pytest.raises(InferenceServerException, match=r"NaN or infinities.*binary_data"):
        client.infer("echo", given(values()), outputs=wanted(False, "FP32"))


def test_what_the_server_says_of_itself(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.get_server_metadata()["extensions"] == [
        "binary_tensor_data", "model_configuration", "statistics",
    ]  # fmt: skip
    assert client.is_model_ready("echo") and client.is_model_ready("echo", "1")
    assert not client.is_model_ready("echo", "2")
    assert client.get_model_metadata("echo", "1")["inputs"][0]["datatype"] == "BOOL"
    config = client.get_model_config("echo")
    assert (config["max_batch_size"], "dynamic_batching" in config) == (0, False)
    assert config["input"][1] == {"name": "UINT8", "data_type": "TYPE_UINT8", "dims": [-1, 3]}
    assert client.get_model_repository_index() == [
        {"name": "echo", "version": "1", "state": "READY", "reason": ""}
    ]
    with pytest.raises(InferenceServerException, match="no version '2'"):
        client.get_model_metadata("echo", "2")
    for refused in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="not loaded or unloaded while"):
            refused("echo")


def test_statistics_are_those_of_the_metrics(live: Live, client: Any) -> None:
    before = client.get_inference_statistics("echo")["model_stats"][0]
    for _ in range(3):
        client.infer("echo", given(values()))
    (after,) = client.get_inference_statistics()["model_stats"]
    for name in ("inference_count", "execution_count"):
        assert after[name] == before[name] + 3
    told = after["inference_stats"]
    assert told["success"]["count"] == before["inference_stats"]["success"]["count"] + 3
    assert told["success"]["ns"] >= told["compute_infer"]["ns"] > 0
    assert after["batch_stats"][0]["compute_infer"]["count"] == after["execution_count"]
    metrics = get(f"{live.url}/metrics").text
    assert f'spmd:tensor_calls_total{{model_name="echo"}} {after["execution_count"]}.0' in metrics
    assert 'handler="/v2/models/{model}/infer"' in metrics


def test_bytes_are_no_datatype_here(client: Any) -> None:
    text = triton.InferInput("INT8", [1, 3], "BYTES")
    text.set_data_from_numpy(np.array([[b"a", b"b", b"c"]], np.object_))
    with pytest.raises(InferenceServerException, match='INT8 is needed, not "BYTES"'):
        client.infer("echo", [text])


def refusal(live: Live, body: bytes, status: int = 400, **headers: Any) -> str:
    """What the server says of a body; in the names of headers `_` stands for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = post(f"{live.url}/v2/models/echo/infer", content=body, headers=named)
    assert response.status_code == status, response.text
    return str(response.json()["error"])


def one(**more: Any) -> tuple[bytes, int]:
    """A request's JSON for a binary input of 12 bytes, without the other inputs."""
    about = {"name": "FP32", "datatype": "FP32", "shape": [1, 3], **more}
    about.setdefault("parameters", {"binary_data_size": 12})
    text = json.dumps({"inputs": [about]}).encode()
    return text, len(text)


@pytest.mark.parametrize(
    ("more", "length", "tail", "message"),
    [
        ({}, None, 11, "binary_data_size is 12, and 11 bytes are left"),
        ({}, "0", 12, "number of bytes of JSON"),
        ({}, "-1", 12, "number of bytes of JSON"),
        ({}, "1000000", 12, "number of bytes of JSON"),
        ({"parameters": {"binary_data_size": 8}}, None, 12, "has to be 12 for the shape [1, 3]"),
        ({"parameters": {"binary_data_size": "12"}}, None, 12, "has to be 12"),
        ({"parameters": {"binary_data_size": 12}, "data": [1, 2, 3]}, None, 12, "has both data"),
        ({"parameters": {"shared_memory_region": "x"}}, None, 0, "shared_memory_region is not sup"),
        ({"parameters": []}, None, 12, "parameters have to be an object"),
        ({"shape": [1 << 40, 3]}, None, 12, "binary_data_size has to be 13194139533312"),
        ({}, None, 12, "missing"),
    ],
)
def test_binary_bodies_that_do_not_fit(
    live: Live, more: dict[str, Any], length: str | None, tail: int, message: str
) -> None:
    text, size = one(**more)
    assert message in refusal(
        live, text + bytes(tail), Inference_Header_Content_Length=length or str(size)
    )


def test_bytes_that_belong_to_nothing(live: Live, client: Any) -> None:
    content, size = triton.InferenceServerClient.generate_request_body(given(values()))
    message = refusal(live, content + b"!", Inference_Header_Content_Length=str(size))
    assert "1 bytes at the end of the body belong to no input" in message


def test_compressed_bodies_have_the_same_bounds(live: Live) -> None:
    bomb = zlib.compress(bytes(1 << 20))
    assert "65,536 bytes are the most" in refusal(live, bomb, 413, Content_Encoding="deflate")
    assert "ends too soon" in refusal(live, bomb[:-1][:50], Content_Encoding="gzip")
    assert "cannot be unpacked" in refusal(live, b"{}", Content_Encoding="gzip")
    assert "gzip or deflate" in refusal(live, b"{}", 415, Content_Encoding="br")
    assert live.service.admission.bytes.taken == 0


def test_a_body_without_a_type_comes_from_no_web_page(live: Live) -> None:
    assert "is needed, not nothing" in refusal(live, b"{}", 415, Origin="https://evil.example")
    assert "text/plain" in refusal(live, b"{}", 415, Content_Type="text/plain")
    assert "inputs: a list" in refusal(live, b"{}", 400, Content_Type="application/octet-stream")


def test_sequences_are_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="sequence_id is not supported"):
        client.infer("echo", given(values()), sequence_id=3, sequence_start=True)

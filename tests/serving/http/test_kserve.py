"""KServe's protocol over a real socket, in JSON and as Triton's own client speaks it."""

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from spmd.serving.engine.infer import DATATYPES, Array, TensorSpec
from spmd.serving.errors import ServingError
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import ServerOptions
from spmd.serving.http.service import Service
from tests.serving.http.conftest import triton_client
from tests.serving.http.live import Live, get, post, serving


class Scaler:
    """y = x * scale, and what became of every dtype."""

    inputs = (TensorSpec("x", "float32", (-1, 3)), TensorSpec("scale", "int8", ()))
    outputs = (TensorSpec("y", "float32", (-1, 3)), TensorSpec("half", "bfloat16", (-1, 3)))

    def infer(self, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
        x, scale = tensors["x"], tensors["scale"]
        assert (x.dtype.name, scale.dtype.name, scale.shape) == ("float32", "int8", ())
        if scale == 0:
            raise ValueError("scale must not be zero")
        with np.errstate(over="ignore"):
            y = x * np.float32(scale)
        return {"y": y, "half": (y / 2).astype(ml_dtypes.bfloat16)}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(load=False) as running:
        running.service.become_ready(Loaded("scaler", infer=Scaler()))
        yield running


def x(data: Any, shape: Any = None, datatype: str = "FP32") -> dict[str, Any]:
    shape = [1, 3] if shape is None else shape
    return {"name": "x", "shape": shape, "datatype": datatype, "data": data}


def scale(data: Any = 2, datatype: str = "INT8") -> dict[str, Any]:
    return {"name": "scale", "shape": [], "datatype": datatype, "data": [data]}


def infer(live: Live, *inputs: Any, status: int = 200, **more: Any) -> Any:
    body = json.dumps({"inputs": list(inputs), **more})
    url = f"{live.url}/v2/models/scaler/infer"
    response = post(url, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    return response.json()


def test_tensors_in_and_out(live: Live) -> None:
    assert infer(live, x([1, 2.5, 3], [1, 3]), scale(), id="7") == {
        "model_name": "scaler",
        "model_version": "1",
        "id": "7",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [2, 5, 6]},
            {"name": "half", "datatype": "BF16", "shape": [1, 3], "data": [1, 2.5, 3]},
        ],
    }


def test_nested_data_and_chosen_outputs(live: Live) -> None:
    data = [[1, 2, 3], [4, 5, 6]]
    (half,) = infer(live, x(data, [2, 3]), scale(-1), outputs=[{"name": "half"}])["outputs"]
    assert (half["name"], half["shape"]) == ("half", [2, 3])
    assert half["data"] == [-0.5, -1, -1.5, -2, -2.5, -3]
    assert infer(live, x([], [0, 3]), scale())["outputs"][0]["data"] == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([x([1, 2, 3])], "scale missing"),
        ([x([1, 2, 3]), x([1, 2, 3]), scale()], "twice"),
        ([x([1, 2, 3]), scale(), {"name": "z"}], '"z" is unknown'),
        ([x([1, 2, 3]), scale(), {}], "null is unknown"),
        ([x([1, 2]), scale()], "2 numbers do not make the shape [1, 3]"),
        ([x([1, 2, 3], [3]), scale()], "shape [-1, 3] is needed"),
        ([x([1, 2, 3], [-1, 3]), scale()], "shape [-1, 3] is needed"),
        ([x([1, 2, 3], [10**30, 3]), scale()], "numbers do not make the shape"),
        ([x([1, 2, 3], "13"), scale()], "shape [-1, 3] is needed"),
        ([x([1, 2, 3], datatype="FP64"), scale()], "datatype FP32 is needed"),
        ([x(["a", "b", "c"]), scale()], "has to be numbers"),
        ([x([[1], [2, 3]]), scale()], "is no array"),
        ([x([10**400, 2, 3]), scale()], "x"),
        ([x(7), scale()], "has to be a list"),
        ([x([None, 2, 3]), scale()], "has to be numbers"),
        ([x([1, 2, 3]), scale(200)], "beyond INT8"),
        ([x([1, 2, 3]), scale(1.5)], "has to be numbers of INT8"),
        ([x([1, 2, 3]), scale(True)], "has to be numbers of INT8"),
        ([x([1, 2, 3]), scale(0)], "scale must not be zero"),
        (["x"], "a list of tensors is needed"),
    ],
)
def test_what_does_not_fit(live: Live, inputs: Any, message: str) -> None:
    answer = infer(live, *inputs, status=400)
    assert list(answer) == ["error"]
    assert message in answer["error"]


def test_outputs_that_are_not_there(live: Live) -> None:
    answer = infer(live, x([1, 2, 3]), scale(), outputs=[{"name": "z"}], status=400)
    assert 'no "z" among y, half' in answer["error"]
    infer(live, x([1, 2, 3]), scale(), outputs=["y"], status=400)


def test_numbers_that_json_has_not(live: Live) -> None:
    answer = infer(live, x([3e38, 0, 0]), scale(100), status=500)
    assert answer["error"].startswith("output y holds NaN or infinities")


def test_it_is_no_language_model(live: Live) -> None:
    response = post(f"{live.url}/v1/completions", json={"prompt": "a"})
    assert response.status_code == 404
    assert "no language model" in response.json()["error"]["message"]


def test_a_language_model_has_no_tensors() -> None:
    with serving() as live:
        response = post(f"{live.url}/v2/models/fake-llama/infer", json={"inputs": []})
        assert response.status_code == 404
        assert "use /v1/completions" in response.json()["error"]
        assert get(f"{live.url}/v2/models/fake-llama").json()["inputs"] == []


def test_dtypes_that_have_no_name() -> None:
    class Small(Scaler):
        outputs = (TensorSpec("y", "float8_e4m3fn", ()), TensorSpec("half", "bfloat16", ()))

    with pytest.raises(ServingError, match="tensor y: float8_e4m3fn cannot be served; these can: "):
        Service().become_ready(Loaded("small", infer=Small()))


# Triton's client.


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
def echo() -> Iterator[Live]:
    with serving(load=False, options=ServerOptions(body_bytes=1 << 16)) as running:
        running.service.become_ready(Loaded("echo", infer=Echo()))
        yield running


@pytest.fixture(scope="module")
def client(echo: Live) -> Iterator[Any]:
    with triton_client(echo) as made:
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
    about = client.get_model_metadata("echo", "1")
    shapes = [{"name": name, "datatype": name, "shape": [-1, 3]} for name in DATATYPES]
    assert about["inputs"] == about["outputs"] == shapes
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


def test_statistics_are_those_of_the_metrics(echo: Live, client: Any) -> None:
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
    metrics = get(f"{echo.url}/metrics").text
    assert f'spmd:tensor_calls_total{{model_name="echo"}} {after["execution_count"]}.0' in metrics
    assert 'handler="/v2/models/{model}/infer"' in metrics


def refusal(echo: Live, body: bytes, status: int = 400, **headers: Any) -> str:
    """What the server says of a body; in the names of headers `_` stands for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = post(f"{echo.url}/v2/models/echo/infer", content=body, headers=named)
    assert response.status_code == status, response.text
    return str(response.json()["error"])


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
    echo: Live, more: dict[str, Any], length: str | None, tail: int, message: str
) -> None:
    size = {"parameters": {"binary_data_size": 12}}
    about = {"name": "FP32", "datatype": "FP32", "shape": [1, 3], **size, **more}
    text = json.dumps({"inputs": [about]}).encode()
    header: Any = {"Inference_Header_Content_Length": length or str(len(text))}
    assert message in refusal(echo, text + bytes(tail), **header)


def test_bytes_that_belong_to_nothing(echo: Live, client: Any) -> None:
    content, size = triton.InferenceServerClient.generate_request_body(given(values()))
    message = refusal(echo, content + b"!", Inference_Header_Content_Length=str(size))
    assert "1 bytes at the end of the body belong to no input" in message


def test_compressed_bodies_have_the_same_bounds(echo: Live) -> None:
    bomb = zlib.compress(bytes(1 << 20))
    assert "65,536 bytes are the most" in refusal(echo, bomb, 413, Content_Encoding="deflate")
    assert "ends too soon" in refusal(echo, bomb[:-1][:50], Content_Encoding="gzip")
    assert "cannot be unpacked" in refusal(echo, b"{}", Content_Encoding="gzip")
    assert "gzip or deflate" in refusal(echo, b"{}", 415, Content_Encoding="br")
    assert echo.service.admission.bytes.taken == 0


def test_a_body_without_a_type_comes_from_no_web_page(echo: Live) -> None:
    assert "is needed, not nothing" in refusal(echo, b"{}", 415, Origin="https://evil.example")
    assert "text/plain" in refusal(echo, b"{}", 415, Content_Type="text/plain")
    assert "inputs: a list" in refusal(echo, b"{}", 400, Content_Type="application/octet-stream")


def test_sequences_are_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="sequence_id is not supported"):
        client.infer("echo", given(values()), sequence_id=3, sequence_start=True)

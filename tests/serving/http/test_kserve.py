"""KServe's protocol over a real socket, with functions that are no language model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from serving.engine.infer import Array, TensorSpec
from serving.errors import ServingError
from serving.http.language import Loaded
from serving.http.service import Service
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
    answer = infer(live, x([1, 2.5, 3], [1, 3]), scale(), id="7")
    assert answer == {
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
    answer = infer(live, x(data, [2, 3]), scale(-1), outputs=[{"name": "half"}])
    (half,) = answer["outputs"]
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


def test_what_the_model_says_of_itself(live: Live) -> None:
    assert get(f"{live.url}/v2/health/live").status_code == 200
    assert get(f"{live.url}/v2/health/ready").json() == {"ready": True}
    assert get(f"{live.url}/v2/models/scaler/ready").json()["ready"] is True
    assert get(f"{live.url}/v2/models/other/ready").status_code == 404
    answer = get(f"{live.url}/v2/models/scaler").json()
    assert answer["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "scale", "datatype": "INT8", "shape": []},
    ]
    assert answer["outputs"][1] == {"name": "half", "datatype": "BF16", "shape": [-1, 3]}


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

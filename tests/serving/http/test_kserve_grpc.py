"""KServe's protocol by gRPC, with Triton's own client: tensors, facts, refusals, keys."""

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import InferenceServerException

from spmd.serving.errors import ServingError
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.server import at, listen
from tests.serving.http.live import get, serving
from tests.serving.http.test_kserve import Echo, _with_nan, values
from tests.waiting import wait_until

KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    spare = listen("127.0.0.1", 0)
    port = spare.getsockname()[1]
    spare.close()
    options = ServerOptions(body_bytes=1 << 16, api_keys=("secret",))
    with serving(load=False, options=options, http=HttpOptions(grpc_port=port)) as running:
        running.service.become_ready(Loaded("echo", infer=Echo()))
        wait_until(lambda: is_open(port))
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as made:
            made.url = running.url
            yield made


def is_open(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


def given(bits: dict[str, Any]) -> list[Any]:
    made = []
    for name, array in bits.items():
        made.append(triton.InferInput(name, array.shape, name))
        made[-1].set_data_from_numpy(array)
    return made


def test_every_dtype_there_and_back(client: Any) -> None:
    outputs = [triton.InferRequestedOutput(name) for name in values()]
    answer = client.infer("echo", given(values()), "1", outputs, request_id="7", headers=KEY)
    assert answer.get_response().id == "7"
    for name, sent in values().items():
        found = answer.as_numpy(name)
        np.testing.assert_array_equal(found.astype(np.float64), _with_nan(sent).astype(np.float64))
    assert 'handler="/v2/models/{model}/infer"' in get(f"{client.url}/metrics").text
    some = {"INT32": values()["INT32"]}
    with pytest.raises(InferenceServerException, match=r"UNAUTHENTICATED.*API key"):
        client.infer("echo", given(some))
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.infer("other", given(some), headers=KEY)
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
        client.infer("echo", given(some), headers=KEY)


def test_numbers_one_by_one(client: Any) -> None:
    """As clients of other languages send them: not as bytes."""
    request = messages.ModelInferRequest(model_name="echo")
    fields = {"b": "bool", "u": "uint", "i": "int", "f": "fp32"}
    for name, array in values().items():
        one = request.inputs.add(name=name, datatype=name, shape=array.shape)
        field = fields[array.dtype.kind if array.dtype.kind in "bui" else "f"]
        field = {"INT64": "int64", "UINT64": "uint64", "FP64": "fp64"}.get(name, field)
        getattr(one.contents, f"{field}_contents").extend(array.reshape(-1).tolist())
    answer = client._client_stub.ModelInfer(request, metadata=[*KEY.items()])
    assert [one.name for one in answer.outputs] == [*values()]
    assert answer.raw_output_contents[1] == values()["UINT8"].tobytes()


def test_what_the_server_says_of_itself(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.get_server_metadata(headers=KEY).extensions[0] == "binary_tensor_data"
    assert client.is_model_ready("echo", headers=KEY)
    assert not client.is_model_ready("echo", "2", headers=KEY)
    about = client.get_model_metadata("echo", headers=KEY)
    assert [(x.name, [*x.shape]) for x in about.inputs] == [(name, [-1, 3]) for name in values()]
    assert client.get_model_config("echo", headers=KEY).config.input[1].name == "UINT8"
    assert client.get_model_repository_index(headers=KEY).models[0].state == "READY"
    (told,) = client.get_inference_statistics("echo", headers=KEY).model_stats
    assert told.inference_stats.success.count >= 1
    with pytest.raises(InferenceServerException, match="not loaded or unloaded while"):
        client.load_model("echo", headers=KEY)


def test_a_stream_of_calls(client: Any) -> None:
    found: list[Any] = []
    client.start_stream(lambda result, error: found.append((result, error)), headers=KEY)
    for number in range(3):
        client.async_stream_infer("echo", given(values()), request_id=str(number))
    client.stop_stream()
    assert [one.get_response().id for one, _ in found] == ["0", "1", "2"]


def test_ports_that_are_taken() -> None:
    with listen("127.0.0.1", 0) as held, pytest.raises(ServingError, match="cannot listen"):
        at("127.0.0.1", HttpOptions(grpc_port=held.getsockname()[1]))

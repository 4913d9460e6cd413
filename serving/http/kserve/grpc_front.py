"""KServe's protocol over gRPC, as tritonclient speaks it: each call is put to the app as HTTP.

So keys, limits, errors, logs and metrics are those of the paths below `/v2`, and a fleet has it as
a single model does. Messages are those that the package tritonclient brings.
"""

import contextlib
import ipaddress
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from google.protobuf.json_format import ParseDict
from starlette.types import ASGIApp
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from spmd.serving.engine.infer import DATATYPES
from spmd.serving.errors import ServingError
from spmd.serving.http.limits import ANY, HttpOptions, ServerOptions

LENGTH = "Inference-Header-Content-Length"

STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 503: "UNAVAILABLE",
}  # fmt: skip


def _facts(path: str, answer: Any, key: str = "", *, of_model: bool = False) -> Any:
    """A call that is answered with what is at a path, or below that of its model.

    Args:
      key: the field of the answer that has it; empty if it is the answer.
    """

    async def call(self: Any, request: Any, context: Any) -> Any:
        place = f"{_path(request)}{path}" if of_model else path
        found = (await self._ask(context, place)).json()
        return ParseDict({key: found} if key else found, answer(), ignore_unknown_fields=True)

    return call


class GrpcFront(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated without types
    """Puts calls to an app."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def _ask(self, context: Any, path: str, body: bytes | None = None, **more: str) -> Any:
        """What the app answers; a refusal ends the call."""
        headers = {"host": self._host, **more}
        for name, value in context.invocation_metadata():
            if name in ("authorization", "x-api-key", "x-request-id", "traceparent"):
                headers[name] = value
        address, _, port = context.peer().partition(":")[2].rpartition(":")
        transport = httpx.ASGITransport(
            self._app, raise_app_exceptions=False, client=(address.strip("[]"), int(port or 0))
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://grpc") as client:
            method = "GET" if body is None else "POST"
            answer = await client.request(method, path, content=body, headers=headers, timeout=None)
        if answer.status_code != 200 and not path.endswith("/ready"):
            code = getattr(grpc.StatusCode, STATUSES.get(answer.status_code, "INTERNAL"))
            await context.abort(code, str(answer.json().get("error", answer.text)))
        return answer

    ServerLive = _facts("/v2/health/live", messages.ServerLiveResponse)
    ServerReady = _facts("/v2/health/ready", messages.ServerReadyResponse)
    ServerMetadata = _facts("/v2", messages.ServerMetadataResponse)
    ModelReady = _facts("/ready", messages.ModelReadyResponse, of_model=True)
    ModelMetadata = _facts("", messages.ModelMetadataResponse, of_model=True)
    ModelConfig = _facts("/config", messages.ModelConfigResponse, "config", of_model=True)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        path = f"{_path(request)}/stats" if request.name else "/v2/models/stats"
        found = (await self._ask(context, path)).json()
        return ParseDict(found, messages.ModelStatisticsResponse(), ignore_unknown_fields=True)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        found = (await self._ask(context, "/v2/repository/index", b"")).json()
        return ParseDict({"models": found}, messages.RepositoryIndexResponse())

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        await self._ask(context, f"/v2/repository/models/{request.model_name}/load", b"")
        return messages.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        await self._ask(context, f"/v2/repository/models/{request.model_name}/unload", b"")
        return messages.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        head, tensors = _asked(request)
        path = _path(request, "model_name", "model_version")
        more = {LENGTH: str(len(head)), "content-type": "application/octet-stream"}
        body = b"".join([head, *tensors])
        return _answered(await self._ask(context, f"{path}/infer", body, **more))

    async def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            found = await self.ModelInfer(request, context)
            yield messages.ModelStreamInferResponse(infer_response=found)


def _path(request: Any, name: str = "name", version: str = "version") -> str:
    of_version = f"/versions/{getattr(request, version)}" if getattr(request, version) else ""
    return f"/v2/models/{getattr(request, name)}{of_version}"


def _parameters(given: Any) -> dict[str, Any]:
    return {name: getattr(x, x.WhichOneof("parameter_choice")) for name, x in given.items()}


def _asked(request: Any) -> tuple[bytes, list[bytes]]:
    """The JSON of a request, and the bytes of its inputs behind it."""
    tensors = [*request.raw_input_contents] or [_bytes(tensor) for tensor in request.inputs]
    inputs = [
        {
            "name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.shape],
            "parameters": {**_parameters(tensor.parameters), "binary_data_size": len(data)},
        }
        for tensor, data in zip(request.inputs, tensors, strict=False)
    ]  # fmt: skip
    head: dict[str, Any] = {
        "inputs": inputs,
        "parameters": {**_parameters(request.parameters), "binary_data_output": True},
    }
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [
            {"name": x.name, "parameters": {**_parameters(x.parameters), "binary_data": True}}
            for x in request.outputs
        ]
    return json.dumps(head).encode(), tensors


def _bytes(tensor: Any) -> bytes:
    """The numbers of an input that has them one by one."""
    fields = tensor.contents.ListFields()
    numbers = fields[0][1] if fields else []
    return np.array(numbers, DATATYPES.get(tensor.datatype)).tobytes()


def _answered(answer: httpx.Response) -> Any:
    size = int(answer.headers.get(LENGTH, len(answer.content)))
    head = json.loads(answer.content[:size])
    found = messages.ModelInferResponse(
        model_name=head["model_name"], model_version=head["model_version"], id=head.get("id", "")
    )
    at = size
    for one in head["outputs"]:
        found.outputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        end = at + one["parameters"]["binary_data_size"]
        found.raw_output_contents.append(answer.content[at:end])
        at = end
    return found


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, host: str, http: HttpOptions, options: ServerOptions
) -> AsyncIterator[int]:
    """Serves an app at `http.grpc_port`, of which it yields the number."""
    most = ("grpc.max_receive_message_length", options.body_bytes)
    server = grpc.aio.server(options=[most, ("grpc.so_reuseport", 0)])
    hosts = [name for name in http.allowed_hosts or () if name != ANY]
    # No page of a browser speaks gRPC, so nothing depends on the host that is asked for.
    asked = hosts[0].replace("*", "grpc") if hosts else "localhost"
    add_GRPCInferenceServiceServicer_to_server(GrpcFront(app, asked), server)
    with contextlib.suppress(ValueError):
        host = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    place = f"{host}:{http.grpc_port}"
    try:
        if http.ssl_certfile:
            chain = Path(http.ssl_certfile).read_bytes()
            key = Path(http.ssl_keyfile or http.ssl_certfile).read_bytes()
            port = server.add_secure_port(place, grpc.ssl_server_credentials([(key, chain)]))
        else:
            port = server.add_insecure_port(place)
    except RuntimeError as error:
        raise ServingError(f"grpc_port: cannot listen on {place}") from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)

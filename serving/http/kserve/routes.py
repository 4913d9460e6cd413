"""The paths below `/v2`: KServe's open inference protocol, version 2, with Triton's extensions.

POST /v2/models/NAME/infer
{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}
"""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import spmd
from spmd.serving.errors import ApiError
from spmd.serving.http.kserve.inference import infer
from spmd.serving.http.kserve.models import (
    VERSION,
    asked_model,
    config_of,
    metadata_of,
    statistics_of,
)
from spmd.serving.http.requests import check_key, service_of

EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")


async def live(request: Request) -> Response:
    """`GET /v2/health/live`: always true, as long as the process answers."""
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    """`GET /v2/health/ready` and `/v2/models/{model}/ready`: whether requests are served."""
    problem, body = service_of(request).problem(), dict[str, object]()
    if "model" in request.path_params:
        body["name"] = request.path_params["model"]
        if problem is None:
            asked_model(request)
    return JSONResponse({**body, "ready": problem is None}, 200 if problem is None else 503)


async def server(request: Request) -> Response:
    """`GET /v2`: what the server is."""
    check_key(request)
    return JSONResponse({"name": "spmd", "version": spmd.__version__, "extensions": EXTENSIONS})


async def metadata(request: Request) -> Response:
    """`GET /v2/models/{model}`: the model's inputs and outputs."""
    check_key(request)
    return JSONResponse(metadata_of(asked_model(request)))


async def config(request: Request) -> Response:
    """`GET /v2/models/{model}/config`: Triton's model configuration."""
    check_key(request)
    return JSONResponse(config_of(asked_model(request)))


async def statistics(request: Request) -> Response:
    """`GET /v2/models/stats` and `/v2/models/{model}/stats`: what the model has done."""
    service = service_of(request)
    check_key(request)
    loaded = asked_model(request) if "model" in request.path_params else service.require()
    return JSONResponse({"model_stats": [statistics_of(loaded, service.statistics)]})


async def index(request: Request) -> Response:
    """`POST /v2/repository/index`: the one model, and whether it is ready."""
    service = service_of(request)
    check_key(request)
    if service.loaded is None:
        return JSONResponse([])
    problem = service.problem()
    state = "READY" if problem is None else "UNAVAILABLE"
    about = {"name": service.loaded.name, "version": VERSION, "state": state}
    return JSONResponse([{**about, "reason": problem or ""}])


async def load(request: Request) -> Response:
    """`POST /v2/repository/models/{model}/load` and `/unload`: always refused."""
    check_key(request)
    raise ApiError(
        400,
        "models are not loaded or unloaded while the server runs: it has the one that it was "
        "started with",
    )


_Endpoint = Callable[[Request], Awaitable[Response]]


def _of_model(action: str, endpoint: _Endpoint, *methods: str) -> list[Route]:
    """A path with and without the model's version; the latter names the endpoint in metrics."""
    starts = ("/v2/models/{model}/versions/{version}", "/v2/models/{model}")
    return [Route(start + action, endpoint, methods=list(methods) or None) for start in starts]


ROUTES = [
    Route("/v2", server),
    Route("/v2/health/live", live),
    Route("/v2/health/ready", ready),
    Route("/v2/repository/index", index, methods=["POST"]),
    Route("/v2/repository/models/{model}/load", load, methods=["POST"]),
    Route("/v2/repository/models/{model}/unload", load, methods=["POST"]),
    Route("/v2/models/stats", statistics),
    *_of_model("/stats", statistics),
    *_of_model("/config", config),
    *_of_model("/ready", ready),
    *_of_model("/infer", infer, "POST"),
    *_of_model("", metadata),
]

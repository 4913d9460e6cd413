"""What load balancers and Kubernetes ask: is the process well, has it started, does it serve?

| | loading | ready | stalled or failed | draining |
| --- | --- | --- | --- | --- |
| `/startupz` | 503 | 200 | 200 | 200 |
| `/livez` | 200 | 200 | 503 | 200 |
| `/readyz`, `/health` | 503 | 200 | 503 | 503 |
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serving.http.requests import service_of


async def live(request: Request) -> Response:
    """`GET /livez`: 503 if only a new process can help; one that loads or drains is well."""
    return _answer(service_of(request).broken())


async def started(request: Request) -> Response:
    """`GET /startupz`: 200 as soon as the model is loaded, and from then on."""
    service = service_of(request)
    return _answer(service.problem() if service.loaded is None else None)


async def ready(request: Request) -> Response:
    """`GET /readyz` and `GET /health`: 200 if requests are served, else 503 with the reason."""
    return _answer(service_of(request).problem())


def _answer(problem: str | None) -> Response:
    if problem is None:
        return PlainTextResponse("ok\n")
    return PlainTextResponse(f"{problem}\n", 503, headers={"Retry-After": "5"})


ROUTES = [
    Route("/livez", live),
    Route("/startupz", started),
    Route("/readyz", ready),
    Route("/health", ready),
]

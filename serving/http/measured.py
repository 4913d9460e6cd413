"""Around the routes: answers are counted and timed, by route."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http.requests import route_path
from serving.http.traffic import Traffic

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
"""Strangers may make up others; those count as one."""


class Measured:
    """An app whose answers are counted.

    Args:
      app: the app; what it routes to is in the scope once it has answered.
      traffic: where they are counted.
      routes: of the app. All paths beside them count as one, or strangers could make up as many as
        they like.
    """

    def __init__(self, app: ASGIApp, traffic: Traffic, routes: Sequence[Route]) -> None:
        self.app = app
        self._traffic = traffic
        self._paths = {route.path for route in routes}
        self._by_endpoint: dict[object, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        started = time.monotonic()
        status = 499  # of those who left before there was one

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note)
        finally:
            seconds = time.monotonic() - started
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._traffic.answered(method, self._route(scope), status, seconds)

    def _route(self, scope: Scope) -> str:
        path = route_path(scope)
        return (
            path if path in self._paths else self._by_endpoint.get(scope.get("endpoint"), "other")
        )

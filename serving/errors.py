"""Errors of the server: those that an answer carries, and those that stop it from starting."""

import math
import re
from typing import Any


class ServingError(ValueError):
    """The server cannot run as it was asked to; the message is one line."""


class ApiError(Exception):
    """What an answer says instead of what was asked for, in the form of OpenAI's errors.

    Args:
      status: of HTTP.
      message: what is wrong and how to mend it, one sentence.
      param: the field that is meant.
      code: a word that programs look at.
      retry_after: seconds after which it is worth trying again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):
            # The rest of the body is not read.
            headers["Connection"] = "close"
        return headers

    def body(self) -> dict[str, Any]:
        """The answer."""
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that has to be changed; left out, `param` is the field that the message names."""
    found = re.match(r"(\w+)[:.[/]", message)  # as in `tools[0].type: function is served`
    return ApiError(400, message, param=param or (found and found[1]), code=code)


def busy(message: str, code: str, seconds: float = 1) -> ApiError:
    """A request that may come again after so many seconds."""
    return ApiError(429, f"{message}: try again later", code=code, retry_after=math.ceil(seconds))

"""API keys: who may use the server, and how much of it.

A file names them, and is read again when it changes:

    team-a: {key: a-long-secret, requests_per_second: 5, tokens_per_minute: 60000, at_once: 8}
    team-b: {key: another-secret}

Tokens are those of prompts and answers. They count when a request has ended, so what is under way
may go beyond the limit; the next request waits until that is made up for.
"""

import dataclasses
import hmac
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from spmd.serving.errors import ServingError, busy

LOOK_SECONDS = 1.0
"""The file is looked at no more often."""

_LOG = logging.getLogger("serving")


@dataclasses.dataclass(frozen=True)
class ApiKey:
    """A key, and what those who name it may ask for; 0: as much as they like."""

    name: str  # in logs, and among those who share the server
    key: str
    requests_per_second: float = 0.0
    tokens_per_minute: float = 0.0
    at_once: int = 0  # requests

    @classmethod
    def read(cls, file: Path) -> tuple["ApiKey", ...]:
        """The keys of a file.

        Raises:
          ServingError: it cannot be read, or says something else.
        """
        example = "name: {key: a-long-secret, requests_per_second: 5, at_once: 8}"
        names = {field.name: field.default for field in dataclasses.fields(cls)[1:]}
        try:
            said = yaml.safe_load(file.read_text(encoding="utf-8"))
            found = tuple(cls(str(name), **about) for name, about in said.items())
            for one in found:
                limits = [getattr(one, name) for name in names if name != "key"]
                if not isinstance(one.key, str) or not one.key:
                    raise ValueError(f"{one.name} has no key in quotes")
                if any(isinstance(x, str) or not 0 <= x < math.inf for x in limits):
                    raise ValueError(f"{one.name}: limits are numbers of at least 0")
        except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
            why = str(error).partition("\n")[0]
            raise ServingError(
                f"{file}: {why}; write lines such as {example}, with {', '.join(names)}"
            ) from None
        if len({one.key for one in found}) < len(found) or not found:
            raise ServingError(f"{file} has {'a key twice' if found else 'no keys'}")
        return found


class _Bucket:
    """So much a second, of which what nobody takes is kept, up to `most`."""

    def __init__(self, rate: float, most: float) -> None:
        self.rate, self.most = rate, most
        self._left, self._at = most, time.monotonic()

    def wait(self, amount: float) -> float:
        """Seconds until so much is there."""
        now = time.monotonic()
        self._left = min(self.most, self._left + self.rate * (now - self._at))
        self._at = now
        return max(0.0, (amount - self._left) / self.rate)

    def take(self, amount: float) -> None:
        """Takes it, there or not."""
        self._left -= amount


class _Use:
    """What has been asked for under a key."""

    def __init__(self, limits: ApiKey) -> None:
        self.limits, self.at_once = limits, 0
        a_second, a_minute = limits.requests_per_second, limits.tokens_per_minute
        self.requests = _Bucket(a_second, max(1.0, a_second)) if a_second else None
        self.tokens = _Bucket(a_minute / 60, a_minute) if a_minute else None


class Keys:
    """The keys of a server, and what is asked for under each.

    Args:
      given: keys without limits; their names are their numbers.
      file: of more keys.

    Raises:
      ServingError: as `ApiKey.read`.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        self._given = tuple(ApiKey(str(i), key) for i, key in enumerate(given))
        self._file, self._looked = file, time.monotonic()
        self._stamp = _stamp(file)
        self._keys = self._read()
        self._uses: dict[str, _Use] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, said: bytes) -> str | None:
        """The name of a key; None if there is no such key."""
        self._look()
        # All are compared, each in constant time: how long it takes tells nothing about them.
        same = [hmac.compare_digest(said, one.key.encode()) for one in self._keys]
        return self._keys[same.index(True)].name if any(same) else None

    def enter(self, name: str) -> Callable[[int], None]:
        """Lets a request in; returns what to call when it has ended, with its tokens.

        Raises:
          ApiError: 429, the key's limits are reached.
        """
        limits = next((one for one in self._keys if one.name == name), None)
        if limits is None or limits == ApiKey(name, limits.key):
            return lambda tokens: None
        use = self._uses.get(name)
        if use is None or use.limits != limits:
            use = self._uses[name] = _Use(limits)
        may, code = "this API key may have", "rate_limit_exceeded"
        if limits.at_once and use.at_once >= limits.at_once:
            raise busy(f"{may} {limits.at_once} requests at once", code)
        if use.tokens is not None and (seconds := use.tokens.wait(1)):
            raise busy(f"{may} {limits.tokens_per_minute:g} tokens a minute", code, seconds)
        if use.requests is not None:
            if seconds := use.requests.wait(1):
                raise busy(f"{may} {limits.requests_per_second:g} requests a second", code, seconds)
            use.requests.take(1)
        use.at_once += 1

        def leave(tokens: int) -> None:
            use.at_once -= 1
            if use.tokens is not None:
                use.tokens.take(tokens)

        return leave

    def _read(self) -> tuple[ApiKey, ...]:
        named = () if self._file is None else ApiKey.read(self._file)
        if twice := {one.name for one in named} & {one.name for one in self._given}:
            raise ServingError(
                f"{self._file}: {min(twice)} is what a key of --api_key is called, by its number; "
                "choose another name"
            )
        return self._given + named

    def _look(self) -> None:
        if self._file is None or (now := time.monotonic()) < self._looked + LOOK_SECONDS:
            return
        self._looked, stamp = now, _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = self._read()
            _LOG.info("%s: %d keys are read again", self._file, len(self._keys) - len(self._given))
        except ServingError as error:
            _LOG.error("%s; the keys from before stay", error)


def _stamp(file: Path | None) -> object:
    try:
        return file and (file.stat().st_mtime_ns, file.stat().st_size)
    except OSError:
        return None

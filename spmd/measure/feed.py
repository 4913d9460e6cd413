"""The arguments of one step after another, for programs that take some of them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


class Feed:
    """Runs a program again and again; the arrays that it was given first stay as they are.

    Args:
      executable: a program of flat arguments that returns flat results.
      arguments: of the first step, on their devices.
      donated: positions of the arguments that the program takes over.
      links: (result, argument) of donated arguments and their updates.
    """

    def __init__(
        self,
        executable: Any,
        arguments: Sequence[Any],
        donated: Sequence[int],
        links: Sequence[tuple[int, int]],
    ) -> None:
        self.executable, self.arguments, self.donated = executable, arguments, donated
        self.links = [(result, argument) for result, argument in links if argument in donated]
        self.updates: dict[int, Any] = {}

    def prepare(self) -> list[Any]:
        """The arguments of the next step."""
        made = list(self.arguments)
        for position in self.donated:
            given, update = made[position], self.updates.pop(position, None)
            # A result that was asked for elsewhere is not the next step's argument.
            if update is not None and update.sharding.is_equivalent_to(given.sharding, given.ndim):
                made[position] = update
            else:
                made[position] = jax.device_put(jnp.copy(given), given.format)
        jax.block_until_ready(made)
        return made

    def run(self, arguments: list[Any]) -> None:
        """Runs a step, and waits for its results."""
        results = jax.block_until_ready(self.executable(*arguments))
        self.updates = {argument: results[result] for result, argument in self.links}

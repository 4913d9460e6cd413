"""The sizes for which functions are compiled."""

from typing import Any, NamedTuple

import jax.export

PAGES = "pages"
"""The symbol for how many pages a group has: it is known when the functions are loaded."""


class ServingShape(NamedTuple):
    """The sizes for which functions are compiled."""

    slots: int  # how many sequences run together, over all groups; `groups` divides it
    # the most tokens of a sequence, prompt and completion together; a multiple of `page`
    max_length: int
    # numbers of rows of a group that a call may have, ascending. A call with fewer is padded.
    rows: tuple[int, ...]
    # numbers of positions that a call's tables reach, ascending multiples of `page`; the last one
    # is `max_length`. While all sequences are short, tables are smaller.
    lengths: tuple[int, ...]
    # positions of a page. A model whose state has no positions has pages of `max_length`: then each
    # sequence has one.
    page: int = 64
    # slots and pages are split among groups, so that they can be split over devices
    groups: int = 1
    top_logprobs: int = 20  # how many of the likeliest tokens are reported beside each one
    # dtype of keys and values: a float type, or `int8` with one scale for each head and token
    cache_dtype: str = "bfloat16"
    # guesses of next tokens that a step can try for one slot, in rows to spare; 0: none. Where each
    # sequence has one page there are none: its state may have no positions to go back to.
    drafts: int = 7
    # tokens that a call draws for each slot, one behind the other, where nothing else waits: small
    # models take less time for one than the host does for a call. 1: there are no such calls.
    turns: int = 1
    # how many adapters (LoRA) there is room for, and their rank at most
    adapters: int = 0
    adapter_rank: int = 16

    @property
    def slots_of_group(self) -> int:
        """How many sequences run together in one group."""
        return self.slots // self.groups

    @property
    def pages_of_slot(self) -> int:
        """Pages that the longest sequence takes."""
        return self.max_length // self.page


def most_drafts(drafts: int, page: int, max_length: int) -> int:
    """Drafts of a slot in a step: none where a sequence has one page, as `ServingShape` says."""
    return drafts if page < max_length else 0


def symbolic_pages(shape: ServingShape) -> Any:
    """The pages of a group as a symbol.

    One sequence fits at least, and there are no more than all slots can fill.
    """
    least = shape.pages_of_slot
    bounds = (f"{PAGES} >= {least}", f"{PAGES} <= {shape.slots_of_group * least}")
    return jax.export.symbolic_shape(PAGES, constraints=bounds)[0]


PIECES = (256, 512, 1024, 2048, 4096)
"""Rows of steps with pieces of prompts. With fewer sizes more of a step is padding: a prompt of 345
tokens would take a step of 1024 rows, which takes twice as long as one of 512."""


def default_rows(slots: int, longest: int) -> tuple[int, ...]:
    """Numbers of rows: one slot decodes, some or all do, or do so beside pieces of prompts.

    A step is padded to the next of them, so a server of many slots for few streams has small ones.

    Args:
      slots: of a group.
      longest: sequence.

    Example:
      >>> default_rows(8, 4096), default_rows(256, 4096), default_rows(2, 48)
      ((1, 8, 256, 512, 1024, 2048, 4096), (1, 16, 64, 256, 512, 1024, 2048, 4096), (1, 2, 96))
    """
    few = [n for n in (1, 16, 64, 256) if 2 * n <= slots] if slots >= 64 else [1]
    pieces = [min(n, slots * longest) for n in PIECES if n >= 2 * slots] or [2 * slots]
    return tuple(sorted({*few, slots, *pieces}))


SMALL, TURNS = 4e9, 4
"""Models of fewer parameters take accelerators less time for a token than the host for a call: a
call of theirs draws several."""


def usual_turns(parameters: int) -> int:
    """How many turns a call of a model with so many parameters has."""
    return TURNS if parameters < SMALL else 1

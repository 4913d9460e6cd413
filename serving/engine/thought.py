"""The thought that some models write before they answer: where it ends, in text and in tokens.

    <think>Sums are easy.</think>3    ->    the thought "Sums are easy.", and the answer "3"

What a request asks of a text (a grammar, stop strings) it asks of the answer.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Literal, NamedTuple

from spmd.serving.engine.backend import Words
from spmd.serving.engine.guide import WORD, Guide, all_words, words_of
from spmd.serving.engine.text import Decode, Detokenizer, overlap


class Marks(NamedTuple):
    """What is around the thought at the beginning of a completion."""

    begin: str  # as in `<think>`
    end: str  # as in `</think>`
    opened: bool  # whether the prompt has `begin` already, so that a completion begins as a thought
    plain: str = ""  # what stands before an answer without a thought, if anything does

    @property
    def texts(self) -> list[str]:
        """What of a completion is neither thought nor answer."""
        return [text for text in (self.begin, self.end, self.plain) if text]


Kind = Literal["mark", "thought", "answer"]


@dataclasses.dataclass
class ThoughtSplitter:
    """Tells a thought from the answer behind it, in whatever pieces the text comes.

    Joined, the texts of all parts are the whole text.

    Example:
      >>> splitter = ThoughtSplitter(Marks("<think>", "</think>", opened=True))
      >>> splitter.push("Hm.</thi"), splitter.push("nk>3")
      ([('thought', 'Hm.')], [('mark', '</think>'), ('answer', '3')])
    """

    marks: Marks
    # where the next letter is; None as long as `begin` may still come
    place: Literal["thought", "answer"] | None = None
    _held: str = ""

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """The parts of the next piece of text, as far as they are certain."""
        if self.place == "answer":
            return [("answer", text)] if text else []
        parts: list[tuple[Kind, str]] = []
        (begin, end, _, plain), held = self.marks, self._held + text
        if self.place is None:
            head, mark = held.lstrip(), ""
            if any(head != x and x.startswith(head) for x in (begin, plain)):
                self._held = held
                return []
            # A model may repeat what its prompt ended with.
            if head.startswith(begin):
                self.place, mark = "thought", begin
            elif plain and head.startswith(plain):
                self.place, mark = "answer", plain
            else:
                self.place = self._default
            if mark:
                size = len(held) - len(head) + len(mark)
                parts.append(("mark", held[:size]))
                held = held[size:]
        if self.place == "answer":
            self._held = ""
            return [*parts, ("answer", held)] if held else parts
        thought, found, rest = held.partition(end)
        size = 0 if found else overlap(held, end)
        thought, self._held = thought[: len(thought) - size], thought[len(thought) - size :]
        parts += [("thought", thought)] if thought else []
        if found:
            self.place, self._held = "answer", ""
            parts.append(("mark", end))
            parts += [("answer", rest)] if rest else []
        return parts

    def flush(self) -> list[tuple[Kind, str]]:
        """What was held back, now that no more comes."""
        held, self._held = self._held, ""
        return [(self.place or self._default, held)] if held else []

    @property
    def _default(self) -> Literal["thought", "answer"]:
        return "thought" if self.marks.opened else "answer"


class ThoughtTokens(NamedTuple):
    """How a tokenizer writes the marks of a thought."""

    marks: Marks
    begin: tuple[int, ...]
    end: tuple[int, ...]
    blanks: frozenset[int]  # line breaks, of which one may stand between a thought and its answer
    decode: Decode
    encode: Callable[[str], Iterable[int]]


class ThoughtGuide:
    """A `Guide`: any text as a thought, if there is one, and behind it what another guide says.

    Args:
      answer: makes the guide of the answer, behind so many tokens.
      stops: ids that end a completion: none is drawn in a thought.
      budget: the most tokens of the thought, after which it is ended; None is any number.
    """

    def __init__(
        self,
        tokens: ThoughtTokens,
        answer: Callable[[int], Guide],
        stops: Collection[int],
        vocabulary: int,
        budget: int | None,
    ) -> None:
        self._tokens, self._make, self._vocabulary = tokens, answer, vocabulary
        self._free = all_words(vocabulary) & ~words_of(stops, vocabulary)
        self._budget, self._count = budget, 0
        self._begun = 0  # how many tokens of `begin` the text has been so far
        self._behind = False  # whether an answer begins right behind a thought
        self._forced: list[int] = []  # what is left of `end`, once the budget is spent
        # None in a thought, and where the text can only become one.
        self._answer: Guide | None = None
        self._splitter: ThoughtSplitter | None = None
        if tokens.marks.opened:
            self._think()
        else:
            self._answer = answer(0)

    def allowed(self) -> Words:
        """See `Guide.allowed`."""
        if self._splitter is not None:
            return words_of(self._forced[:1], self._vocabulary) if self._forced else self._free
        mask = words_of((), self._vocabulary) if self._answer is None else self._answer.allowed()
        if 0 <= self._begun < len(self._tokens.begin):
            mask = mask | words_of([self._tokens.begin[self._begun]], self._vocabulary)
        return mask | words_of(self._tokens.blanks, self._vocabulary) if self._behind else mask

    def take(self, token: int) -> None:
        """See `Guide.take`."""
        self._count += 1
        if self._splitter is not None:
            self._continue(self._splitter, token)
            return
        answer, behind, self._behind = self._answer, self._behind, False
        begins = 0 <= self._begun < len(self._tokens.begin)
        self._begun = self._begun + 1 if begins and token == self._tokens.begin[self._begun] else -1
        # What may still become a thought may be an answer, too, as long as that has a guide.
        if self._begun == len(self._tokens.begin):
            self._think()
        elif answer is not None:
            fits = answer.allowed()[token // WORD] >> (token % WORD) & 1
            if fits or (self._begun < 0 and not behind):
                answer.take(token)
            elif not behind:
                self._answer = None

    def _think(self) -> None:
        self._begun, self._answer = -1, None
        self._detokenizer = Detokenizer(self._tokens.decode)
        self._splitter = ThoughtSplitter(self._tokens.marks._replace(opened=True))
        self._left = self._budget
        self._spend(0)

    def _spend(self, tokens: int) -> None:
        if self._left is not None and not self._forced:
            self._left -= tokens
            if self._left <= 0:
                self._forced = list(self._tokens.end)

    def _continue(self, splitter: ThoughtSplitter, token: int) -> None:
        del self._forced[:1]
        parts = splitter.push(self._detokenizer.push(token))
        if splitter.place != "answer":
            self._spend(1)
            return
        self._splitter, self._behind, self._forced = None, True, []
        self._answer = self._make(self._count)
        # A token may have more than the end of the mark, in tokenizers that do not know it.
        rest = "".join(text for kind, text in parts if kind == "answer").lstrip()
        for one in self._tokens.encode(rest) if rest else ():
            self._behind = False
            self._answer.take(int(one))

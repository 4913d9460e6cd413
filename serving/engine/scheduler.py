"""Decides what the device does next: continuous batching as a state machine.

There are no threads, no clock and no device here. `next` names a step to begin. Once it is done,
`stepped` takes its results. Requests come and go between these calls.

A step has a row for every request that draws, and beside them chunks of prompts, up to a budget of
rows: a long prompt delays those that draw by a little in many steps. While nothing draws, a step is
as large as it can be. Three slots, steps of at most 8 rows, a budget of 6; the requests A, B and C
with prompts of 12, 4 and 6 tokens:

    submit(A, B, C)
    next() -> A 0..7                  A gets a slot; nothing draws yet
    next() -> A 8..11; B 0..3         both prompts end here: each draws its first token
    next() -> A 12; B 4; C 0..3       two rows draw, so C's chunk gets four
    next() -> A 13; B 5; C 4..5
    next() -> A 14; B 6; C 6

A step depends on how many tokens there are, never on which. So it may begin before the tokens of
the one before it are known, and the device goes on while the host makes text of those. The price: a
request that drew a stop id may be in one step too many, whose token for it is dropped.

A request gets its slot when the chunks of those before it have begun, not earlier: by then their
pages are known, and it shares those whose tokens it begins with.

Pages are taken as a sequence grows. If there is none left, the youngest request of that group is
*preempted*: it loses its slot and pages and waits, before all others, until there is room. Then its
prompt and the tokens that it drew are run like a prompt, as far as no page holds them any more.
Tokens are drawn by position, so it goes on as if nothing had happened. The oldest request is never
preempted, and no request is taken that the pool could not hold alone: so all come to their end.

A *guided* request waits, too, for its mask, which depends on the token that it drew last:

    next() -> A 13; B 5     B is guided
    next() -> A 14          B's token is not known yet
    stepped, allow(B), next() -> A 15; B 6

A step reads the weights for few rows or many. So rows are added in which *drafts* are tried, where
that makes tokens come faster: guesses of what a request draws next (`spmd.serving.engine.drafts`).
It takes part once its last token is known:

    next() -> A 16, 17, 18, 19     three drafts behind A's latest token
    stepped -> A 16, 17, 18        two of them were right
    next() -> A 19

A backend with a draft model guesses itself: then a step says how many guesses it wants, and the
results say which ones were tried. They may be fewer.
"""

import bisect
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from spmd.serving.engine.actions import Begin, Counts, EngineStep, Finish, Job, Progress
from spmd.serving.engine.backend import Limits, SlotPart, Words
from spmd.serving.engine.drafts import SURE
from spmd.serving.engine.fairness import FairQueue
from spmd.serving.engine.groups import Group, Ongoing

HOST_SECONDS = 3e-3
"""About how long the host takes for a call: turns gain nothing where a step takes longer, and a
step that waits for the last one's results begins so much later."""

FEW = 64
"""Few draw in a step that has so many rows for each of them: at most 64 in one of 4,096 rows."""

UNREAD = 512
"""So many tokens are read between two steps to find drafts, or one longer text: 0.2 us each."""

_Guess = tuple[int, ...] | int | None
"""Drafts of what a request draws next, or of how many the backend guesses; None: none yet."""


def check_job(job: Job, limits: Limits) -> None:
    """Raises a `ValueError` if the pool could not hold a request."""
    length, most = len(job.prompt), limits.longest
    if not length or job.max_tokens < 0 or length + job.max_tokens > most:
        raise ValueError(
            f"a prompt of {length} tokens and {job.max_tokens} more: a sequence has 1 to {most}"
        )


class Scheduler:
    """Distributes requests over the slots and pages of a backend.

    Args:
      budget: rows of a group in a step that has both rows that draw and chunks of prompts.
      ahead: how many steps are begun before the results of the last one are there.

    Attributes:
      counts: totals since the start.
      groups: who has which slots and pages.

    Raises:
      ValueError: not all slots of a group can draw in one step.
    """

    def __init__(self, limits: Limits, budget: int, *, ahead: int = 1) -> None:
        self.limits = limits
        self.counts = Counts()
        self.groups = [Group(limits, index) for index in range(limits.groups)]
        self._slots = limits.slots // limits.groups
        if self._slots > limits.rows[-1]:
            raise ValueError(
                f"{self._slots} slots of a group cannot draw in steps of {limits.rows[-1]} rows"
            )
        self.know({}, {}, budget)
        self._ahead = ahead
        self._queue: FairQueue[Ongoing] = FairQueue()
        self._preempted: list[Ongoing] = []  # the oldest first
        self._ongoing: dict[int, Ongoing] = {}
        # Those that draw a token in the next step.
        self._decoding: dict[int, Ongoing] = {}
        # Those whose next mask is not here yet; they draw no token before that.
        self._unmasked: set[int] = set()
        self._order = 0
        self._under_way: deque[EngineStep] = deque()

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._queue) + len(self._preempted)

    @property
    def running(self) -> int:
        """Number of requests with a slot."""
        return len(self._ongoing) - self.waiting

    @property
    def idle(self) -> bool:
        """Whether there is no request at all, waiting or running."""
        return not self._ongoing

    def submit(self, requests: Sequence[Job]) -> None:
        """Queues requests: all of them or, if it raises, none.

        Raises:
          ValueError: see `check_job`.
        """
        for request in requests:
            check_job(request, self.limits)
        for request in requests:
            ongoing = Ongoing(request, array("i", request.prompt), request.max_tokens)
            self._ongoing[request.key] = ongoing
            self._queue.push(ongoing)

    def know(
        self,
        seconds: Mapping[int, float],
        turns: Mapping[int, int],
        budget: int,
        most: int = 0,
        reading: float = 0.0,
    ) -> None:
        """Says what steps take.

        Args:
          seconds: rows of a group in a step -> seconds, of the sizes to which steps are padded;
            empty where that is not known.
          turns: as of `Backend.turns`.
          budget: as for the scheduler itself.
          most: rows of a step that prompts fill, beside so few that draw (`FEW`) that more rows a
            second are worth more than how often those draw.
          reading: seconds that devices take for what the cache has of a token, on average over all
            groups; `seconds` leave it out.
        """
        self._reading = reading
        self._seconds, self._turns = dict(sorted(seconds.items())), dict(sorted(turns.items()))
        self._most = most
        # A prompt has a slot itself, so this leaves it one row at least.
        self._budget = min(max(budget, self._slots), self.limits.rows[-1])

    def finish(self, key: int) -> None:
        """Ends a request at a stop string; does nothing if it has ended already."""
        if request := self._ongoing.get(key):
            self._end(request)

    def allow(self, key: int, mask: Words) -> None:
        """Lets a guided request draw its next token; does nothing if it has ended already."""
        request = self._ongoing.get(key)
        if request is None:
            return
        self._unmasked.remove(key)
        request.mask = mask
        if request.slot >= 0:  # it has not been preempted meanwhile
            self._decoding[key] = request

    def cancel(self, key: int) -> bool:
        """Drops a request that waits or runs; returns whether there was one."""
        request = self._ongoing.get(key)
        if request is None:
            return False
        self._end(request)
        self.counts.cancelled += 1
        return True

    def next(self) -> EngineStep | None:
        """Chooses the step to begin now.

        Returns:
          None if there is nothing to do, or nothing before a step under way is done or a mask is
          here.
        """
        if len(self._under_way) > self._ahead or not self._find_pages():
            return None
        coming = self._coming()
        turns = self._count_turns(coming)
        drafts = self._guess(coming, turns)
        if self._awaits(drafts):
            return None
        step = EngineStep([self._room(drafts, coming)] * len(self.groups), [], {}, [], [], [])
        self._draw(step, drafts, 1 if drafts else turns)
        self._fill(step, coming)
        if not step.parts:
            return None
        self._under_way.append(step)
        return step

    def stepped(self, ids: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[Progress]:
        """Takes the results of the oldest step under way.

        Args:
          ids: the tokens that it drew, in the order of its parts.
          drafts: those that it tried, for each part.

        Returns:
          The progress of each request that got a token or came to its end, and that has not ended
          meanwhile.
        """
        if not self._under_way:
            raise RuntimeError("no step is under way")
        step = self._under_way.popleft()
        done: list[Progress] = []
        row = 0
        for key, part, tried in zip(step.keys, step.parts, drafts, strict=True):
            request = self._ongoing.get(key)
            if part.draws:
                drawn = _right(tried, ids[row : row + 1 + len(tried)]) if tried else (ids[row],)
                taken = 0
                if request is not None:
                    if part.drafts or part.guesses:
                        self._judge(request, part, len(drawn) - 1, len(tried))
                    taken = self._take_drawn(request, drawn, row, done)
                self.counts.wasted += len(drawn) - taken
                row += 1 + len(tried)
            elif request is not None and part.start + len(part.tokens or ()) == request.end:
                done.append(Progress(key, None, "length"))
                self._end(request)
        return done

    # Choosing.

    def _find_pages(self) -> bool:
        """Gives a page to each request that needs one to draw; returns whether all could have one.

        Who is preempted has to be run again with all its tokens, so they have to be known: until no
        step is under way none is begun.
        """
        for request in [r for r in self._decoding.values() if r.filled == r.room]:
            while request.slot >= 0 and not (group := self._group(request)).pages.available:
                if self._under_way:
                    return False
                youngest = group.youngest
                group.remove(youngest)
                self._decoding.pop(youngest.key, None)
                youngest.paid = max(youngest.paid, youngest.filled)
                bisect.insort(self._preempted, youngest, key=lambda preempted: preempted.order)
                self.counts.preempted += 1
            if request.slot >= 0:
                self._group(request).grow(request)
        return True

    def _room(self, drafts: Mapping[int, _Guess], coming: Sequence[Ongoing]) -> int:
        """Rows of a group in the next step.

        A step is padded to the next size. Where more tokens a second are run so, it has one size
        less, and what is left of a prompt is run by the next one: of 300 rows 256, not 1024. While
        nothing draws that counts alone when the last row is through.
        """
        if not self._seconds:
            return self._budget if self._decoding or self._unmasked else self.limits.rows[-1]
        drawing = max(self._drawing())
        wanted = max(self._rows(drafts)) + self._prompts(coming)
        most = self.limits.rows[-1]
        if self._decoding or self._unmasked:
            filled = (n for n in self._seconds if FEW * drawing <= n <= min(wanted, self._most))
            most = max(self._budget, *filled, 0)
        most = min(most, max(self._slots, *self._seconds))  # larger ones are still compiled
        sizes = [size for size in self._seconds if size <= most]
        above = next((size for size in sizes if size >= wanted), None)
        below = max((size for size in sizes if self._slots <= size < wanted), default=None)
        if above is None or below is None:
            return most
        seconds, rest = self._seconds, next(size for size in sizes if size >= wanted - below)
        if drawing or self._unmasked:
            is_better = below * seconds[above] > wanted * seconds[below]
        else:
            is_better = seconds[above] > seconds[below] + seconds[rest]
        return below if is_better else most

    def _coming(self) -> Sequence[Ongoing]:
        """Those that wait, if there are a slot and pages for the first of them."""
        first = self._first()
        if first is None or self._find_group(first, [1] * len(self.groups)) is None:
            return ()
        return [*self._preempted, *self._queue]

    def _prompts(self, coming: Sequence[Ongoing]) -> int:
        """Rows that prompts wait for: what is left of one, and all of those that are coming."""
        left = (g.filling.end - g.filling.filled for g in self.groups if g.filling is not None)
        return max(left, default=0) + sum(len(request.tokens) for request in coming)

    def _drawing(self) -> list[int]:
        """Requests of each group that draw in the next step."""
        drawing = [0] * len(self.groups)
        for request in self._decoding.values():
            drawing[request.slot // self._slots] += 1
        return drawing

    def _rows(self, drafts: Mapping[int, _Guess]) -> list[int]:
        """Rows of each group for all that draw, and for their drafts as far as they are known."""
        rows = self._drawing()
        for key, guess in drafts.items():
            more = guess if isinstance(guess, int) else len(guess or ())
            rows[self._decoding[key].slot // self._slots] += more
        return rows

    def _awaits(self, drafts: Mapping[int, _Guess]) -> bool:
        """Whether the next step is better begun when the results of those under way are there.

        Requests go on behind drafts once it is known which were right, and have drafts once their
        latest token is known. Where nearly all wait for that, so do the rest, for one step of all;
        those whose drafts are known, too, if all drafts have room in it.
        """
        tried = [
            part
            for step in self._under_way
            for key, part in zip(step.keys, step.parts, strict=True)
            if (part.drafts or part.guesses) and key in self._ongoing
        ]
        waiting, rows = [*drafts.values()].count(None), self._rows(drafts)
        for part in tried:
            rows[part.slot // self._slots] += part.rows
        if tried and max(rows) <= self._slots:
            waiting = len(drafts)
        waiting += len(tried)
        return waiting > 0 and _nearly_all(waiting, len(self._decoding) + len(tried))

    def _guess(self, coming: Sequence[Ongoing], turns: int) -> dict[int, _Guess]:
        """Maps requests to what may be drawn next; to None where a token is awaited first.

        Guesses are taken, the likeliest first, if tokens are expected to come faster with them than
        without, with so many turns.
        """
        drawing, cost = max(1, *self._drawing()), self.limits.draft_cost
        rows = self._spare(drawing, coming) if self.limits.drafts else 0
        if rows * 8 < drawing:
            return {}  # too few to be worth looking
        found: dict[int, _Guess] = {}
        chances, read = list[tuple[float, int]](), 0
        for key, request in self._decoding.items():
            asked = request.job
            drawn = asked.max_tokens - request.wanted
            # All that a step draws for it is drawn with one mask, and lies in pages that it has.
            changes = [count - drawn - 1 for count, _ in asked.masks if count > drawn]
            left = request.wanted - 1, request.room - request.filled - 1
            room = min(self.limits.drafts, *left, *changes)
            if asked.guided or room < 1:
                continue
            is_known, said = len(request.tokens) > request.filled, request.said
            unread = said.unread(request.tokens)
            if unread > self.limits.drafts + 1:  # more than a step's
                if read and read + unread > UNREAD:
                    continue
                read += unread
            agreed, drafts = said.guess(request.tokens, room + (not is_known))
            # What a text says is surer than a draft model, and costs less, where much of it agrees.
            guess: _Guess = drafts
            if agreed >= (2 if cost is None else SURE):
                chance = request.quoting.chance(agreed)
            elif cost is not None and (guess := request.agreement.worth(cost, room)):
                chance, room = request.agreement.chance(), guess
            else:
                continue
            first = 1 if is_known else 2  # the token that is awaited has to be right, too
            chances += [(chance**n, key) for n in range(first, first + room)]
            found[key] = guess if is_known else None
        counts = self._worth(chances, drawing, rows, turns) if chances else {}
        taken = {key: guess for key, guess in found.items() if counts.get(key)}
        for key, guess in taken.items():
            if guess is not None:
                taken[key] = counts[key] if isinstance(guess, int) else guess[: counts[key]]
        return taken

    def _spare(self, drawing: int, coming: Sequence[Ongoing]) -> int:
        """How many drafts a group may try beside those that draw."""
        # Prompts draw behind their ends: those that fill slots now, and those that may get one.
        ends = max(
            (group.filling is not None) + min(len(coming), self._slots - len(group.running))
            for group in self.groups
        )
        spare = self._slots - drawing - ends
        if ends:  # they come first: drafts get what a step is padded to
            wanted = drawing + self._prompts(coming)
            sizes = (size for size in self._seconds if wanted <= size <= self._budget)
            spare = min(spare, next(sizes, self._budget) - wanted)
        return max(spare, 0)

    def _worth(
        self, chances: list[tuple[float, int]], drawing: int, rows: int, turns: int
    ) -> Mapping[int, int]:
        """How many drafts each request tries, of at most so many rows of each group.

        Where nearly all have some, they wait for the last step's results (`_awaits`). Otherwise
        those that have some are in every other step, and the rest in all. Without any, calls have
        turns.

        Args:
          chances: of each draft how likely it is right with all before it, and whose it is.
        """
        chances.sort(reverse=True)
        spare = next((size for size in self.limits.rows if size > drawing), drawing)
        seconds = self._seconds or {spare: 0.0}
        seen = self._reading * sum(request.filled for request in self._decoding.values())
        alone = seen + next((seconds[size] for size in seconds if size >= drawing), 0.0)
        # Seconds from such a step without drafts to the next, which the host has to call.
        each, ours = max(alone, HOST_SECONDS), len(self._decoding)
        best, taken = ours * turns / max(turns * alone, HOST_SECONDS), Counter[int]()
        for size in (size for size in seconds if size > drawing):
            room, few, right = [min(size - drawing, rows)] * len(self.groups), Counter[int](), 0.0
            for chance, key in chances:
                group = self._ongoing[key].slot // self._slots
                if room[group]:
                    room[group] -= 1
                    few[key] += 1
                    right += chance
            waiting = len(few)
            if _nearly_all(waiting, ours):
                speed = (ours + right) / (seconds[size] + seen + HOST_SECONDS)
            else:
                both = max(seconds[size] + seen, HOST_SECONDS) + each
                speed = (2 * ours - waiting + right) / both
            if speed > best:
                best, taken = speed, few
            if few.total() == len(chances):
                break
        return taken

    def _count_turns(self, coming: Sequence[Ongoing]) -> int:
        """How many tokens each request may draw in the next call; several only if nothing waits.

        One where a turn takes longer than the host. What is behind a request's end is dropped.
        """
        drawing, groups, pages = max(self._drawing()), self.groups, Counter[int]()
        size = next((n for n in self._turns if n >= drawing), 0)
        if not size or self._seconds.get(size, 0) > HOST_SECONDS or self._unmasked:
            return 1
        if coming or any(group.filling for group in groups):
            return 1
        count, page = self._turns[size], self.limits.page
        for request in self._decoding.values():
            asked = request.job
            drawn = asked.max_tokens - request.wanted
            if asked.guided or asked.logprobs or any(at > drawn for at, _ in asked.masks):
                return 1
            if request.filled + count > self.limits.longest:
                return 1
            more = max(0, request.filled + count - request.room)
            pages[request.slot // self._slots] += -(-more // page)
        enough = (pages[i] <= group.pages.available for i, group in enumerate(groups))
        return count if all(enough) else 1

    def _draw(self, step: EngineStep, drafts: Mapping[int, _Guess], turns: int) -> None:
        last = []
        for key, request in self._decoding.items():
            tried = drafts.get(key, ())
            if tried is None:
                continue
            while request.room < request.filled + turns:
                self._group(request).grow(request)
            slot, start, pages = request.slot, request.filled, request.pages
            guessed = (tried, request.tokens) if isinstance(tried, int) else (0, ())
            known = () if isinstance(tried, int) else tried
            more = (known, *guessed, turns, request.job.adapter)
            part = SlotPart(slot, start, None, pages, True, None, *more)
            rows = part.rows
            if not part.guesses:
                request.agreement.note(0, 0)
            if not part.drafts:
                request.quoting.note(0, 0)
            step.parts.append(part)
            step.keys.append(key)
            step.room[slot // self._slots] -= rows
            step.alternatives |= bool(request.job.logprobs)
            step.seen += start + rows
            step.rows += rows
            request.filled += turns
            drawn = min(turns, request.wanted)
            ends = [self._count_draw(step, request, begins=False) for _ in range(drawn)]
            # Behind drafts it is not known where it goes on.
            if ends[-1] or rows > 1:
                last.append(key)
        step.decoding = len(step.parts)
        for key in last:
            del self._decoding[key]

    def _count_draw(self, step: EngineStep, request: Ongoing, *, begins: bool) -> bool:
        """Sets what may be drawn; returns whether the next step has no row for the request."""
        asked = request.job
        drawn = asked.max_tokens - request.wanted
        request.wanted -= 1
        for count, mask in asked.masks:
            if count == drawn or (begins and count < drawn and not asked.guided):
                request.mask = mask
                step.masks[request.slot] = mask
        if asked.guided:
            step.masks[request.slot] = request.mask
            self._unmasked.add(request.key)
        return asked.guided or not request.wanted

    def _fill(self, step: EngineStep, coming: Sequence[Ongoing]) -> None:
        """Adds chunks: of the prompts that have slots, then of those coming, in their order."""
        for group in self.groups:
            if group.filling is not None:
                self._add_chunk(step, group, group.filling)
        # Who fits only since those chunks were added has no draw kept for it.
        while coming and (request := self._first()) is not None:
            found = self._find_group(request, step.room)
            if found is None:
                return
            if request.order < 0:
                self._queue.remove(request)
                request.order = self._order = self._order + 1
            else:
                self._preempted.remove(request)
            found[0].place(request, found[1])
            reused = min(request.filled, len(request.job.prompt)) - request.paid
            self.counts.reused += max(0, reused)
            step.placed.append((request.key, request.filled))
            self._add_chunk(step, found[0], request)

    def _first(self) -> Ongoing | None:
        """Who gets the next slot; nobody while the mask of the oldest is on its way."""
        if not self._preempted:
            return self._queue.first()
        oldest = self._preempted[0]
        return None if oldest.key in self._unmasked else oldest

    def _find_group(self, request: Ongoing, room: Sequence[int]) -> tuple[Group, list[int]] | None:
        """The group where a request starts best, with the pages that hold its beginning there.

        A page that holds its tokens draws it to a group as much as a request that runs there keeps
        it away.
        """
        best = None
        for group, rows in zip(self.groups, room, strict=True):
            matched = group.find(request) if rows else None
            if matched is not None:
                worth = len(matched) - len(group.running)
                if best is None or worth > best[0]:
                    best = worth, group, matched
        return best and best[1:]

    def _add_chunk(self, step: EngineStep, group: Group, request: Ongoing) -> None:
        """Adds the next tokens of a prompt, as many as the step has rows for."""
        index, start = request.slot // self._slots, request.filled
        end = min(request.end, start + step.room[index])
        is_last, tokens = end == request.end, request.tokens
        targets = None
        if request.scores:
            targets = (*tokens[start + 1 : end + 1], *([0] if is_last else []))
        draws = is_last and request.wanted > 0
        chunk = tuple(tokens[start:end])
        part = SlotPart(request.slot, start, chunk, request.pages, draws, targets)
        asked = request.job
        step.parts.append(part._replace(adapter=asked.adapter) if asked.adapter >= 0 else part)
        step.keys.append(request.key)
        step.room[index] -= end - start
        step.rows += end - start
        step.seen += end
        request.filled = end
        # What is run once more after a preemption is not charged.
        new = max(0, min(end, len(asked.prompt)) - max(start, request.paid))
        self.counts.prefilled += new
        self.counts.repeated += end - start - new
        self._queue.charge(request, new)
        group.enter(request, replace=False)
        group.filling = None if is_last else request
        if not draws:
            return
        seen = tuple(tokens)
        step.begins.append(Begin(request.slot, asked.sampling, seen, seen[len(asked.prompt) :]))
        step.alternatives |= bool(asked.logprobs)
        if not self._count_draw(step, request, begins=True):
            self._decoding[request.key] = request

    # Advancing.

    def _judge(self, request: Ongoing, part: SlotPart, right: int, tried: int) -> None:
        """Lets a request draw behind those of its drafts that were right."""
        self.counts.drafted += tried
        self.counts.accepted += right
        request.filled += right
        request.wanted -= right
        (request.agreement if part.guesses else request.quoting).note(right, tried)
        if request.wanted:
            self._decoding[request.key] = request

    def _take_drawn(
        self, request: Ongoing, ids: Sequence[int], row: int, done: list[Progress]
    ) -> int:
        """Gives a request the tokens that were drawn for it; returns how many it took."""
        asked = request.job
        for taken, token in enumerate(ids):
            request.tokens.append(token)
            self._queue.charge(request, 1)
            finish: Finish | None = None
            if token in asked.stop_ids:
                finish = "stop"
            elif len(request.tokens) == len(asked.prompt) + asked.max_tokens:
                finish = "length"
            done.append(Progress(request.key, row + taken, finish))
            if finish is not None:
                self._end(request)
                return taken + 1
        return len(ids)

    def _end(self, request: Ongoing) -> None:
        del self._ongoing[request.key]
        self._decoding.pop(request.key, None)
        self._unmasked.discard(request.key)
        if request.slot >= 0:
            self._group(request).remove(request)
        elif request.order >= 0:
            self._preempted.remove(request)
        else:
            self._queue.remove(request)
        self._queue.leave(request)

    def _group(self, request: Ongoing) -> Group:
        return self.groups[request.slot // self._slots]


def _nearly_all(some: int, requests: int) -> bool:
    """Whether so few are left that a step is not worth it for them alone."""
    return some * 8 >= requests * 7


def _right(drafts: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """The tokens drawn behind the latest one and behind drafts, as far as these were right."""
    right = 0
    while right < len(drafts) and ids[right] == drafts[right]:
        right += 1
    return ids[: right + 1]

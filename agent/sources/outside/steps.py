"""Steps inferred from marks and from what was sent. Pure: no I/O, no clock.

A mark says when a step begins; that it has ended, the next mark says, or the
first piece of text that came of it. Who took part is inferred: a request does
from the step that made its first token until the one that made its last, and
in those before the first that took clearly longer than a decoding step, which
must have been for its prompt.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dsagent.agent.sources.outside.exchanges import Exchange
from dsagent.instrumentation.records import Admission, Phase, Share, Step

HOLD_NS = 2_000_000_000  # a step is kept back at most so long until its requests tell more
IDLE_NS = 300_000_000  # without a mark and without an open request
MOST_MARKS = 20_000
LONG_RATIO = 1.5  # of a decoding step's usual time: a step longer than this held a prompt
PACE_STEPS = 64
MOST_SIZES = 1024
BYTES_A_TOKEN = 4  # of a request's body, where nothing better is known


@dataclass(frozen=True, slots=True)
class Mark:
    step_id: int
    start_ns: int
    pid: int
    tid: int


@dataclass(slots=True)
class Life:
    """One exchange and the steps it is held to have been in."""

    exchange: Exchange
    request_key: int
    outputs: dict[int, int] = field(default_factory=dict)  # step → pieces of text it made
    first_output: int | None = None  # step that made the first
    last_output: int | None = None
    first_step: int | None = None  # the first one it had a share of, once told
    first_step_ns: int | None = None
    last_end_ns: int | None = None  # of the last one it had a share of
    prefill_ended_ns: int | None = None
    context_tokens: int = 0
    found_busy: bool = False  # a step was running when it came

    @property
    def prompt_tokens(self) -> int:
        reply = self.exchange.reply
        if reply is not None and reply.prompt_tokens is not None:
            return max(1, reply.prompt_tokens)
        return max(1, self.exchange.body_bytes // BYTES_A_TOKEN)


@dataclass(slots=True)
class _Open:
    """A step that has begun and was not told yet."""

    mark: Mark
    first_text_ns: int | None = None


class Steps:
    """Marks and text in, steps out, in order."""

    def __init__(self, engine_id: int) -> None:
        self._engine_id = engine_id
        self._waiting: deque[_Open] = deque()
        self._recent: deque[Mark] = deque(maxlen=256)
        # How long steps took that only decoded, in all and by how many did.
        self._pace: deque[int] = deque(maxlen=PACE_STEPS)
        self._paces: dict[int, deque[int]] = {}
        self._told_ns = 0  # the end of the last step told
        self.given_up = 0

    def mark(self, mark: Mark) -> None:
        self._waiting.append(_Open(mark))
        self._recent.append(mark)
        while len(self._waiting) > MOST_MARKS:
            self._waiting.popleft()
            self.given_up += 1

    def text(self, at_ns: int, life: Life) -> None:
        """A piece of text was sent. It is the output of the step that had been running for a
        while: one that has only just begun cannot have made it."""
        step_id = self._maker(at_ns, life)
        if step_id is None:
            return
        life.outputs[step_id] = life.outputs.get(step_id, 0) + 1
        life.first_output = step_id if life.first_output is None else life.first_output
        life.last_output = max(step_id, life.last_output or 0)
        for each in self._waiting:
            if each.mark.step_id == step_id and each.first_text_ns is None:
                each.first_text_ns = at_ns

    def _maker(self, at_ns: int, life: Life) -> int | None:
        marks = self._recent
        number = bisect_right(marks, at_ns, key=lambda mark: mark.start_ns) - 1
        if number < 0:
            return None
        latest = marks[number]
        if number:
            before = marks[number - 1]
            usual_ns = latest.start_ns - before.start_ns
            if self._pace:
                usual_ns = min(usual_ns, round(statistics.median(self._pace)))
            young = at_ns - latest.start_ns < usual_ns / 2
            if (
                young
                and before.start_ns > life.exchange.received_ns
                and (life.last_output is None or before.step_id > life.last_output)
            ):
                return before.step_id
        return latest.step_id

    def tell(self, lives: Iterable[Life], now_ns: int) -> list[Step]:
        """The steps about which nothing more is to be expected."""
        around = list(lives)
        told = []
        while self._waiting:
            end_ns = self._end_ns(around, now_ns)
            if end_ns is None:
                break
            held = now_ns - end_ns < HOLD_NS
            step_id = self._waiting[0].mark.step_id
            if held and any(self._may_tell_more(life, step_id, end_ns) for life in around):
                break
            told.append(self._step(self._waiting.popleft(), end_ns, around))
        return told

    @property
    def oldest_waiting_ns(self) -> int | None:
        """When the oldest step began that was not told yet; None where there is none."""
        return self._waiting[0].mark.start_ns if self._waiting else None

    def _end_ns(self, lives: Sequence[Life], now_ns: int) -> int | None:
        """When the oldest waiting step ended; None: it runs, or may."""
        first, text_ns = self._waiting[0], self._waiting[0].first_text_ns
        start_ns = first.mark.start_ns
        if len(self._waiting) > 1:
            following = self._waiting[1].mark.start_ns
            # What the young step's text rule needs: half of a step.
            if now_ns - following < min(following - start_ns, HOLD_NS) / 2:
                return None
            if text_ns is None:
                return self._without_text(start_ns, following)
            return min(text_ns, following)
        busy = any(life.exchange.ended_ns is None for life in lives)
        if text_ns is not None:
            over = not busy or now_ns - text_ns > IDLE_NS
            return text_ns if over else None
        if busy or now_ns - start_ns <= IDLE_NS:
            return None
        return self._without_text(start_ns, now_ns)

    def _without_text(self, start_ns: int, following_ns: int) -> int:
        """It made nothing that was sent at once. It filled the time up to the next one, unless
        that is long and nothing was going on."""
        usual_ns = round(statistics.median(self._pace)) if self._pace else IDLE_NS
        return min(following_ns, max(start_ns + 1, start_ns + 64 * usual_ns))

    def _may_tell_more(self, life: Life, step_id: int, end_ns: int) -> bool:
        """Whether the request was there and has not shown yet which step made its first token."""
        exchange = life.exchange
        return (
            life.first_output is None
            and exchange.ended_ns is None
            and exchange.received_ns < end_ns
        )

    def _step(self, opened: _Open, end_ns: int, lives: Sequence[Life]) -> Step:
        mark = opened.mark
        end_ns = max(end_ns, mark.start_ns + 1, self._told_ns)
        decoding = sum(_decodes(life, mark.step_id, end_ns) for life in lives)
        # A step that made somebody's first token is long because of that prompt.
        explained = any(life.first_output == mark.step_id for life in lives)
        long = not explained and self._is_long(end_ns - mark.start_ns, decoding)
        shares = [s for life in lives if (s := self._share(life, mark, end_ns, long=long))]
        prefills = [share for share in shares if share.phase is Phase.PREFILL]
        if shares and not prefills:
            self._pace.append(end_ns - mark.start_ns)
            if len(shares) in self._paces or len(self._paces) < MOST_SIZES:
                pace = self._paces.setdefault(len(shares), deque(maxlen=PACE_STEPS))
                pace.append(end_ns - mark.start_ns)
        self._told_ns = end_ns
        waiting = sum(
            life.exchange.received_ns <= mark.start_ns
            and life.first_step is None
            and (life.exchange.ended_ns is None or life.exchange.ended_ns > mark.start_ns)
            for life in lives
        )
        return Step(
            engine_id=self._engine_id,
            step_id=mark.step_id,
            pid=mark.pid,
            tid=mark.tid,
            start_ns=mark.start_ns,
            end_ns=end_ns,
            schedule_ns=0,
            prepare_ns=0,
            forward_ns=end_ns - mark.start_ns,
            sample_ns=0,
            output_ns=0,
            prefill_tokens=sum(share.scheduled_tokens for share in prefills),
            decode_tokens=len(shares) - len(prefills),
            waiting=waiting,
            running=len(shares),
            preempted=0,
            kv_blocks_used=0,
            kv_blocks_total=0,
            admission=Admission.ADMITTED,
            graph=False,
            shares=tuple(shares),
            inferred=True,
        )

    def _share(self, life: Life, mark: Mark, end_ns: int, *, long: bool) -> Share | None:
        exchange, step_id = life.exchange, mark.step_id
        if exchange.received_ns > mark.start_ns:
            life.found_busy |= exchange.received_ns < end_ns
            return None
        first = life.first_output
        if first is None or step_id < first:
            over_ns = exchange.ended_ns
            gone = over_ns is not None and over_ns <= mark.start_ns
            if gone or not long:
                return None
        elif step_id > first and not _decodes(life, step_id, end_ns):
            return None
        prefill = first is None or step_id <= first
        tokens = self._prefilled(life, mark, end_ns) if prefill else 1
        share = Share(
            request_key=life.request_key,
            phase=Phase.PREFILL if prefill else Phase.DECODE,
            scheduled_tokens=tokens,
            cached_tokens=0,
            context_tokens=life.context_tokens,
            output_tokens=life.outputs.pop(step_id, 0),
            recompute=False,
        )
        if life.first_step is None:
            life.first_step, life.first_step_ns = step_id, mark.start_ns
        if prefill:
            life.prefill_ended_ns = end_ns
        life.context_tokens += tokens
        life.last_end_ns = end_ns
        return share

    def _prefilled(self, life: Life, mark: Mark, end_ns: int) -> int:
        """Of the prompt, in proportion to the time until the first token."""
        left = max(1, life.prompt_tokens - life.context_tokens)
        first_ns = life.exchange.first_token_ns
        if mark.step_id == life.first_output or first_ns is None or first_ns <= end_ns:
            return left
        ratio = (end_ns - mark.start_ns) / (first_ns - mark.start_ns)
        return min(left, max(1, round(left * ratio)))

    def _is_long(self, ns: int, decoding: int) -> bool:
        """Clearly longer than a step in which so many decode; of a number not seen yet, than the
        next smaller one would be if each cost the same."""
        smaller = max((size for size in self._paces if size <= decoding), default=0)
        if not smaller:
            return not decoding or not self._pace
        usual_ns = statistics.median(self._paces[smaller]) * decoding / smaller
        return ns > LONG_RATIO * usual_ns


def _decodes(life: Life, step_id: int, end_ns: int) -> bool:
    """Whether the step made, or may have made, another token of the request."""
    first, last, over_ns = life.first_output, life.last_output, life.exchange.ended_ns
    if first is None or last is None or step_id <= first:
        return False
    return step_id <= last or over_ns is None or over_ns > end_ns

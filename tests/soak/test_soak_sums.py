"""The arithmetic of a long run: what counts as flat, and when two books agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from soak_crowd import Asked, Fate
from soak_sums import Bound, Found, Kill, Watched, at_most, flat, reconcile, slope

SECOND_NS = 1_000_000_000


def hourly(*values: float) -> list[tuple[float, float]]:
    return [(index / 10, value) for index, value in enumerate(values)]


def test_an_outlier_does_not_move_the_slope() -> None:
    assert slope(hourly(1, 2, 3, 400, 5, 6)) == pytest.approx(10)
    assert slope([(0.0, 1.0)]) is None
    assert slope([(1.0, 1.0), (1.0, 2.0)]) is None


def test_what_grows_beyond_its_bound_is_told() -> None:
    steady = flat("threads", "", hourly(9, 5, 5, 5, 5, 5, 5), Bound(0))
    assert (steady.verdict, steady.start, steady.end, steady.most) == ("ok", 5, 5, 9)
    leak = flat("threads", "", hourly(5, 5, 5, 6, 6, 7, 7, 8), Bound(0))
    assert leak.verdict == "FAILED"
    within = flat("memory", "", hourly(*range(100, 110)), Bound(4, 6))
    assert within.verdict == "ok"
    beyond = flat("memory", "", hourly(*range(100, 140, 4)), Bound(4, 6))
    assert beyond.verdict == "FAILED"
    with pytest.raises(ValueError, match="soak for longer"):
        flat("threads", "", hourly(1, 1), Bound(0))


def test_what_falls_is_no_leak() -> None:
    assert flat("memory", "", hourly(9, 8, 7, 6, 5, 4, 3), Bound(0)).verdict == "ok"


def test_a_cap_holds_for_every_sample() -> None:
    assert at_most("disk", "", hourly(1, 4, 2), 4).verdict == "ok"
    assert at_most("disk", "", hourly(1, 4.1, 2), 4).verdict == "FAILED"


def asked(trace_id: str, fate: Fate, sent_s: float, end_s: float, port: int = 1) -> Asked:
    end_ns = round(end_s * SECOND_NS)
    return Asked(trace_id, port, fate, round(sent_s * SECOND_NS), end_ns, end_ns)


def watched(start_s: float, end_s: float, requests: int, cut_off: int = 0) -> Watched:
    return Watched(1, round(start_s * SECOND_NS), round(end_s * SECOND_NS), requests, cut_off, 0)


WHOLE, PARTIAL = Found(partial=False), Found(partial=True)


def test_every_request_has_its_place() -> None:
    books = reconcile(
        (
            asked("whole", "completed", 11, 12),
            asked("across", "completed", 9, 12),
            asked("before", "completed", 3, 4),
            asked("left", "left", 13, 14),
            asked("cut", "broken", 19, 20),
            asked("away", "refused", 20, 20),
        ),
        {"whole": WHOLE, "across": PARTIAL, "left": WHOLE},
        (replace(watched(10, 20, requests=3, cut_off=1), cut_off_ids=("cut",)),),
        (),
        SECOND_NS // 10,
    )
    assert books.faults == []
    assert (books.completed, books.explained, books.explained_partial) == (3, 2, 1)
    assert (books.before_attached, books.broken_off, books.broken_told) == (1, 1, 1)
    assert books.by_fate == {"completed": 3, "left": 1, "broken": 1, "refused": 1}


@pytest.mark.parametrize(
    ("one", "answers", "requests", "fault"),
    [
        (asked("lost", "completed", 11, 12), {}, 0, "1 requests without an account"),
        (asked("x", "completed", 11, 12), {"x": PARTIAL}, 1, "1 partial accounts of requests seen"),
        (asked("x", "completed", 11, 12), {"x": WHOLE}, 2, "2 requests accounted for, 1 explained"),
        (asked("x", "answered", 11, 12), {}, 1, "1 requests accounted for, 0 explained"),
    ],
)
def test_what_does_not_add_up_is_told(
    one: Asked, answers: dict[str, Found], requests: int, fault: str
) -> None:
    (said,) = reconcile((one,), answers, (watched(10, 20, requests),), (), SECOND_NS // 10).faults
    assert said.startswith(fault)


def test_only_the_engines_own_watch_counts() -> None:
    other = asked("other", "completed", 11, 12, port=2)
    books = reconcile((other,), {}, (watched(10, 20, requests=0),), (), 0)
    assert (books.before_attached, books.missing) == (1, ())


def cut_off(*names: str, said: int | None = None) -> Watched:
    watch = watched(10, 20, requests=0, cut_off=len(names) if said is None else said)
    return replace(watch, cut_off_ids=names)


@pytest.mark.parametrize("fate", ["broken", "completed", "left"])
def test_what_is_told_as_cut_off_is_in_its_place(fate: Fate) -> None:
    one = asked("one", fate, 19, 19.9)
    books = reconcile((one,), {}, (cut_off("one"),), (Kill(1, one.end_ns),), 0)
    assert (books.faults, books.missing) == ([], ())
    told = (books.broken_told, books.at_a_kill, books.left_without)
    assert sum(told) == 1
    unnamed = reconcile((one,), {}, (watched(10, 20, requests=0),), (), 0)
    assert len(unnamed.missing) == 1


@pytest.mark.parametrize(
    ("one", "answers", "watch"),
    [
        (asked("away", "refused", 19, 19), {}, cut_off("away")),  # no engine has ever seen it
        (asked("one", "broken", 19, 19.9), {}, cut_off("one", "nobody")),
        (asked("one", "broken", 19, 19.9), {}, cut_off("one", said=2)),
    ],
)
def test_what_is_told_as_cut_off_must_have_been(
    one: Asked, answers: dict[str, Found], watch: Watched
) -> None:
    (said,) = reconcile((one,), answers, (watch,), (), 0).faults
    assert "said to be cut off were not" in said


def test_what_is_explained_was_not_cut_off() -> None:
    one = asked("one", "completed", 18, 19)
    watch = replace(cut_off("one"), requests=1)
    (said,) = reconcile((one,), {"one": WHOLE}, (watch,), (), 0).faults
    assert said == "1 of 1 said to be cut off were not: one"


def test_what_broke_off_is_told_unless_nobody_was_there_or_no_answer_began() -> None:
    died = Kill(1, round(19.5 * SECOND_NS))
    watch = watched(10, 19.6, requests=0)
    late = asked("late", "broken", 19, 19.7)  # its client saw it after the watch had ended
    assert len(reconcile((late,), {}, (watch,), (died,), 0).missing) == 1
    books = reconcile((replace(late, heard=False),), {}, (watch,), (died,), 0)
    assert (books.broken_off, books.broken_unheard, books.faults) == (1, 1, [])
    before = replace(watch, ended_ns=19 * SECOND_NS)
    books = reconcile((late,), {}, (before,), (died,), 0)
    assert (books.broken_off, books.broken_unseen, books.faults) == (1, 1, [])


def test_of_who_does_not_read_it_is_not_known_when_the_engine_was_through() -> None:
    slow = replace(asked("slow", "completed", 9, 15), may_end_ns=9 * SECOND_NS)
    watches = (watched(10, 20, requests=0),)
    books = reconcile((slow,), {}, watches, (), 0)
    assert (books.before_attached, books.missing) == (1, ())
    seen = replace(slow, may_end_ns=11 * SECOND_NS)
    assert len(reconcile((seen,), {}, watches, (), 0).missing) == 1

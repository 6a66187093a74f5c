"""Places outlast the engines in them; accounts outlast them for ten minutes, within one bound."""

from __future__ import annotations

from dataclasses import replace

import shell_accounts

from dsagent.agent.session.ledger import Ledger
from dsagent.agent.sidecar.books import MAX_ENDED, Books
from dsagent.agent.sidecar.options import AttachOptions
from dsagent.agent.sidecar.processes import Key
from dsagent.agent.sidecar.slots import EMPTY_NS, Slot, Slots


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def taken(slots: Slots, command: str, most: int = 3) -> Slot:
    slot = slots.take(command, AttachOptions(), most)
    assert slot is not None
    return slot


def test_an_engine_that_comes_again_has_its_place() -> None:
    slots = Slots()
    first, other = taken(slots, "a"), taken(slots, "b")
    assert (first.name, other.name) == ("0", "1")
    slots.leave(first)
    again = taken(slots, "a")
    assert again is first
    assert (again.restarts, other.restarts) == (1, 0)
    assert taken(slots, "a").name == "2"  # a second one like it
    assert slots.take("c", AttachOptions(), 3) is None


def test_a_new_engine_takes_a_new_place_then_the_longest_empty_one() -> None:
    clock = Clock()
    slots = Slots(now_ns=clock)
    a, b = taken(slots, "a", 2), taken(slots, "b", 2)
    slots.leave(b)
    clock.now_ns = 5
    slots.leave(a)
    c = taken(slots, "c", 2)
    assert (c.name, c.restarts, c.collected is b.collected) == ("1", 0, False)
    assert taken(slots, "a", 2) is a


def test_an_empty_place_is_given_up_after_ten_minutes() -> None:
    clock = Clock()
    slots = Slots(now_ns=clock)
    slots.leave(taken(slots, "a"))
    staying = taken(slots, "b")
    clock.now_ns = EMPTY_NS - 1
    slots.expire()
    assert len(slots.all()) == 2
    clock.now_ns = EMPTY_NS
    slots.expire()
    assert slots.all() == (staying,)


def account(number: int):  # type: ignore[no-untyped-def]
    one = shell_accounts.interfered()
    record = replace(one.record, request_id=f"r{number}", sent_ns=one.record.sent_ns + number)
    return replace(one, record=record)


def fill(ledger: Ledger, requests: int) -> None:
    for number in range(requests):
        ledger.add(account(number))


NOW_NS = shell_accounts.interfered().record.sent_ns
A, B, C = Key(1, 10, 0), Key(2, 10, 0), Key(1, 11, 0)


def test_one_bound_for_all_and_those_that_have_ended_give_way() -> None:
    ledger = Ledger()
    fill(ledger, 1)
    one = ledger.nbytes
    books = Books(max_bytes=20 * one)
    fill(books.open(A), 30)
    before = books.accounts
    assert 18 <= before <= 20
    books.close(A, NOW_NS)
    assert books.accounts == before  # nobody else needs the room
    live = books.open(B)
    assert books.ended_bytes <= 10 * one
    fill(live, 30)
    assert books.nbytes <= 20 * one
    assert len(live) >= 9
    books.limit(2 * one)
    books.expire(NOW_NS)
    live.expire(NOW_NS)
    assert books.nbytes <= 2 * one


def test_a_pid_that_was_reused_is_another_engine() -> None:
    books = Books()
    fill(books.open(A), 2)
    books.close(A, NOW_NS)
    fill(books.open(C), 3)
    assert [(book.key, len(book.ledger)) for book in books.ended] == [(A, 2)]
    assert books.accounts == 5


def test_accounts_go_after_ten_minutes_and_empty_books_with_them() -> None:
    books = Books()
    fill(books.open(A), 2)
    books.open(B)
    books.close(A, NOW_NS)
    books.close(B, NOW_NS)  # it had none
    assert len(books.ended) == 1
    books.expire(NOW_NS + 600_000_000_000 + 2)
    assert books.ended == ()
    assert books.accounts == 0


def test_an_engine_that_restarts_all_the_time_leaves_a_bounded_number_of_books() -> None:
    books = Books()
    for ticks in range(MAX_ENDED + 20):
        key = Key(1, ticks, 0)
        fill(books.open(key), 1)
        books.close(key, NOW_NS)
    assert len(books.ended) == MAX_ENDED
    assert books.ended[-1].key == Key(1, MAX_ENDED + 19, 0)

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dsagent.engine.kv_cache import KvCache

BLOCK = 4


class Accounts(RuleBasedStateMachine):
    """Sequences come, share, grow and go in any order; no block is ever lost or handed out twice,
    and what is found is what was put there."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCache(8, BLOCK, enable_prefix_cache=True)
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.held: list[list[int]] = []

    sequences = Bundle("sequences")

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4 * BLOCK))
    def admit(self, tokens: list[int]) -> list[int]:
        found, serial = self.kv.find(tokens)
        assert len(found) * BLOCK < len(tokens)
        for index, block in enumerate(found):
            assert self.contents[block] == tuple(tokens[: (index + 1) * BLOCK])
        self.kv.share(found)
        taken = self.kv.take(self.kv.blocks_for(len(tokens)) - len(found))
        if taken is None:
            self.kv.give_back(found)
            return []
        in_use = {block for blocks in self.held for block in blocks}
        assert not in_use & set(taken)
        blocks = found + taken
        for index in range(len(found), len(tokens) // BLOCK):
            self.contents[blocks[index]] = tuple(tokens[: (index + 1) * BLOCK])
            serial = self.kv.remember(serial, tokens, index * BLOCK, blocks[index])
        self.held.append(blocks)
        return blocks

    @rule(blocks=consumes(sequences))
    def release(self, blocks: list[int]) -> None:
        if blocks:
            self.kv.give_back(blocks)
            self.held.remove(blocks)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.kv.check()
        assert self.kv.free + self.kv.cached + self.kv.used == self.kv.num_blocks
        assert self.kv.used == len({block for blocks in self.held for block in blocks})


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def fill(kv: KvCache, tokens: list[int]) -> list[int]:
    blocks = kv.take(kv.blocks_for(len(tokens)))
    assert blocks is not None
    serial = 0
    for index in range(len(tokens) // BLOCK):
        serial = kv.remember(serial, tokens, index * BLOCK, blocks[index])
    return blocks


def test_a_colliding_hash_is_not_a_hit() -> None:
    kv = KvCache(8, BLOCK, enable_prefix_cache=True)
    stored, other = [-1] * BLOCK, [-2] * BLOCK
    assert hash(tuple(stored)) == hash(tuple(other))  # CPython: hash(-1) == hash(-2)
    blocks = fill(kv, stored)
    assert kv.find([*stored, 0])[0] == blocks
    assert kv.find([*other, 0])[0] == []


def test_the_same_tokens_after_another_prefix_are_not_a_hit() -> None:
    kv = KvCache(8, BLOCK, enable_prefix_cache=True)
    fill(kv, [1] * BLOCK + [7] * BLOCK)
    fill(kv, [2] * BLOCK)
    assert len(kv.find([2] * BLOCK + [7] * BLOCK + [0])[0]) == 1


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    kv = KvCache(8, BLOCK, enable_prefix_cache=True)
    fill(kv, [1] * BLOCK * 2)
    assert len(kv.find([1] * BLOCK * 2)[0]) == 1


def test_the_least_recently_used_contents_go_first() -> None:
    kv = KvCache(3, BLOCK, enable_prefix_cache=True)
    old, new = fill(kv, [1] * BLOCK), fill(kv, [2] * BLOCK)
    kv.give_back(old)
    kv.give_back(new)
    kv.share(kv.find([1] * BLOCK + [0])[0])
    kv.give_back(old)
    assert kv.take(2) is not None
    assert kv.find([1] * BLOCK + [0])[0] == old
    assert kv.find([2] * BLOCK + [0])[0] == []


def test_more_than_there_is_takes_nothing() -> None:
    kv = KvCache(3, BLOCK, enable_prefix_cache=True)
    assert kv.take(4) is None
    assert kv.free == 3


def test_without_the_prefix_cache_nothing_is_found() -> None:
    kv = KvCache(3, BLOCK, enable_prefix_cache=False)
    kv.give_back(fill(kv, [1] * BLOCK))
    assert kv.find([1] * BLOCK + [0])[0] == []
    assert (kv.free, kv.cached) == (3, 0)


def test_the_check_finds_a_lost_block() -> None:
    kv = KvCache(3, BLOCK, enable_prefix_cache=True)
    kv._free.pop()
    with pytest.raises(AssertionError, match="2 free"):
        kv.check()

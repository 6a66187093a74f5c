"""Which KV blocks are whose, and which of them hold a prefix worth finding again.

A block is in one of three states: used (by one or more sequences), cached
(nobody's, but its contents can still be hit) or free. Taking, giving back,
finding and evicting one are each O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_ROOT = 0


class PrefixKey(NamedTuple):
    """The identity of a full block's contents: the block before it, and its own tokens.

    `parent` is the serial number of the block before it (0: none), so the hash
    of a key chains back to the first token; and a dict compares keys, tokens
    and all, before it calls a block found. Serials are never used twice.
    """

    parent: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    block: int
    serial: int


class KvCache:
    """Accounts for `num_blocks` blocks of `block_size` tokens; holds no tensors."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = enable_prefix_cache
        self._users = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._entries: dict[PrefixKey, _Entry] = {}
        self._keys: dict[int, PrefixKey] = {}  # of the blocks that have an entry
        self._last_serial = _ROOT

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return self.free + self.cached

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def find(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The blocks that hold the longest cached prefix of whole blocks, and the last one's
        serial. The last token is left out: its logits are needed, so it must be computed."""
        found: list[int] = []
        serial = _ROOT
        if self._prefix_cache:
            for start in range(0, len(token_ids) - self.block_size, self.block_size):
                entry = self._entries.get(self._key(serial, token_ids, start))
                if entry is None:
                    break
                found.append(entry.block)
                serial = entry.serial
        return found, serial

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence uses these blocks, which `find` has just returned."""
        for block in blocks:
            self._cached.pop(block, None)
            self._users[block] += 1

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for new contents, evicting the longest unused; None if there are fewer."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """A sequence is done with these blocks, given first to last: the last ones, which
        the fewest others can share, are evicted first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def remember(self, parent: int, token_ids: Sequence[int], start: int, block: int) -> int:
        """`block` now holds the KV of the whole block of tokens at `start`, after the block with
        the serial `parent`. Returns the serial of these contents."""
        if not self._prefix_cache:
            return _ROOT
        key = self._key(parent, token_ids, start)
        if (entry := self._entries.get(key)) is not None:
            return entry.serial  # another sequence computed the same: one of the two is enough
        self._last_serial += 1
        self._entries[key] = _Entry(block, self._last_serial)
        self._keys[block] = key
        return self._last_serial

    def check(self) -> None:
        """Raises AssertionError unless every block is accounted for exactly once."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, users in enumerate(self._users) if users > 0}
        sizes = len(self._free) + len(self._cached) + len(used)
        if sizes != self.num_blocks or len(free | cached | used) != self.num_blocks:
            raise AssertionError(
                f"KV blocks: {len(self._free)} free + {len(cached)} cached + {len(used)} used"
                f" != {self.num_blocks}"
            )
        if {entry.block for entry in self._entries.values()} != self._keys.keys():
            raise AssertionError("the prefix cache and its blocks disagree")
        if not cached <= self._keys.keys() or free & self._keys.keys():
            raise AssertionError("a cached block without contents, or a free one with them")

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._entries[self._keys.pop(block)]
        self._users[block] = 1
        return block

    def _key(self, parent: int, token_ids: Sequence[int], start: int) -> PrefixKey:
        return PrefixKey(parent, tuple(token_ids[start : start + self.block_size]))

"""Many steps summed at once say what each alone says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.attribution.pieces import split
from dsagent.agent.attribution.runs import split_each

weights = st.integers(0, 10**9)


@given(st.lists(st.tuples(st.integers(0, 10**9), weights, weights, weights), min_size=1))
def test_splitting_many_is_splitting_each(rows: list[tuple[int, int, int, int]]) -> None:
    columns = np.array(rows, np.int64).T
    parts = split_each(columns[0], columns[1:])
    assert parts.T.tolist() == [split(total, each) for total, *each in rows]

"""The last numbers and their quantiles, against sorting them anew."""

from __future__ import annotations

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.attribution.recent import Recent


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=40))
def test_quantiles_are_those_of_the_last_numbers(numbers: list[float]) -> None:
    recent = Recent(8)
    for place, number in enumerate(numbers, 1):
        recent.append(number)
        last = sorted(numbers[max(0, place - 8) : place])
        assert len(recent) == len(last)
        assert recent.lower_quartile == last[len(last) // 4]
        expected = statistics.median(last)
        assert recent.median == expected or math.isnan(expected)  # inf - inf is no number


def test_what_it_begins_with_leaves_first() -> None:
    recent = Recent(2, [0.0, 0.0])
    for number in (5.0, 7.0):
        recent.append(number)
    assert recent.median == 6.0

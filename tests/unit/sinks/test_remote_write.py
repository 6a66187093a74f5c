"""Remote-write: buckets as Prometheus counts them, and bytes that Snappy's own library reads."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.errors import DsagentError
from dsagent.agent.metrics.catalog import MODEL, TIME_TO_FIRST_TOKEN
from dsagent.agent.metrics.exponential import ExponentialHistogram
from dsagent.agent.metrics.series import Exemplar, Labels, Store
from dsagent.agent.sinks.otlp_config import remote_write_endpoint
from dsagent.agent.sinks.remote_write import MAX_SCHEMA, buckets, snappy, time_series


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=40))
def test_every_value_lies_in_the_bucket_of_prometheus(values: list[float]) -> None:
    histogram = ExponentialHistogram()
    for value in values:
        histogram.observe(value)
    schema, first, counts = buckets(histogram.point())
    assert schema <= MAX_SCHEMA
    assert sum(counts) == len(values)
    for value in values:
        # Bucket i of Prometheus holds base**(i-1) < value <= base**i.
        index = math.ceil(math.log2(value) * 2.0**schema)
        assert counts[index - first] > 0


def test_nothing_but_zeros_has_no_buckets() -> None:
    histogram = ExponentialHistogram()
    histogram.observe(0.0)
    assert buckets(histogram.point())[1:] == (0, [])


@given(st.binary(max_size=300), st.integers(0, 700))
def test_snappys_own_library_reads_it(data: bytes, times: int) -> None:
    whole = data * times
    read = pa.decompress(snappy(whole), decompressed_size=len(whole), codec="snappy", asbytes=True)
    assert read == whole


def test_an_exemplar_is_pushed_once_and_not_before_its_series_is_known() -> None:
    store = Store(exponential=True)
    pushed: dict[tuple[str, Labels], int] = {}
    for unix_ns in (5, 3):
        exemplar = Exemplar(0.3, unix_ns, trace_id=0xABC, span_id=0xDEF)
        store.observe(TIME_TO_FIRST_TOKEN, 0.3 * unix_ns, {MODEL: "m"}, exemplar)
    found = []
    for now_ms in range(3):
        (series,) = time_series(store.collect(), (("job", "j"),), now_ms, pushed)
        found.append(series.count(b"%032x" % 0xABC))
    assert found == [0, 2, 0]
    newer = Exemplar(0.3, 6, trace_id=0xABD, span_id=0xDEF)
    store.observe(TIME_TO_FIRST_TOKEN, 0.3, {MODEL: "m"}, newer)
    (series,) = time_series(store.collect(), (("job", "j"),), 9, pushed)
    assert b"%032x" % 0xABD in series
    assert b"%032x" % 0xABC not in series


def test_labels_are_in_the_order_that_the_protocol_asks_for() -> None:
    store = Store(exponential=True)
    store.observe(TIME_TO_FIRST_TOKEN, 0.3, {MODEL: "m"})
    (series,) = time_series(store.collect(), (("instance", "i"), ("job", "j")), 7, {})
    labels = [b"__name__", b"gen_ai_request_model", b"instance", b"job"]
    assert sorted(series.index(label) for label in labels) == [series.index(x) for x in labels]


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://a/b", "http://"])
def test_what_is_no_url_is_one_line(url: str) -> None:
    with pytest.raises(DsagentError, match="--remote-write"):
        remote_write_endpoint(url, {})

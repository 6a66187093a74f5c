"""What engines say of themselves, by whichever name; hostile scrapes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dsagent.agent.exposition import Scraped, parse
from dsagent.agent.served import NAMES, QUANTITIES, quantities

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} b\\"c"} 2.0
vllm:num_requests_running{engine="1",model_name="x"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="x"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="x"} 0.25
vllm:request_success_total{engine="0",finished_reason="stop",model_name="x"} 4.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="x"} 9.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="x"} 1.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="x"} 6.0
vllm:iteration_tokens_total_count{engine="0",model_name="x"} 136.0
"""


def test_several_engines_behind_one_address() -> None:
    assert quantities(parse(VLLM, NAMES)) == {
        "requests.running": 5.0,
        "kv_cache.usage": 0.375,
        "requests.finished": 5.0,
        "steps.yielding": 136.0,
    }


def test_older_names_count_where_the_newer_are_not_there() -> None:
    old = "vllm:gpu_cache_usage_perc 0.5\n"
    assert quantities(parse(old, NAMES)) == {"kv_cache.usage": 0.5}
    assert quantities(parse(old + "vllm:kv_cache_usage_perc 0.75\n", NAMES)) == {
        "kv_cache.usage": 0.75
    }


def test_lines_that_make_no_sense_are_left_out() -> None:
    text = (
        "llamacpp:n_decode_total\nllamacpp:n_decode_total x\nllamacpp:n_decode_total NaN\n"
        'llamacpp:n_decode_total{a="b" 3\nllamacpp:n_decode_total{a=b} 3\n'
        f'llamacpp:n_decode_total{{a="{"x" * 9000}"}} 3\nllamacpp:n_decode_total 18 1700000000000\n'
    )
    assert parse(text, NAMES) == [Scraped("llamacpp:n_decode_total", {}, 18.0)]


def test_no_name_stands_for_two_things() -> None:
    spelled = [spelling.name for each in QUANTITIES for spelling in each.spellings]
    assert len(spelled) == len(set(spelled)) == len(NAMES)
    assert len({each.key for each in QUANTITIES}) == len(QUANTITIES)


@given(st.text(max_size=200), st.sampled_from(sorted(NAMES)))
@settings(max_examples=200, deadline=None)
def test_no_text_raises(text: str, name: str) -> None:
    parse(text, NAMES)
    for sample in parse(name + text, NAMES):
        assert sample.value == sample.value

"""Variables out of expressions, and what is asked of whom in their trees."""

from __future__ import annotations

import pytest

from dsagent.dashboards.doctor.expression import NotPromqlError, fill_in, parse
from dsagent.dashboards.doctor.tree import Matcher, read, selectors

LABELS = {
    "x_bucket": frozenset({"le", "model", "instance"}),
    "x_sum": frozenset({"model", "instance"}),
    "y": frozenset({"device", "instance"}),
}


@pytest.mark.parametrize(
    ("expr", "filled"),
    [
        ('rate(x{a="b"}[$__rate_interval])', 'rate(x{a="b"}[5m])'),
        ("rate(x[${__interval}])", "rate(x[5m])"),
        ('x{a="$v"}', 'x{a=~".*"}'),
        ('x{a=~"pre-${v:regex}.*"}', 'x{a=~".*"}'),
        ('x{a!="[[v]]"}', 'x{a!~"~nobody~"}'),
        ("sum by ($v) (x)", "sum by (instance) (x)"),
        ("x / $__range_s", "x / 3600"),
        ("topk($n, x)", "topk(7, x)"),
        ("rate(x[$v])", "rate(x[5m])"),
        ('x{a=~"b$"}', 'x{a=~"b$"}'),
        ("x offset $__interval", "x offset 5m"),
        ('label_replace(x, "$v", "$1", "a", "(.*)")', 'label_replace(x, "x", "$1", "a", "(.*)")'),
    ],
)
def test_an_expression_is_made_for_any_value_of_its_variables(expr: str, filled: str) -> None:
    assert fill_in(expr, {"v": None, "n": "7"}) == (filled, set())
    parse(filled)


def test_variables_that_nobody_has_are_told() -> None:
    assert fill_in('x{a="$gone"} > $v', {"v": "1"})[1] == {"gone"}


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ("sum(x", "unclosed"),
        ("rate(x)", "matrix"),
        ("", "empty"),
        ("(" * 5000 + "x" + ")" * 5000, "deeper than anybody could read"),
        ("x" + "+x" * 5000, "deeper than anybody could read"),
        ("x" * 30_000, "longer or deeper"),
        ('x{a=~"("}', "regex"),
    ],
)
def test_what_is_no_promql_is_one_line(expr: str, message: str) -> None:
    with pytest.raises(NotPromqlError, match=message) as raised:
        parse(expr)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def problems(expr: str) -> list[str]:
    return [f"{kind}: {text}" for kind, text in read(parse(expr), LABELS.get).problems]


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ("histogram_quantile(0.9, sum(rate(x_bucket[5m])))", "le: histogram_quantile needs le"),
        ("histogram_quantile(0.9, sum by (model) (rate(x_bucket[5m])))", "le: "),
        ("histogram_quantile(0.9, sum without (le) (rate(x_bucket[5m])))", "le: "),
        ('x_sum{modle="a"}', "labels: x_sum has no label modle (it has instance, model)"),
        ("sum by (phase) (rate(x_sum[5m]))", "labels: by (phase)"),
        ("sum by (model) (x_sum) / sum by (device) (y)", "labels: the two sides of / never match"),
        ("sum by (model) (x_sum) / on (device) sum by (device) (y)", "labels: on (device): the l"),
        ("sum(sum by (model) (x_sum)) by (instance)", "labels: by (instance)"),
    ],
)
def test_what_cannot_work_is_found(expr: str, message: str) -> None:
    found = problems(expr)
    assert len(found) == 1, found
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    "expr",
    [
        "histogram_quantile(0.9, sum by (le) (rate(x_bucket[5m])))",
        "histogram_quantile(0.9, sum by (le, model) (rate(x_bucket[5m])))",
        "histogram_quantile(0.9, sum without (instance) (rate(x_bucket[5m])))",
        "histogram_quantile(0.9, rate(x_bucket[5m]))",
        "histogram_quantile(0.9, sum(rate(native[5m])))",  # a native histogram has no le
        'x_sum{modle=""}',  # it has no such label: so it matches
        "sum by (model) (x_sum) / ignoring (model) group_left sum(x_sum)",
        "sum by (model) (x_sum) / on (model) group_left (instance) x_sum",
        "sum by (model) (x_sum) / 2 > 1",
        'sum by (new) (label_replace(x_sum, "new", "$1", "model", "(.*)"))',
        "topk(3, x_sum) / on (model) group_left x_sum",
        "sum by (anything) (unknown_metric)",
        "sum by (model) (x_sum) and sum by (model) (x_sum)",
    ],
)
def test_what_works_is_left_alone(expr: str) -> None:
    assert problems(expr) == []


def test_missing_is_foreseen_in_absent_and_in_alternatives() -> None:
    def foreseen(expr: str) -> dict[str, str]:
        return {each.name: each.foreseen.value for each in selectors(parse(expr))}

    assert foreseen("absent(a) or b") == {"a": "absent", "b": "alternative"}
    assert foreseen("a or vector(0)") == {"a": "no"}
    assert foreseen('{__name__="a",b="c"}') == {"a": "no"}


@pytest.mark.parametrize(
    ("op", "value", "taken"),
    [("=", "a", {"a"}), ("!=", "a", {"b", ""}), ("=~", "a|b", {"a", "b"}), ("!~", ".+", {""})],
)
def test_matchers_match_as_prometheus_does(op: str, value: str, taken: set[str]) -> None:
    matcher = Matcher("label", op, value)
    assert {text for text in ("a", "b", "") if matcher.takes(text)} == taken

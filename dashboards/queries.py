"""PromQL as the boards write it, from metrics of the catalogue: nothing here spells a name."""

from __future__ import annotations

from dsagent.agent.metrics.catalog import Metric

OF_AGENT = 'instance=~"$instance"'
OF_REQUESTS = f'{OF_AGENT},gen_ai_request_model=~"$model"'
INTERVAL = "$__rate_interval"


def series(metric: Metric, matchers: str = OF_AGENT, suffix: str = "") -> str:
    """A selector; `suffix` is _bucket, _sum or _count of a histogram."""
    return f"{metric.prometheus}{suffix}{{{matchers}}}"


def rate(metric: Metric, matchers: str = OF_AGENT, suffix: str = "") -> str:
    return f"rate({series(metric, matchers, suffix)}[{INTERVAL}])"


def increase(
    metric: Metric, matchers: str = OF_AGENT, suffix: str = "", over: str = INTERVAL
) -> str:
    return f"increase({series(metric, matchers, suffix)}[{over}])"


def by(labels: str, expr: str, function: str = "sum") -> str:
    """Aggregated, keeping these labels."""
    return f"{function} by ({labels}) ({expr})"


def ratio(above: str, below: str) -> str:
    return f"{above} / {below}"


def mean(metric: Metric, matchers: str = OF_AGENT, labels: str = "") -> str:
    """What the mean observation of a histogram was; without labels: of all series together."""
    above, below = (rate(metric, matchers, suffix) for suffix in ("_sum", "_count"))
    if not labels:
        return ratio(f"sum({above})", f"sum({below})")
    return ratio(by(labels, above), by(labels, below))


def quantile(q: float, metric: Metric, matchers: str = OF_AGENT, labels: str = "") -> str:
    kept = f"le, {labels}" if labels else "le"
    return f"histogram_quantile({q}, {by(kept, rate(metric, matchers, '_bucket'))})"


def heat(metric: Metric, matchers: str = OF_AGENT) -> str:
    """Observations by bucket, for a heatmap of a histogram."""
    return by("le", increase(metric, matchers, "_bucket"))


def within(metric: Metric, limit: str, matchers: str, over: str = INTERVAL) -> str:
    """The share of observations that were no larger than a bound; `limit` is that bound's le."""
    good = increase(metric, f'{matchers},le="{limit}"', "_bucket", over)
    return ratio(f"sum({good})", f"sum({increase(metric, matchers, '_count', over)})")


def per_request(causes: Metric, requests: str, matchers: str = OF_REQUESTS) -> str:
    """Mean seconds of a request that went to each cause; `requests` is a rate of requests."""
    of_causes = by("cause", rate(causes, matchers))
    return f"{of_causes} / ignoring(cause) group_left sum({requests})"


def worst(metric: Metric, labels: str, states: dict[int, str], matchers: str = OF_AGENT) -> str:
    """The number of the worst state that a series of these labels is in; 0 where it is in none.
    `metric` has a label `state` and is 1 for the one it is in."""
    ranked = (
        f"{rank} * {series(metric, _in_state(state, matchers))}" for rank, state in states.items()
    )
    return f"max by ({labels}) ({' or '.join(ranked)})"


def _in_state(state: str, matchers: str) -> str:
    return f'{matchers},state="{state}"'

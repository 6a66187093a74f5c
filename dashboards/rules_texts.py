"""What a burn alert of Prometheus says: how fast it burns and why, asked of Prometheus itself when
the alert is told. In Prometheus' templates, which are Go's."""

from __future__ import annotations

from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.metric import prometheus_label
from dsagent.agent.slo.alert import OBJECTIVE_TEXT
from dsagent.agent.slo.causes import LEAST_RATIO, MOST_CAUSES
from dsagent.agent.slo.limits import Limit, Objective
from dsagent.agent.slo.policy import BurnWindow, budget_ratio
from dsagent.dashboards.rules_names import duration, number, quoted, recorded

MODEL = prometheus_label(catalog.MODEL)
_SPLIT_BY = (MODEL, "tenant", "prompt_class")


def burn(limit: Limit, objective: Objective, ratio: float, window: BurnWindow) -> dict[str, str]:
    """The annotations `summary` and `causes` (of errors only the former: they have no times)."""
    what = f"{OBJECTIVE_TEXT[objective]} of {{{{ $labels.{MODEL} }}}} burning"
    where = _where(limit, objective)
    budget = budget_ratio(ratio)
    if budget:
        times = _ask(f"{recorded('ratio', window.long_s)}{where} / {number(budget)}")
        what += f"{{{{ range {times} }}}} {_NUMBER}×{{{{ end }}}}"
    if objective == "errors":
        return {"summary": what}
    # Of an agent that is gone, as they were last seen.
    shares = (
        f"last_over_time({recorded('causes', window.long_s)}{where}[{duration(window.long_s)}])"
    )
    largest = _ask(f"topk({MOST_CAUSES}, 100 * {shares} >= {number(100 * LEAST_RATIO)})")
    return {
        "summary": f"{what}{{{{ with {largest} }}}}: {_LIST}{{{{ end }}}}",
        "causes": f"{{{{ with {largest} }}}}{_LIST}{{{{ end }}}}",
    }


_NUMBER = (
    '{{ if lt .Value 9.95 }}{{ printf "%.1f" .Value }}{{ else }}{{ printf "%.0f" .Value }}{{ end }}'
)
_LIST = (
    "{{ range $place, $each := . }}{{ if $place }}, {{ end }}"
    '{{ printf "%.0f %% %s" $each.Value $each.Labels.cause }}{{ end }}'
)


def _where(limit: Limit, objective: Objective) -> str:
    """The alert's own series; a label that it does not have is empty, and matches likewise."""
    fixed = [f"slo={quoted(limit.label)}", f"objective={quoted(objective)}"]
    asked = [f"{name}=%[{place}]q" for place, name in enumerate(_SPLIT_BY, start=1)]
    # Within the backquotes of a template, and to be printed: so must names not have these two.
    safe = (each.replace("`", r"\x60").replace("%", "%%") for each in fixed)
    return f"{{{', '.join((*safe, *asked))}}}"


def _ask(expr: str) -> str:
    """A query as an expression of the template. Backquoted: the quotes within need no escape."""
    labels = " ".join(f"$labels.{name}" for name in _SPLIT_BY)
    return f"query (printf `{expr}` {labels})"

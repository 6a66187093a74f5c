"""Mixture-of-experts load and speculative decoding."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.dashboards.board import start
from dsagent.dashboards.panels import figure, last, lines, query, rows
from dsagent.dashboards.queries import by, series

HOW_TO_READ = """\
*Load of the busiest expert* is a row a layer: 1 is even, 4 means that one expert gets four \
times its share and all others wait for it. Imbalance that stays calls for another placement; \
one that comes and goes follows the prompts. **Dead experts** got no token where twenty each \
would be fair. For drafts: a position whose acceptance is low costs more than it yields; draft \
fewer tokens. Empty where the model has neither experts nor drafts."""


def board() -> dashboard.Dashboard:
    made = start("experts and drafts", "Load of experts, acceptance of drafts.", HOW_TO_READ)
    made.with_row(dashboard.Row("Experts"))
    made.with_panel(
        rows(
            "Load of the busiest expert, by layer",
            "short",
            catalog.EXPERT_LOAD.description,
            query(by("layer", series(catalog.EXPERT_LOAD), "max"), "{{layer}}"),
        )
    )
    made.with_panel(
        lines(
            "Dead experts, by layer",
            "short",
            catalog.EXPERTS_DEAD.description,
            query(f"{by('layer', series(catalog.EXPERTS_DEAD), 'max')} > 0", "layer {{layer}}"),
        )
    )
    made.with_row(dashboard.Row("Drafts"))
    made.with_panel(
        rows(
            "Acceptance, by position",
            "percentunit",
            catalog.DRAFT_ACCEPTANCE.description,
            query(by("position", series(catalog.DRAFT_ACCEPTANCE), "avg"), "{{position}}"),
        )
    )
    made.with_panel(
        lines(
            "Tokens a draft yields",
            "short",
            f"{catalog.DRAFT_LENGTH.description} 1 is no gain.",
            query(by("instance", series(catalog.DRAFT_LENGTH), "avg"), "{{instance}}"),
        )
    )
    for title, metric in (
        ("Worst layer", catalog.EXPERT_LOAD_WORST),
        ("Tokens a draft yields, now", catalog.DRAFT_LENGTH),
    ):
        made.with_panel(
            figure(
                title, "short", metric.description, last(f"max({series(metric)})", title), width=12
            )
        )
    return made

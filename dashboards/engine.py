"""What the engine's steps take, by what is in them."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.dashboards.board import start
from dsagent.dashboards.panels import WHOLE, buckets, lines, query, rows
from dsagent.dashboards.queries import by, heat, increase, mean, quantile, rate, series

HOW_TO_READ = """\
A step is one iteration of the engine's loop: one batch, one forward pass; every token of a \
reply waits for one. In *Step by batch* and *by context* a row is a size (its upper bound) and \
the colour is the mean step: rows should **darken upwards** and stay alike over time. A row that \
darkens from one moment on is the same work taking longer: see *kernel* and *GPU*. If only \
higher rows fill up, it is more load. **Prefill and mixed** steps hold up the decodes of \
everyone in the batch."""


def board() -> dashboard.Dashboard:
    made = start("engine steps", "Duration of the engine's steps, by what is in them.", HOW_TO_READ)
    _durations(made)
    _sizes(made)
    _loop(made)
    _anomalies(made)
    return made


def _durations(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Duration"))
    for phase, others in (("decode", "decode"), ("prefill", "prefill|mixed")):
        made.with_panel(
            buckets(
                f"Steps with {phase}" if others != phase else "Steps of decodes only",
                "s",
                f"{catalog.STEP_DURATION.description} Darker is more steps.",
                heat(catalog.STEP_DURATION, f'instance=~"$instance",phase=~"{others}"'),
            )
        )
    made.with_panel(
        lines(
            "Step duration by phase, p90",
            "s",
            "Nine of ten steps were shorter. Mixed ones do prefills beside decodes.",
            query(quantile(0.9, catalog.STEP_DURATION, labels="phase"), "{{phase}}"),
        )
    )
    made.with_panel(
        lines(
            "Steps",
            "ops",
            "Steps per second, by phase.",
            query(by("phase", rate(catalog.STEP_DURATION, suffix="_count")), "{{phase}}"),
        )
    )


def _sizes(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("By size"))
    for title, metric, label, what in (
        (
            "Step by batch",
            catalog.STEP_DURATION_BY_BATCH,
            "batch",
            "Mean duration of the steps that served up to so many requests.",
        ),
        (
            "Step by context",
            catalog.STEP_DURATION_BY_CONTEXT,
            "context",
            "Mean duration of the steps that had up to so many tokens in the KV cache to read.",
        ),
    ):
        made.with_panel(
            rows(title, "s", what, query(mean(metric, labels=label), f"{{{{{label}}}}}"))
        )
        made.with_panel(
            lines(
                f"{title}, p90",
                "s",
                f"Nine of ten steps of that size were shorter. {metric.description}",
                query(quantile(0.9, metric, labels=label), f"≤ {{{{{label}}}}}"),
            )
        )
    made.with_panel(
        buckets(
            "Batch size",
            "short",
            "Steps by the number of requests that they served.",
            heat(catalog.STEP_BATCH),
            width=WHOLE,
        )
    )


def _loop(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("The loop"))
    made.with_panel(
        lines(
            "Loop time, by part of the step",
            "percentunit",
            "Share of the time that the loop spends in each part; what is missing to 1 is idle. "
            "All but forward is the host's work, while the model waits.",
            query(by("part", rate(catalog.STEP_PART)), "{{part}}"),
            stacked=True,
        )
    )
    made.with_panel(
        lines(
            "Tokens",
            "short",
            "Tokens computed per second, by phase.",
            query(by("phase", rate(catalog.STEP_TOKENS)), "{{phase}}"),
            stacked=True,
        )
    )


def _anomalies(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Longer than usual"))
    made.with_panel(
        lines(
            "Anomalies by feature",
            "short",
            catalog.ANOMALY_FINDINGS.description,
            query(by("kind, feature", increase(catalog.ANOMALY_FINDINGS)), "{{kind}}: {{feature}}"),
        )
    )
    made.with_panel(
        lines(
            "Anomalies that last",
            "short",
            "1 while a feature of steps, or of requests, stays above what is usual.",
            query(by("kind", series(catalog.ANOMALY_ACTIVE), "max"), "{{kind}}"),
        )
    )

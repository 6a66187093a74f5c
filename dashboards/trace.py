"""One request: its trace, the logs of the same trace, and a profile of the same time."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, grafanapyroscope, logs, loki, table, tempo
from grafana_foundation_sdk.models.dashboard import DataSourceRef, DynamicConfigValue
from grafana_foundation_sdk.models.loki import LokiQueryDirection
from grafana_foundation_sdk.models.tempo import SearchTableType

from dsagent.dashboards.board import start
from dsagent.dashboards.panels import WHOLE
from dsagent.instrumentation import names

HOW_TO_READ = """\
Choose a request in the list (slowest ones last an hour: narrow the time to the trouble), or \
paste a **trace id** above: from `dsagent explain`, from an alert, or from a point on *latency*. \
Below are its trace (each part is an attribute, its own slowest steps are spans, and links lead \
to the steps it shared with others), the **logs** that carry the same trace id, and a \
**profile** of the server over the time shown: choose the time of the request to see what ran \
while it waited."""

TRACES = DataSourceRef(type_val="tempo", uid="${traces}")
LOGS = DataSourceRef(type_val="loki", uid="${logs}")
PROFILES = DataSourceRef(type_val="grafana-pyroscope-datasource", uid="${profiles}")
CPU = "process_cpu:cpu:nanoseconds:cpu:nanoseconds"
# Of this very board: Grafana gave it its uid.
SELF = "/d/${__dashboard.uid}?${__url_time_range}&${datasource:queryparam}&${traces:queryparam}"
CHOOSE = f"{SELF}&${{logs:queryparam}}&${{profiles:queryparam}}&var-trace=${{__value.raw}}"


def board() -> dashboard.Dashboard:
    made = start(
        "one request", "A request's trace, its logs and a profile.", HOW_TO_READ, variables=()
    )
    for name, label, kind in (
        ("traces", "Traces", TRACES.type_val),
        ("logs", "Logs", LOGS.type_val),
        ("profiles", "Profiles", PROFILES.type_val),
    ):
        assert kind is not None
        made.with_variable(dashboard.DatasourceVariable(name).label(label).type(kind))
    made.with_variable(dashboard.TextBoxVariable("trace").label("Trace id").default_value(""))
    made.with_variable(dashboard.TextBoxVariable("service").label("Service").default_value(".+"))
    made.with_row(dashboard.Row("Which"))
    made.with_panel(_list())
    made.with_row(dashboard.Row("Its trace"))
    made.with_panel(
        dashboard.Panel()
        .type("traces")
        .title("Trace")
        .description("Parts are attributes of the first span, by cause, in nanoseconds.")
        .datasource(TRACES)
        .height(14)
        .span(WHOLE)
        .with_target(
            tempo.TempoQuery()
            .datasource(TRACES)
            .query_type("traceql")
            .query("${trace}")
            .table_type(SearchTableType.TRACES)
            .ref_id("A")
        )
    )
    made.with_row(dashboard.Row("What was logged and what ran"))
    made.with_panel(_logs())
    made.with_panel(
        dashboard.Panel()
        .type("flamegraph")
        .title("Profile over the time shown")
        .description("Of the server's processes; choose the request's own time.")
        .datasource(PROFILES)
        .height(12)
        .span(12)
        .with_target(
            grafanapyroscope.Dataquery()
            .datasource(PROFILES)
            .profile_type_id(CPU)
            .label_selector('{service_name=~"$service"}')
            .query_type("profile")
            .ref_id("A")
        )
    )
    return made


def _list() -> table.Panel:
    served = f'{{ resource.{names.SERVICE_NAME} =~ "$service" && kind = server }}'
    link = {"title": "Show it below", "url": CHOOSE}
    return (
        table.Panel()
        .title("Requests in the time shown")
        .description("A click on a trace id shows it below.")
        .datasource(TRACES)
        .height(9)
        .span(WHOLE)
        .unit("short")
        .with_target(
            tempo.TempoQuery()
            .datasource(TRACES)
            .query_type("traceql")
            .query(served)
            .table_type(SearchTableType.TRACES)
            .limit(50)
            .ref_id("A")
        )
        .override_by_name("traceID", [DynamicConfigValue(id_val="links", value=[link])])
    )


def _logs() -> logs.Panel:
    return (
        logs.Panel()
        .title("Logs of that trace")
        .description("Lines that carry the same trace id; prompts and replies are not in them.")
        .datasource(LOGS)
        .height(12)
        .span(12)
        .show_time(True)
        .wrap_log_message(True)
        .enable_log_details(True)
        .with_target(
            loki.Dataquery()
            .datasource(LOGS)
            .expr('{service_name=~"$service"} | trace_id = "$trace"')
            .direction(LokiQueryDirection.FORWARD)
            .max_lines(200)
            .ref_id("A")
        )
    )

"""Everything that follows from an SLO file: rules for Prometheus with their unit tests, the same as
a PrometheusRule for Kubernetes, rules for Grafana, runbook pages. `dsagent slo generate` writes
them; those of slo.yaml are committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dsagent.agent.slo.file import SloFile, load_slo
from dsagent.dashboards import rules_grafana, rules_prometheus, rules_runbooks, rules_tests

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE / "slo.yaml"
GENERATED = HERE / "generated"
RUNBOOKS = HERE.parent / "docs" / "runbooks"
RULES, TESTS, GRAFANA, OPERATOR, KUSTOMIZATION = (
    "rules/dsagent-slo.yaml",
    "rules/dsagent-slo-tests.yaml",
    "grafana/dsagent-slo.yaml",
    "kubernetes/dsagent-slo.yaml",
    "kubernetes/kustomization.yaml",
)


def files(slo: SloFile) -> dict[str, str]:
    """The text of each file by its path."""
    rules_name, operator_name = (name.rpartition("/")[2] for name in (RULES, OPERATOR))
    groups = rules_prometheus.groups(slo)
    return {
        RULES: _text(groups, "rules for Prometheus"),
        TESTS: _text(rules_tests.document(slo, rules_name), "run by: promtool test rules"),
        GRAFANA: _text(
            rules_grafana.document(slo),
            "for Grafana's provisioning/alerting; DSAGENT_PROMETHEUS_UID is the data source's uid",
        ),
        OPERATOR: _text(_prometheus_rule(groups), "the same rules, for the Prometheus Operator"),
        KUSTOMIZATION: _text(_kustomization(operator_name), "kubectl apply -k takes this folder"),
    }


def _prometheus_rule(groups: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "dsagent-slo", "labels": {"app.kubernetes.io/part-of": "dsagent"}},
        "spec": groups,
    }


def _kustomization(resource: str) -> dict[str, Any]:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [resource],
    }


def write(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes what differs; returns every file."""
    paths = []
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def differences(texts: Mapping[str, str], folder: Path) -> list[str]:
    """A line for each file there that is not what it should be."""
    found = []
    for name, text in texts.items():
        path = folder / name
        try:
            there = path.read_text(encoding="utf-8")
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
        except ValueError:
            found.append(f"{path}: not a text")
        else:
            if there != text:
                found.append(f"{path}: is not what the SLO file makes; run dsagent slo generate")
    return found


class _Dumper(yaml.SafeDumper):
    """Long expressions as blocks of lines; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def _text(document: Any, what: str) -> str:
    body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100_000)
    return f"# Made from an SLO file by `dsagent slo generate`: {what}.\n{body}"


if __name__ == "__main__":
    write(files(load_slo(EXAMPLE)), GENERATED)
    write(rules_runbooks.pages(), RUNBOOKS)

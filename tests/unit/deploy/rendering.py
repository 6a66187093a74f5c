"""What is shipped for Kubernetes, rendered by the real kubectl; each folder once."""

from __future__ import annotations

import copy
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
MANIFESTS = ROOT / "deploy" / "kubernetes"
VARIANTS = ("native", "classic", "unprivileged")
AGENT = "dsagent"
POD_KINDS = ("Deployment", "StatefulSet", "DaemonSet", "Job", "Pod")

Document = dict[str, Any]


def folders() -> list[str]:
    """Every folder that `kubectl apply -k` takes; components only stand in others."""
    return sorted(
        str(path.parent.relative_to(MANIFESTS))
        for path in MANIFESTS.rglob("kustomization.yaml")
        if yaml.safe_load(path.read_text())["kind"] == "Kustomization"
    )


@functools.cache
def kubectl() -> str:
    found = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup_kubectl.sh")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@functools.cache
def _rendered(folder: Path) -> list[Document]:
    ran = subprocess.run(
        [kubectl(), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "", "kustomize warns of what will not work for long"
    # The C loader: the boards are large.
    return [each for each in yaml.load_all(ran.stdout, yaml.CSafeLoader) if each]


def documents(folder: str | Path) -> list[Document]:
    """A fresh copy, which a test may change. `folder`: below deploy/kubernetes, or anywhere."""
    return copy.deepcopy(_rendered(MANIFESTS / folder))


def every_document() -> Iterator[tuple[str, Document]]:
    for folder in folders():
        for document in documents(folder):
            yield folder, document


def one(found: list[Document], kind: str) -> Document:
    (document,) = (each for each in found if each["kind"] == kind)
    return document


def pod_spec(document: Document) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]
    return spec if document["kind"] == "Pod" else spec["template"]["spec"]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec.get("containers", ())]


def agent_of(spec: dict[str, Any]) -> dict[str, Any]:
    (agent,) = (each for each in containers(spec) if each["name"] == AGENT)
    return agent


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """The pod spec of everything that makes pods."""
    for folder, document in every_document():
        if document["kind"] in POD_KINDS:
            yield folder, pod_spec(document)


def pods_with_agent() -> Iterator[tuple[str, dict[str, Any]]]:
    for folder, spec in pods():
        if any(each["name"] == AGENT for each in containers(spec)):
            yield folder, spec


def keys(value: Any) -> Iterator[str]:
    """Of every mapping in a document, however deep."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield str(key)
            yield from keys(below)
    elif isinstance(value, list):
        for below in value:
            yield from keys(below)

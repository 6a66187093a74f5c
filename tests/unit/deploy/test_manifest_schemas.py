"""Kubernetes' own schemas take every rendered document, in the oldest and the newest version."""

from __future__ import annotations

import copy

import kubernetes_validate
import pytest
from rendering import (
    VARIANTS,
    Document,
    agent_of,
    documents,
    every_document,
    folders,
    one,
    pod_spec,
)

# Native sidecars run without being switched on from 1.29; the newest is what the package has.
OLDEST = "1.29"
NEWEST = kubernetes_validate.latest_version()
OPERATOR = "monitoring.coreos.com/v1"  # its schemas: tests/live/test_operator_schemas.py


def validate(document: Document, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_every_variant_and_example_is_there_and_renders() -> None:
    assert {f"overlays/{name}" for name in VARIANTS} <= set(folders())
    assert all(documents(folder) for folder in folders())


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_document_is_valid(version: str) -> None:
    for folder, document in every_document():
        if document["apiVersion"] == OPERATOR:
            continue
        try:
            validate(document, version)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{folder}, {document['kind']}: {error.message}")


def test_a_wrong_document_is_refused() -> None:
    """Else the test above says nothing."""
    good = one(documents("overlays/native"), "Deployment")
    validate(good, NEWEST)
    for wrong in ({"readOnlyRootFileSystem": True}, {"runAsUser": "root"}):
        bad = copy.deepcopy(good)
        agent_of(pod_spec(bad))["securityContext"].update(wrong)
        with pytest.raises(kubernetes_validate.ValidationError):
            validate(bad, NEWEST)

"""The names that the hooks rely on, in the published packages of older and newer versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_names import VERSIONS, Published, download, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[Published]:
    folder = tmp_path_factory.mktemp("wheels")
    return [download(version, folder) for version in VERSIONS]


def test_every_version_has_what_is_needed(published: list[Published]) -> None:
    for version in published:
        row = version.row()
        assert row["missing"] == "nothing", version.version
        assert (row["steps"], row["requests"]) == ("yes", "yes")
        assert row["ranks"] != "unavailable"


def test_the_page_has_the_table(published: list[Published]) -> None:
    assert table([version.row() for version in published]) in PAGE.read_text()


def test_what_is_not_there_is_said(published: list[Published]) -> None:
    assert not published[0].names("vllm.v1.core.sched.output", "NoSuchClass")
    assert not published[0].names("vllm.no.such.module", "SchedulerOutput")

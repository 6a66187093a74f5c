"""One storage, one base and one image for all tests of containers: a build takes minutes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pod import BASE, IMAGE, Built, Pod, pod
from podman_lab import Lab, why_not

BUILD_S = 900.0  # on a slow and busy machine, with all packages to fetch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without podman there is nothing to test; `make test-containers` insists on it."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.timeout(1200))
    reason = why_not() if ours else ""
    if reason and os.environ.get("DSAGENT_REQUIRE_CONTAINERS") == "1":
        raise pytest.UsageError(reason)
    if reason:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("containers")) as lab:
        if not lab.has_image(BASE):
            script = (sys.executable, "scripts/image.py")
            lab.build(*script, "base", BASE, timeout_s=BUILD_S)
        yield lab


@pytest.fixture(scope="session")
def image(lab: Lab) -> Built:
    """The sidecar's image, built from this very tree."""
    script = (sys.executable, "scripts/image.py", "--json", "build")
    printed = lab.build(*script, f"--tag={IMAGE}", f"--base={BASE}", timeout_s=BUILD_S)
    return Built(json.loads(printed))


@pytest.fixture(scope="session")
def with_file_capabilities(lab: Lab, image: Built) -> str:
    """The image whose interpreter brings its capabilities along; most of it is built by now."""
    tag = f"{IMAGE}-filecaps"
    script = (sys.executable, "scripts/image.py", "build", "--target=filecaps")
    lab.build(*script, f"--tag={tag}", f"--base={BASE}", timeout_s=BUILD_S)
    return tag


@pytest.fixture
def a_pod(lab: Lab, image: Built) -> Iterator[Pod]:
    with pod(lab) as made:
        yield made

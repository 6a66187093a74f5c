"""The compose file: valid by the types of the Compose Specification, with the manifests' rights."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose
from rendering import ROOT, agent_of, containers, documents, one, pod_spec
from shipped_settings import read

from dsagent.agent import settings
from dsagent.agent.listening import ports
from dsagent.agent.listening.admission import Guard, ListenOptions

FILE = ROOT / "deploy" / "compose" / "compose.yaml"
TEXT = FILE.read_text()


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TEXT)["services"]
    return found


def in_kubernetes(name: str) -> dict[str, Any]:
    spec = pod_spec(one(documents("examples/vllm"), "Deployment"))
    (container,) = (each for each in containers(spec) if each["name"] == name)
    return container


def check(text: str) -> None:
    """The specification's types, and that every secret is declared. Raises ValueError."""
    PyCompose.from_yaml(text).validate()


def test_it_is_valid() -> None:
    check(TEXT)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cap_drop:", "capdrop:"),
        ("read_only: true", "read_only: 7"),
        ("mem_limit: 384m", "mem_limit: lots"),
        ("secrets: [token]", "secrets: [tokn]"),
    ],
)
def test_what_is_wrong_is_refused(right: str, wrong: str) -> None:
    assert right in TEXT
    with pytest.raises(ValueError, match=r"."):
        check(TEXT.replace(right, wrong))


def test_every_volume_is_declared() -> None:
    """The library does not look."""
    mounted = [
        mount["source"] for service in services().values() for mount in service.get("volumes", ())
    ]
    assert set(mounted) == set(yaml.safe_load(TEXT)["volumes"])


def test_the_agent_has_the_rights_of_the_manifests_and_no_more() -> None:
    agent = services()["dsagent"]
    spec = pod_spec(one(documents("overlays/native"), "Deployment"))
    context = agent_of(spec)["securityContext"]
    assert agent["cap_drop"] == context["capabilities"]["drop"]
    assert agent["cap_add"] == context["capabilities"]["add"]
    assert agent["read_only"] is context["readOnlyRootFilesystem"]
    assert agent["security_opt"] == ["no-new-privileges:true"]
    assert agent["user"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert agent["pid"] == agent["network_mode"] == "service:vllm"
    assert "privileged" not in TEXT
    assert "healthcheck" not in TEXT
    for name in ("vllm", "plugin"):
        assert not {"cap_add", "pid", "privileged"} & set(services()[name])


def test_its_variables_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = services()["dsagent"]
    for name, value in agent["environment"].items():
        assert name.startswith(f"{settings.ENV_PREFIX}_")
        monkeypatch.setenv(name, value)
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    options = read(empty)
    assert options.listen is not None
    assert options.listen == agent["environment"]["DSAGENT_LISTEN"]
    _, port = settings.parse_address(options.listen)
    assert f"127.0.0.1:{port}:{port}" in services()["vllm"]["ports"]
    assert port == ports.METRICS
    assert str(options.guarded_by.token_file) == f"/run/secrets/{agent['secrets'][0]}"


def test_images_and_the_copying_of_the_plug_in_are_the_manifests() -> None:
    own = in_kubernetes("dsagent-plugin")
    tag = own["image"].rpartition(":")[2]
    assert services()["dsagent"]["image"] == services()["plugin"]["image"] == f"dsagent:{tag}"
    assert services()["vllm"]["image"] == in_kubernetes("vllm")["image"]
    (script,) = services()["plugin"]["command"]
    # Compose takes one dollar for a variable of its own.
    assert not re.search(r"(?<!\$)\$(?!\$)", script)
    assert [*services()["plugin"]["entrypoint"], script.replace("$$", "$")] == own["command"]
    (variable,) = in_kubernetes("vllm")["env"]
    assert services()["vllm"]["environment"] == {variable["name"]: variable["value"]}


def test_the_token_is_made_so_that_the_agent_takes_it(tmp_path: Path) -> None:
    (made,) = re.findall(r"^# +sudo (install .*?)  ", TEXT, re.MULTILINE)
    subprocess.run(shlex.split(made), cwd=tmp_path, check=True)
    (file,) = tmp_path.iterdir()
    (declared,) = yaml.safe_load(TEXT)["secrets"].values()
    assert tmp_path / declared["file"] == file
    file.write_text(32 * "a")
    assert Guard(ListenOptions(file)).admits(f"Bearer {32 * 'a'}")

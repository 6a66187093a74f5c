"""What screens advise: a remedy for what held requests up, and a reason said once."""

from __future__ import annotations

import pytest
from typer import BadParameter

from dsagent.agent.app import _message
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.fleet.store import open_store
from dsagent.agent.screens.remedies import REMEDIES
from dsagent.agent.screens.render import page_of
from dsagent.agent.screens.render_checks import probes
from dsagent.agent.screens.wording import remedy, remedy_of_all


def part(cause: str, ns: int) -> dict[str, object]:
    return {"cause": cause, "ns": ns, "evidence": []}


def document(unattributed_ns: int, *parts: dict[str, object]) -> dict[str, object]:
    return {"e2e_ns": 100, "unattributed_ns": unattributed_ns, "parts": parts}


@pytest.mark.parametrize(
    ("parts", "unattributed_ns", "advised"),
    [
        ([part("decode.compute", 60), part("cpu.runqueue", 40)], 0, "cpu.runqueue"),
        ([part("lock.wait", 30), part("cpu.runqueue", 40)], 30, "cpu.runqueue"),
        ([part("cpu.runqueue", 40)], 60, "unattributed"),
        ([part("decode.compute", 97), part("cpu.runqueue", 3)], 0, None),
        ([], 0, None),
    ],
)
def test_a_request_is_advised_on_what_held_it_up_most(
    parts: list[dict[str, object]], unattributed_ns: int, advised: str | None
) -> None:
    expected = "" if advised is None else REMEDIES[advised]
    assert remedy(document(unattributed_ns, *parts)) == expected


def test_many_requests_are_advised_on_what_is_not_their_own_work() -> None:
    causes = [("decode.compute", 0.6), ("io.block", 0.3), ("cpu.irq", 0.1)]
    listed = [{"cause": cause, "ratio": ratio} for cause, ratio in causes]
    assert remedy_of_all(listed) == REMEDIES["io.block"]
    assert remedy_of_all([{"cause": "decode.compute", "ratio": 1.0}]) == ""
    assert remedy_of_all([{"cause": "cpu.irq", "ratio": 0.04}]) == ""


def test_a_reason_that_probes_share_is_said_once() -> None:
    one = {"state": "unavailable", "tier": "core", "cost_ns": None, "measures": "time"}
    listed = [
        {**one, "name": "cpu.oncpu", "reason": "not permitted"},
        {**one, "name": "cpu.tick", "reason": "not permitted"},
        {**one, "name": "off.futex", "reason": "no such tracepoint"},
    ]
    page = page_of(probes({"probes": listed}))
    assert page.count("not permitted") == 1
    assert "2 of them: not permitted" in page
    assert page.count("no such tracepoint") == 1


def test_a_store_that_is_asked_must_be_there(tmp_path: object) -> None:
    name = f"{tmp_path}/none"
    with pytest.raises(DsagentError, match="no store there") as raised:
        open_store(name, must_exist=True)
    assert raised.value.exit_code == USAGE
    assert open_store(name).url == name  # `roll` makes it


def test_the_words_of_the_library_are_not_shown() -> None:
    wrong = BadParameter("Value error, 'speed' is not one of 'ttft', 'tpot'.")
    assert _message(wrong) == ("Invalid value: 'speed' is not one of 'ttft', 'tpot'.", USAGE)

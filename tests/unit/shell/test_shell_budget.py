"""Stepping down and up, by simulated windows of the overhead meter."""

from __future__ import annotations

import pytest

from dsagent.agent.session.budget import CALM_WINDOWS, CALM_WINDOWS_MAX, Action, Budget, Level
from dsagent.agent.session.overhead import Window

MAX = 0.01
# What the programs of each level take for each switch a second.
PRICES: dict[Level, float] = {"off": 0.0, "core": 1e-6, "default": 2e-6, "full": 4e-6}


class Machine:
    """Windows of a machine that switches so often, watched at the level that the budget says."""

    def __init__(self, tier: Level = "default") -> None:
        assert tier != "off"
        self.budget = Budget(MAX, tier)
        self.prices = dict(PRICES)
        self.hooks_ratio = 0.0
        self.own_ratio = 0.0  # guessed, where the kernel source does not run

    def window(self, switches_per_s: float) -> Action:
        level = self.budget.level
        kernel = self.prices[level] * switches_per_s
        own = self.own_ratio if level == "off" else 0.0
        ratio = kernel + own + self.hooks_ratio
        window = Window(ratio, kernel, own, self.hooks_ratio, switches_per_s)
        return self.budget.judge(window, runs=level != "off").action

    def until(self, action: Action, switches_per_s: float) -> int:
        """How many windows it takes."""
        for count in range(1, 1000):
            if self.window(switches_per_s) == action:
                return count
        raise AssertionError(f"never: {action}")


def test_it_is_patient_and_steps_down_one_level_at_a_time() -> None:
    machine = Machine("full")
    assert machine.window(4000) == "look more rarely"  # 1.6 %
    assert machine.window(100) == "go on"  # bad luck
    assert machine.window(4000) == "look more rarely"
    assert machine.window(4000) == "step down"
    assert machine.budget.level == "default"
    assert machine.window(4000) == "go on"  # 0.8 %
    assert [machine.window(20_000) for _ in range(4)][1::2] == ["step down", "step down"]
    assert machine.budget.level == "off"
    assert machine.window(20_000) == "go on"


def test_where_the_programs_are_not_what_costs_it_says_so_once() -> None:
    machine = Machine()
    machine.hooks_ratio = 0.02
    assert machine.window(1000) == "look more rarely"
    assert machine.window(1000) == "say so"
    assert machine.window(1000) == "look more rarely"
    # They grew dear only later: more than the first two windows are judged.
    assert machine.window(6000) == "step down"
    assert machine.window(100) == "look more rarely"
    machine.hooks_ratio = 0.0
    assert machine.window(100) == "go on"
    machine.hooks_ratio = 0.02
    assert machine.window(100) == "look more rarely"
    assert machine.window(100) == "say so"


def test_a_source_that_does_not_run_cannot_be_stepped_down() -> None:
    budget = Budget(MAX, "default")
    window = Window(0.02, 0.0, 0.02, 0.0, 100.0)
    actions = [budget.judge(window, runs=False).action for _ in range(4)]
    assert actions == ["look more rarely", "say so", "look more rarely", "look more rarely"]
    assert budget.level == "default"


def test_it_steps_up_when_the_tier_above_would_have_fitted_for_a_while() -> None:
    machine = Machine()
    machine.until("step down", 8000)
    assert machine.budget.level == "core"
    # Within the limit as it is, but the tier above would cost 1.2 %, or too near to 1 %.
    for _ in range(3 * CALM_WINDOWS):
        assert machine.window(6000) == "go on"
        assert machine.window(4500) == "go on"
    assert machine.until("step up", 2000) == CALM_WINDOWS
    assert machine.budget.level == "default"
    assert machine.until("relax", 2000) == CALM_WINDOWS  # never beyond what was asked for
    assert machine.budget.level == "default"


def test_a_busy_window_begins_the_while_anew() -> None:
    machine = Machine()
    machine.until("step down", 8000)
    for _ in range(CALM_WINDOWS - 1):
        machine.window(2000)
    assert machine.window(6000) == "go on"
    assert machine.until("step up", 2000) == CALM_WINDOWS


def test_what_a_step_up_will_cost_is_predicted() -> None:
    machine = Machine()
    machine.hooks_ratio = 0.001
    machine.until("step down", 8000)
    for _ in range(CALM_WINDOWS - 1):
        machine.window(2000)
    window = Window(0.003, 0.002, 0.0, 0.001, 2000.0)
    verdict = machine.budget.judge(window, runs=True)
    assert verdict.action == "step up"
    assert verdict.predicted_ratio == pytest.approx(2000 * PRICES["default"] + 0.001)


def test_from_off_it_comes_back_even_if_our_own_cpu_time_is_only_guessed() -> None:
    """Where the source does not run, all of our CPU time counts, which it would not do then."""
    machine = Machine()
    machine.own_ratio = 0.02
    machine.until("step down", 20_000)
    machine.until("step down", 20_000)
    assert machine.budget.level == "off"
    assert machine.until("step up", 1000) == CALM_WINDOWS
    assert machine.budget.level == "core"


def test_each_attempt_in_vain_doubles_the_while_up_to_a_limit() -> None:
    machine = Machine()
    machine.until("step down", 8000)
    machine.prices["default"] = 1e-5  # dearer than it was when it ran: each prediction is wrong
    machine.budget._prices["default"] = PRICES["default"]
    waited = []
    for _ in range(7):
        waited.append(machine.until("step up", 2000))
        assert machine.until("step down", 2000) == 2
        machine.budget._prices["default"] = PRICES["default"]
    assert waited == [min(CALM_WINDOWS * 2**n, CALM_WINDOWS_MAX) for n in range(7)]


def test_one_that_lasted_does_not() -> None:
    machine = Machine()
    machine.until("step down", 8000)
    machine.until("step up", 2000)
    for _ in range(4 * CALM_WINDOWS):
        machine.window(2000)
    machine.until("step down", 8000)
    assert machine.until("step up", 2000) == CALM_WINDOWS


def test_what_costs_too_much_without_the_kernel_source_is_not_looked_at_more_often() -> None:
    """It never ran, so there is nothing to switch: only how often we look can give."""
    budget = Budget(MAX, "default")
    dear = Window(0.02, 0.0, 0.02, 0.0, 1000)
    actions = [budget.judge(dear, runs=False).action for _ in range(3 * CALM_WINDOWS)]
    assert actions[:2] == ["look more rarely", "say so"]
    assert set(actions[2:]) == {"look more rarely"}
    cheap = Window(0.001, 0.0, 0.001, 0.0, 1000)
    actions = [budget.judge(cheap, runs=False).action for _ in range(CALM_WINDOWS)]
    assert actions == ["go on"] * (CALM_WINDOWS - 1) + ["relax"]

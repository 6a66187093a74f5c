"""Acts on the budget's verdicts: the kernel source looks at less or more, and it is said."""

from __future__ import annotations

from dsagent.agent.facts import Event
from dsagent.agent.probes import Tier, probes_of
from dsagent.agent.session.budget import Action, Budget, Level
from dsagent.agent.session.feeds import Feeds
from dsagent.agent.session.overhead import Window

_LOOKS = "the kernel source looks at tier {}"


class Stepping:
    """Keeps the cost of looking within `max_ratio` of the target's time."""

    def __init__(self, feeds: Feeds, max_ratio: float, tier: Tier) -> None:
        self._feeds = feeds
        self._max_ratio = max_ratio
        self._asked = tier
        self._budget = Budget(max_ratio, tier)

    @property
    def not_looked_at(self) -> tuple[str, ...]:
        """Of what was asked for: the probes that the tier has not, or the whole source."""
        level = self._budget.level
        if level == "off":
            return ("kernel",)
        return tuple(sorted(probes_of(self._asked) - probes_of(level)))

    def look_again(self) -> bool:
        """Somebody else had switched the kernel source off; whether it runs again. It does not
        where it was off by the budget, or was never wanted."""
        level = self._budget.level
        if level == "off":
            return False
        self._look_at(level, "")
        return self._feeds.feed("kernel").runs

    def judge(self, window: Window, now_ns: int) -> tuple[Action, list[Event]]:
        """After each window of the overhead meter."""
        kernel = self._feeds.feed("kernel")
        before = self._budget.level
        verdict = self._budget.judge(window, runs=kernel.runs)
        cost = f"overhead is {window.ratio:.2%}, --max-overhead {self._max_ratio:.2%}"
        match verdict.action:
            case "step down":
                state = self._look_at(verdict.level, f"stepped down from {before}: {cost}")
                name, message = "agent.over_budget", f"{state}: {cost}"
            case "step up":
                assert verdict.predicted_ratio is not None
                expected = f"expected to cost {verdict.predicted_ratio:.2%}"
                back = "" if verdict.level == self._asked else f"back up from {before}: {expected}"
                state = self._look_at(verdict.level, back)
                name, message = "agent.within_budget", f"{state} again: {expected}; {cost}"
            case "say so":
                name = "agent.over_budget"
                message = f"{cost}, and nothing that could be switched off would mend it"
            case _:
                return verdict.action, []
        return verdict.action, [Event(name, now_ns, message)]

    def _look_at(self, level: Level, why: str) -> str:
        """Has the kernel source do so; says what it does then."""
        if level == "off":
            self._feeds.kernel_off(why)
            return "source kernel is off"
        reason = f"tier {level}, {why}" if why else ""
        self._feeds.kernel_look_at(level, reason)
        kernel = self._feeds.feed("kernel")
        return _LOOKS.format(level) if kernel.runs else f"source kernel: {kernel.status().reason}"

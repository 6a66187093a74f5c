"""What is run in a vLLM process: puts the hooks in, or takes them out. Both may be run twice."""

from __future__ import annotations

from dsagent.agent.inject.bundle import PACKAGE, bundle

# Where the hooks that were injected are kept in the target: an attribute of `sys` that no program
# could name by chance.
_PLACE = "dsagent.injected"

THERE_ALREADY = "there already"
NOTHING_HERE = "nothing to hook"
NOT_INJECTED = "nothing was injected"

_PUT = """
import sys
plugin = sys.modules.get({plugin!a})
if {place!a} in sys.__dict__ or getattr(plugin, "_installed", None):
    REPORT = {there!a}
else:
    installation = BUNDLE["vllm"].install()
    try:
        if installation.patches.installed:
            for name in {roles!a}:
                installation.open(BUNDLE["layout"].Role[name])
            sys.__dict__[{place!a}] = installation
            REPORT = str(len(installation.patches.installed)) + " hooks"
        else:
            installation.remove()
            REPORT = {nothing!a}
    except BaseException:
        installation.remove()
        raise
"""

_TAKE = """
import sys
installation = sys.__dict__.pop({place!a}, None)
if installation is None:
    REPORT = {absent!a}
else:
    count = len(installation.patches.installed)
    installation.remove()
    REPORT = str(count) + " hooks"
    if installation.failures:
        REPORT += ", " + str(installation.failures) + " failures"
"""


def bundled() -> str:
    """Our modules alone: nothing is put in."""
    return bundle((("vllm", "install"), ("layout", "Role")))


def source_to_put(roles: tuple[str, ...]) -> str:
    """`roles`: of the rings that the process is to have before the first request."""
    return bundled() + _PUT.format(
        plugin=f"{PACKAGE}.vllm",
        place=_PLACE,
        there=THERE_ALREADY,
        nothing=NOTHING_HERE,
        roles=tuple(roles),
    )


def source_to_take() -> str:
    return _TAKE.format(place=_PLACE, absent=NOT_INJECTED)

"""An attached session in a thread of the test's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dsagent.agent.errors import DsagentError
from dsagent.agent.facts import Target
from dsagent.agent.session.ledger import FOREVER_NS
from dsagent.agent.session.loop import Session

_LONGEST_S = 60.0
T = TypeVar("T")


class Watching:
    """Attached from entering to leaving; then `document` is the summary."""

    def __init__(self, target: Target) -> None:
        self._attached = threading.Event()
        self.session = Session(target, on_attached=self._attached.set)
        self.document: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.document = self.session.run()
        except BaseException as error:  # noqa: BLE001 - told where it is waited for
            self._error = error
        finally:
            self._attached.set()

    def __enter__(self) -> Watching:
        self._thread.start()
        self._attached.wait(_LONGEST_S)
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> dict[str, Any]:
        self.session.stop()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.document

    def explain(self, wanted: str) -> dict[str, Any]:
        """The account of a request that has ended, once it is made."""
        return until(lambda: self._explain(wanted), f"no account of {wanted}")

    def _explain(self, wanted: str) -> dict[str, Any] | None:
        try:
            return self.session.ledger.explain(
                wanted, now_ns=time.monotonic_ns(), last_ns=FOREVER_NS
            )
        except DsagentError:
            return None


def until(look: Callable[[], T | None], what: str) -> T:
    """What `look` finds, as soon as it finds something."""
    end = time.monotonic() + _LONGEST_S
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(what)

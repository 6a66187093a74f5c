"""What happens in one round: a few faults, drawn by chance, each over before the next begins."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.cpu import run_hogs
from faults.stops import stop_for
from sidecar_lab import until
from soak_back_ends import OtlpReceiver
from soak_crowd import Crowd, Manner
from soak_pod import Pod, Server

LONG_WORDS = 250  # of tiny-llama's 2,048 tokens, each a byte


@dataclass(slots=True)
class Scene:
    """What faults are done to. `settings` writes the settings file with that limit of overhead."""

    pod: Pod
    crowd: Crowd
    receiver: OtlpReceiver
    settings: Path
    write_settings: Callable[[str], None]
    dice: random.Random

    @property
    def server(self) -> Server:
        return self.dice.choice(self.pod.servers)


Fault = Callable[[Scene], None]


def stopped(scene: Scene) -> None:
    stop_for(scene.server.target, scene.dice.uniform(0.1, 0.8))


def cpu_hog(scene: Scene) -> None:
    run_hogs(os.sched_getaffinity(0), scene.dice.uniform(0.5, 1.5), 0)


def long_prefills(scene: Scene) -> None:
    server = scene.server
    guests = [
        scene.crowd.guest(server.target, LONG_WORDS, 2, scene.dice, Manner())
        for _ in range(scene.dice.randint(2, 5))
    ]
    for guest in guests:
        guest.join(60)


def slow_client(scene: Scene) -> None:
    manner = Manner(pause_s=scene.dice.uniform(0.5, 2.0))
    scene.crowd.guest(scene.server.target, 8, 400, scene.dice, manner).join(60)


def clients_leave(scene: Scene) -> None:
    server = scene.server
    for _ in range(5):
        manner = Manner(leaves_after=scene.dice.randint(1, 6))
        scene.crowd.guest(server.target, 8, 200, scene.dice, manner).join(60)


def back_end_gone(scene: Scene) -> None:
    with scene.receiver.outage():
        time.sleep(scene.dice.uniform(1.0, 6.0))


def engine_restarts(scene: Scene) -> None:
    scene.server.restart(signal.SIGTERM)


def engine_killed(scene: Scene) -> None:
    scene.server.restart(signal.SIGKILL)


def settings_again(scene: Scene) -> None:
    """Nothing has changed: no engine is let go of."""
    _reload(scene, "settings.reloaded")


def settings_wrong(scene: Scene) -> None:
    right = scene.settings.read_text()
    scene.settings.write_text(right + 'max_overheat = "1%"\n')
    _reload(scene, "settings.refused")
    scene.settings.write_text(right)
    _reload(scene, "settings.reloaded")


def settings_changed(scene: Scene) -> None:
    """All engines are attached to anew."""
    scene.pod.let_go_ns.append(time.monotonic_ns())
    scene.write_settings(f"{scene.dice.randint(400, 500) / 10}%")
    _reload(scene, "settings.reloaded")


def _reload(scene: Scene, event: str) -> None:
    def times() -> int:
        return sum(line["event"] == event for line in scene.pod.log)

    before = times()
    scene.pod.sidecar.signal(signal.SIGHUP)
    until(lambda: times() > before, f"{event} after SIGHUP")


# One of each before any comes again.
FAULTS: tuple[Fault, ...] = (
    *(engine_killed, long_prefills, back_end_gone, engine_restarts, slow_client, stopped),
    *(settings_again, clients_leave, engine_killed, cpu_hog, settings_changed, settings_wrong),
)


class Deck:
    """Faults in a shuffled order, again and again; `done` counts them by name."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._left: list[Fault] = []
        self.done: dict[str, int] = {fault.__name__: 0 for fault in FAULTS}

    def draw(self) -> Fault:
        if not self._left:
            self._left = list(FAULTS)
            self._dice.shuffle(self._left)
        fault = self._left.pop()
        self.done[fault.__name__] += 1
        return fault

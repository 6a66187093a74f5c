"""The NVML source on the real pynvml and a libnvidia-ml.so.1 without hardware.

The stub has the real library's ABI and reads what it answers from a file, so a
test changes the hardware by writing that file. No test judges a speed; waiting
is for a condition, with a deadline far off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsagent.agent.metrics.catalog import GPU_METRICS

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "nvml_stub"
DEADLINE_S = 30.0
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 4, 9, 15, 999

H200 = "GPU-5d5ba0d6-d33d-4b2c-8a1c-9f6a1c0b0001"
ONE_GPU = {
    "driver": "570.86.15",
    "count": "1",
    "0.uuid": H200,
    "0.name": "NVIDIA H200",
    "0.mig": "0",
    "0.nvmlDeviceGetUtilizationRates": "37",
    "0.memory.total": "150754820096",
    "0.memory.used": "75377410048",
    "0.memory.reserved": "500000000",
    "0.nvmlDeviceGetPowerUsage": "312500",
    "0.nvmlDeviceGetEnforcedPowerLimit": "700000",
    "0.nvmlDeviceGetTotalEnergyConsumption": "123456789",
    "0.nvmlDeviceGetClockInfo.1": "1980",
    "0.nvmlDeviceGetClockInfo.2": "3201",
    "0.nvmlDeviceGetMaxClockInfo.1": "1985",
    "0.nvmlDeviceGetMaxClockInfo.2": "3201",
    "0.temperature": "61",
    "0.nvmlDeviceGetCurrentClocksEventReasons": "0x45",
    "0.nvmlDeviceGetSupportedClocksEventReasons": "0x1e5",
}
# What a driver before R535 says instead.
OLD_REASONS = {
    "0.nvmlDeviceGetCurrentClocksThrottleReasons": "0x45",
    "0.nvmlDeviceGetSupportedClocksThrottleReasons": "0x1e5",
}
Wanted = dict[tuple[str, str], Any]  # numbers, some of them approximate


def compiled(folder: Path, *options: str) -> Path:
    """The folder that holds a freshly compiled libnvidia-ml.so.1."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [
            *("gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *options),
            *("-o", str(library), str(FOLDER / "nvml_stub.c")),
        ],
        check=True,
    )
    return folder


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml_old"), "-DOLD_DRIVER")


class Child:
    """The source in its own process, and the hardware that it sees."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.process = process
        self.samples: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def hardware(self, *parts: dict[str, str]) -> None:
        """Replaces what the stub answers, in one piece."""
        write_hardware(self.folder, *parts)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().split()

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the child is gone: {self.process.wait(5)}"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def poll(self) -> list[dict[str, Any]]:
        answer = self.ask("poll")
        self.samples += answer["samples"]
        self.events += answer["events"]
        return list(answer["samples"])

    def until(self, what: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < deadline_s, self.ask("status")
            time.sleep(0.02)

    def until_state(self, state: str, reason: str = "") -> dict[str, Any]:
        def there() -> bool:
            status = self.ask("status")
            return status["state"] == state and reason in status["reason"]

        self.until(there)
        return self.ask("status")

    def fresh(self) -> list[dict[str, Any]]:
        """At least one whole round that began after this call."""
        self.poll()
        begun_ns = time.monotonic_ns()
        got: list[dict[str, Any]] = []

        def enough() -> bool:
            got.extend(s for s in self.poll() if s["mono_ns"] > begun_ns)
            return any(s["mono_ns"] > got[0]["mono_ns"] + 40_000_000 for s in got) if got else False

        self.until(enough)
        return got


def write_hardware(folder: Path, *parts: dict[str, str]) -> None:
    lines: list[str] = []
    for key, value in {k: v for part in parts for k, v in part.items()}.items():
        lines += [f"{key} {one}" for one in value.split("\n")]
    (folder / "new").write_text("\n".join(lines) + "\n")
    (folder / "new").rename(folder / "hardware")


Start = Callable[..., Child]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def begin(
        library: Path | None,
        *parts: dict[str, str],
        wrapper: tuple[str, ...] = (),
        uuids: tuple[str, ...] = (),
        target: str | None = None,
        interval_s: float = 0.05,
    ) -> Child:
        write_hardware(tmp_path, *parts)
        environment = {
            **os.environ,
            "NVML_STUB_SCENARIO": str(tmp_path / "hardware"),
            "NVML_STUB_CALLS": str(tmp_path / "calls"),
        }
        if library is not None:
            environment["LD_LIBRARY_PATH"] = str(library)
        arguments = (target or str(os.getpid()), str(interval_s), *uuids)
        process = subprocess.Popen(
            [*wrapper, sys.executable, "-W", "error", str(FOLDER / "child.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        children.append(process)
        return Child(tmp_path, process)

    yield begin
    for process in children:
        process.kill()
        process.communicate()


def values(samples: list[dict[str, Any]], device: str = H200) -> Wanted:
    """The first value of each metric of a device, by name and by what tells its samples apart."""
    found: Wanted = {}
    for sample in samples:
        attributes = sample["attributes"]
        if attributes["hw.id"] == device:
            kind = attributes.get("clock") or attributes.get("reason") or ""
            found.setdefault((sample["name"], kind), sample["value"])
    return found


def started(child: Child) -> Child:
    answer = child.ask("start")
    assert "unavailable" not in answer, answer
    child.until(lambda: bool(child.poll()))
    return child


ALL_OF_ONE_GPU: Wanted = {
    ("hw.gpu.utilization", ""): pytest.approx(0.37),
    ("hw.gpu.memory.usage", ""): 75377410048,
    ("hw.gpu.memory.limit", ""): 150754820096,
    ("hw.gpu.memory.utilization", ""): 0.5,
    ("hw.power", ""): pytest.approx(312.5),
    ("dsagent.gpu.power.limit", ""): pytest.approx(700),
    ("hw.energy", ""): pytest.approx(123456.789),
    ("dsagent.gpu.clock", "sm"): pytest.approx(1.98e9),
    ("dsagent.gpu.clock", "memory"): pytest.approx(3.201e9),
    ("dsagent.gpu.clock.limit", "sm"): pytest.approx(1.985e9),
    ("dsagent.gpu.clock.limit", "memory"): pytest.approx(3.201e9),
    ("hw.temperature", ""): 61,
    # 0x45: idle, power cap, thermal; known: 0x1e5. What the device does not know is not there.
    ("dsagent.gpu.throttled", "power_cap"): 1,
    ("dsagent.gpu.throttled", "hw_thermal"): 1,
    ("dsagent.gpu.throttled", "sw_thermal"): 0,
    ("dsagent.gpu.throttled", "power_brake"): 0,
    ("dsagent.gpu.processes", ""): 0,
}


def test_every_field_with_its_unit(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU))
    assert values(one.samples) == ALL_OF_ONE_GPU
    assert one.ask("status")["state"] == "ok"
    assert one.samples[0]["attributes"] == {
        "hw.id": H200,
        "hw.type": "gpu",
        "hw.name": "NVIDIA H200",
        "hw.vendor": "NVIDIA",
        "hw.driver_version": "570.86.15",
    }


def test_every_sample_is_in_the_catalogue(child: Start, stub: Path) -> None:
    """Name and attributes: what is not there would be exported nowhere."""
    one = started(child(stub, ONE_GPU, {"0.process": f"{os.getpid()} 1024"}))
    catalogue = {metric.name: set(metric.attributes) for metric in GPU_METRICS}
    assert len({sample["name"] for sample in one.samples}) == 13
    for sample in one.samples:
        assert set(sample["attributes"]) <= catalogue[sample["name"]], sample


def test_an_older_driver_is_asked_in_its_own_words(child: Start, old_stub: Path) -> None:
    one = started(child(old_stub, ONE_GPU, OLD_REASONS))
    reserved_too = 75377410048 + 500000000  # the old call counts it as used
    assert values(one.samples) == {
        **ALL_OF_ONE_GPU,
        ("hw.gpu.memory.usage", ""): reserved_too,
        ("hw.gpu.memory.utilization", ""): pytest.approx(reserved_too / 150754820096),
    }


def test_what_is_not_supported_is_absent_and_not_asked_again(child: Start, stub: Path) -> None:
    without = {
        key: value
        for key, value in ONE_GPU.items()
        if "Energy" not in key and "Utilization" not in key and "temperature" not in key
    }
    one = started(child(stub, without))
    one.fresh()
    expected = {
        key: value
        for key, value in ALL_OF_ONE_GPU.items()
        if key[0] not in ("hw.energy", "hw.gpu.utilization", "hw.temperature")
    }
    assert values(one.samples) == expected
    assert one.calls().count("0.nvmlDeviceGetTotalEnergyConsumption") == 1
    assert one.calls().count("0.nvmlDeviceGetTemperature") == 1
    assert one.calls().count("0.nvmlDeviceGetPowerUsage") >= 2
    status = one.ask("status")
    assert status["state"] == "ok"
    assert "energy (Not Supported)" in status["reason"]


@pytest.mark.parametrize(
    ("key", "value", "metric"),
    [
        ("0.nvmlDeviceGetPowerUsage", str(0xFFFFFFFF), "hw.power"),
        ("0.nvmlDeviceGetTotalEnergyConsumption", str(0xFFFFFFFFFFFFFFFF), "hw.energy"),
        ("0.nvmlDeviceGetUtilizationRates", "4711", "hw.gpu.utilization"),
        ("0.memory.total", "0", "hw.gpu.memory.utilization"),
        ("0.memory.used", "150754820097", "hw.gpu.memory.usage"),
    ],
)
def test_a_value_that_cannot_be_is_absent(
    child: Start, stub: Path, key: str, value: str, metric: str
) -> None:
    one = started(child(stub, ONE_GPU, {key: value}))
    found = {name for name, _ in values(one.samples)}
    assert metric not in found
    assert "hw.temperature" in found


def test_a_zero_that_was_measured_is_there(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU, {"0.nvmlDeviceGetUtilizationRates": "0"}))
    assert values(one.samples)[("hw.gpu.utilization", "")] == 0


def test_of_a_reason_that_may_not_be_known_nothing_is_said(child: Start, stub: Path) -> None:
    mask = {"0.nvmlDeviceGetSupportedClocksEventReasons.error": str(NOT_SUPPORTED)}
    one = started(child(stub, ONE_GPU, mask))
    throttled = {kind: v for (name, kind), v in values(one.samples).items() if "throttled" in name}
    assert throttled == {"power_cap": 1, "hw_thermal": 1}


def test_a_read_that_fails_once_is_counted_and_made_again(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU))
    one.hardware(ONE_GPU, {"0.nvmlDeviceGetPowerUsage.error": str(UNKNOWN)})
    one.until(lambda: one.ask("status")["dropped"] > 0)
    assert one.ask("status")["state"] == "ok"
    one.hardware(ONE_GPU, {"0.nvmlDeviceGetPowerUsage": "99000"})
    one.until(lambda: any(s["name"] == "hw.power" and s["value"] == 99 for s in one.poll()))


def test_lost_while_running_it_says_so_and_comes_back(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU))
    one.hardware(ONE_GPU, {"every.error": str(UNKNOWN)})
    status = one.until_state("failed", "Unknown Error")
    assert H200 in status["reason"]
    one.hardware(ONE_GPU)
    one.until_state("ok")
    assert values(one.fresh())[("hw.temperature", "")] == 61
    assert [event["name"] for event in one.events] == ["source.failed", "source.ok"]
    calls = one.calls()
    assert calls.count("nvmlInit") == calls.count("nvmlShutdown") + 1


def test_a_driver_that_is_unloaded_is_tried_less_and_less_often(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU))
    gone = {"every.error": str(DRIVER_NOT_LOADED), "nvmlInit.error": str(DRIVER_NOT_LOADED)}
    one.hardware(ONE_GPU, gone)
    one.until_state("failed", "Driver Not Loaded")
    one.until(lambda: one.calls().count("nvmlInit") >= 3)
    assert one.ask("status")["state"] == "failed"


def test_of_two_devices_the_one_that_is_well_goes_on(child: Start, stub: Path) -> None:
    two = {
        **ONE_GPU,
        "count": "2",
        **{"1" + key[1:]: value for key, value in ONE_GPU.items() if key.startswith("0.")},
        "1.uuid": "GPU-two",
    }
    one = started(child(stub, two))
    one.hardware(two, {"1.every.error": str(GPU_IS_LOST)})
    status = one.until_state("ok", "GPU-two: GPU is lost")
    assert status["state"] == "ok"
    left = one.fresh()
    assert values(left)[("hw.temperature", "")] == 61
    assert values(left, "GPU-two") == {}
    one.hardware(two)
    one.until(lambda: values(one.poll(), "GPU-two") != {})


def test_only_the_devices_of_the_target(child: Start, stub: Path) -> None:
    two = {**ONE_GPU, "count": "2", "1.uuid": "GPU-two", "1.temperature": "44"}
    one = started(child(stub, two, uuids=("GPU-two",)))
    assert {sample["attributes"]["hw.id"] for sample in one.samples} == {"GPU-two"}


MIG = {
    **ONE_GPU,
    "0.mig": "1",
    "0.mig.0.uuid": "MIG-a",
    "0.mig.0.name": "NVIDIA H200 MIG 1g.18gb",
    "0.mig.0.memory.total": "18000000000",
    "0.mig.0.memory.used": "9000000000",
    "0.mig.3.uuid": "MIG-b",
    "0.mig.3.memory.total": "18000000000",
    "0.mig.3.memory.used": "0",
}


def test_slices_speak_for_themselves(child: Start, stub: Path) -> None:
    one = started(child(stub, MIG))
    assert values(one.samples, "MIG-a") == {
        ("hw.gpu.memory.usage", ""): 9000000000,
        ("hw.gpu.memory.limit", ""): 18000000000,
        ("hw.gpu.memory.utilization", ""): 0.5,
        ("dsagent.gpu.processes", ""): 0,
    }
    assert values(one.samples, "MIG-b")[("hw.gpu.memory.usage", "")] == 0
    parent = {name for name, _ in values(one.samples)}
    assert "hw.power" in parent
    assert "hw.gpu.memory.usage" not in parent  # the slices have said it


def test_a_parent_that_does_not_say_who_it_is_does_not_hide_its_slices(
    child: Start, stub: Path
) -> None:
    one = started(child(stub, MIG, {"0.nvmlDeviceGetUUID.error": str(NO_PERMISSION)}))
    assert {sample["attributes"]["hw.id"] for sample in one.samples} == {"MIG-a", "MIG-b"}
    assert one.ask("status")["reason"].startswith("device 0: Insufficient Permissions")


def test_a_parent_that_may_not_be_asked_is_absent(child: Start, stub: Path) -> None:
    ours = {key: value for key, value in MIG.items() if not key.startswith("0.nvml")}
    fields = ["PowerUsage", "TotalEnergyConsumption", "UtilizationRates"]
    fields += ["TemperatureV", "Temperature"]
    denied = {f"0.nvmlDeviceGet{name}.error": str(NO_PERMISSION) for name in fields}
    one = started(child(stub, ours, denied))
    one.fresh()
    assert values(one.samples) == {}
    assert ("hw.gpu.memory.usage", "") in values(one.samples, "MIG-a")
    status = one.ask("status")
    assert status["state"] == "ok"
    assert status["dropped"] == 0
    assert "power (Insufficient Permissions)" in status["reason"]
    assert one.calls().count("0.nvmlDeviceGetPowerUsage") == 1


def test_the_targets_processes_are_claimed(child: Start, stub: Path) -> None:
    """The child is below the target, which is this process; pid 1 is not, and 4194304 is nobody."""
    one = child(stub, ONE_GPU)
    rows = f"{one.process.pid} 1000\n{os.getpid()} 200\n1 50000\n4194304 70000"
    one.hardware(ONE_GPU, {"0.process": rows})
    started(one)
    found = values(one.samples)
    assert found[("dsagent.gpu.processes", "")] == 4
    assert found[("dsagent.gpu.target.memory.usage", "")] == 1200


def test_memory_that_the_driver_does_not_tell_is_not_summed(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU, {"0.process": f"{os.getpid()} {0xFFFFFFFFFFFFFFFF}"}))
    found = values(one.samples)
    assert found[("dsagent.gpu.processes", "")] == 1
    assert ("dsagent.gpu.target.memory.usage", "") not in found


@pytest.mark.skipif(os.geteuid() != 0, reason="a new pid namespace needs root")
def test_in_a_container_no_pid_is_claimed(child: Start, stub: Path) -> None:
    """There the target's pid 1 is another process than the host's 1, which NVML names."""
    wrapper = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    one = started(child(stub, ONE_GPU, {"0.process": "1 1000"}, wrapper=wrapper, target="1"))
    found = values(one.samples)
    assert found[("dsagent.gpu.processes", "")] == 1
    assert ("dsagent.gpu.target.memory.usage", "") not in found


def test_a_call_that_hangs_shows_as_lagging_and_blocks_nobody(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU))
    one.hardware(ONE_GPU, {"0.nvmlDeviceGetPowerUsage.hang": "1"})
    status = one.until_state("lagging", "NVML has not answered for")
    assert status["lag_ns"] > 2_000_000_000
    # The stub hangs until the file changes, so an answer at all shows that nothing waits for it.
    assert one.ask("poll")["events"] == []
    one.hardware(ONE_GPU)
    one.until_state("ok")
    assert values(one.fresh()) != {}


def test_a_driver_that_hangs_at_the_start(child: Start, stub: Path) -> None:
    one = child(stub, ONE_GPU, {"nvmlInit.hang": "1"})
    assert "unavailable" not in one.ask("start")
    one.until_state("lagging")
    one.ask("stop")  # returns though the call does not
    assert one.ask("poll")["samples"] == []


def test_readings_that_nobody_takes_are_bounded_and_counted(child: Start, stub: Path) -> None:
    one = child(stub, ONE_GPU, interval_s=0.001)
    one.ask("start")
    one.until(lambda: one.ask("status")["dropped"] > 0)
    held = one.poll()
    assert len({sample["mono_ns"] for sample in held if sample["name"] == "hw.power"}) <= 64


@pytest.mark.parametrize(
    ("hardware", "reason"),
    [
        ({"nvmlInit.error": str(DRIVER_NOT_LOADED)}, "NVML does not start: Driver Not Loaded"),
        ({"count": "0"}, "NVML does not start: it knows no such device"),
        (
            {"0.nvmlDeviceGetHandleByIndex_v2.error": str(GPU_IS_LOST)},
            "NVML does not start: device 0: GPU is lost",
        ),
    ],
)
def test_where_it_cannot_run_it_says_why(
    child: Start, stub: Path, hardware: dict[str, str], reason: str
) -> None:
    assert child(stub, ONE_GPU, hardware).ask("start")["unavailable"] == reason


def test_without_a_library_it_says_so(child: Start, tmp_path: Path) -> None:
    """A library that is none stands before any real one in the linker's path."""
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    answer = child(tmp_path, ONE_GPU).ask("start")
    assert answer["unavailable"].startswith("no NVIDIA driver here (")


def test_stopping_shuts_nvml_down_and_may_be_repeated(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU))
    one.ask("stop")
    one.ask("stop")
    calls = one.calls()
    assert calls[-1] == "nvmlShutdown"
    assert calls.count("nvmlInit") == calls.count("nvmlShutdown") == 1


def test_names_from_the_driver_are_escaped(child: Start, stub: Path) -> None:
    one = started(child(stub, ONE_GPU, {"0.name": "GPU \x1b[31mred"}))
    assert one.samples[0]["attributes"]["hw.name"] == "GPU \\x1b[31mred"

"""What NVML says of each device, one field at a time; what it does not say stays absent.

Every call here may block for as long as the driver likes: nvml.py makes them
in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml  # type: ignore[import-untyped]

from dsagent.agent.facts import Sample
from dsagent.agent.host.procfs import escape

MAX_DEVICES = 64  # no machine has more; a count beyond it is not believed
MAX_MIG_DEVICES = 8  # of one device; the hardware's limit is 7
MAX_PROCESSES = 256
_UINT_MISSING = 0xFFFFFFFF  # NVML's own "not available"
_ULONGLONG_MISSING = 0xFFFFFFFFFFFFFFFF

# This field does not exist on this device, driver or version of the binding, now or later.
_ABSENT = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
_DEVICE_LOST = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
_LIBRARY_LOST = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)

# Bits of the clocks' event reasons that hold clocks back (idling and display settings do not).
THROTTLE_REASONS = {
    "clocks_setting": 0x2,
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
    "board_limit": 0x200,
    "reliability": 0x400,
}


class NvmlLost(Exception):  # noqa: N818
    """NVML as a whole does not answer any more, or never did; the text says why."""


Value = tuple[str, float, Mapping[str, str]]  # metric, value in the catalogue's unit, attributes
Reader = Callable[[Any], Iterator[Value]]  # takes NVML's handle of the device


def _value(metric: str, number: int, *, scale: float = 1.0, **attributes: str) -> Iterator[Value]:
    if number not in (_UINT_MISSING, _ULONGLONG_MISSING):
        yield metric, number * scale, attributes


def _utilization(handle: Any) -> Iterator[Value]:
    # Says only that some kernel ran in this share of the driver's last sample period.
    percent = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    if percent <= 100:
        yield from _value("hw.gpu.utilization", percent, scale=0.01)


def _memory(handle: Any, **version: int) -> Iterator[Value]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, **version)
    if 0 < memory.total != _ULONGLONG_MISSING and memory.used <= memory.total:
        yield "hw.gpu.memory.usage", float(memory.used), {}
        yield "hw.gpu.memory.limit", float(memory.total), {}
        yield "hw.gpu.memory.utilization", memory.used / memory.total, {}


def _memory_v2(handle: Any) -> Iterator[Value]:
    # The first version counts what the driver reserves for itself as used.
    return _memory(handle, version=pynvml.nvmlMemory_v2)


def _power(handle: Any) -> Iterator[Value]:
    return _value("hw.power", pynvml.nvmlDeviceGetPowerUsage(handle), scale=1e-3)


def _power_limit(handle: Any) -> Iterator[Value]:
    milliwatts = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
    return _value("dsagent.gpu.power.limit", milliwatts, scale=1e-3)


def _energy(handle: Any) -> Iterator[Value]:
    millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    return _value("hw.energy", millijoules, scale=1e-3)


def _clock(metric: str, call: str, clock: str, which: int) -> Reader:
    def read(handle: Any) -> Iterator[Value]:
        megahertz = getattr(pynvml, call)(handle, which)
        return _value(metric, megahertz, scale=1e6, clock=clock)

    return read


def _temperature(handle: Any) -> Iterator[Value]:
    celsius = pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)
    return _value("hw.temperature", celsius)


def _temperature_before_r570(handle: Any) -> Iterator[Value]:
    celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    return _value("hw.temperature", celsius)


def _throttled(current: str, supported: str) -> Reader:
    def read(handle: Any) -> Iterator[Value]:
        set_bits = getattr(pynvml, current)(handle)
        try:
            known_bits = getattr(pynvml, supported)(handle)
        except pynvml.NVMLError as error:
            if error.value not in _ABSENT:
                raise
            known_bits = set_bits  # of a reason that is not set nothing is known
        for reason, bit in THROTTLE_REASONS.items():
            if bit & (known_bits | set_bits):
                yield "dsagent.gpu.throttled", float(bool(bit & set_bits)), {"reason": reason}

    return read


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that is asked of a device; `ways` from the newest call to the oldest, each with
    the function that this version of the binding must have."""

    name: str
    ways: tuple[tuple[str, Reader], ...]
    every: int = 1  # rounds


_SM, _MEMORY = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
_CLOCK, _MAX_CLOCK = "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"
_EVENTS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetSupportedClocksEventReasons")
_REASONS = (  # the same, as drivers before R535 call them
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetSupportedClocksThrottleReasons",
)
LIMIT = "dsagent.gpu.clock.limit"
MEMORY = Field(
    "memory",
    (("nvmlDeviceGetMemoryInfo", _memory_v2), ("nvmlDeviceGetMemoryInfo", _memory)),
)
FIELDS = (
    Field("utilization", (("nvmlDeviceGetUtilizationRates", _utilization),)),
    MEMORY,
    Field("power", (("nvmlDeviceGetPowerUsage", _power),)),
    Field("energy", (("nvmlDeviceGetTotalEnergyConsumption", _energy),)),
    Field("SM clock", ((_CLOCK, _clock("dsagent.gpu.clock", _CLOCK, "sm", _SM)),)),
    Field("memory clock", ((_CLOCK, _clock("dsagent.gpu.clock", _CLOCK, "memory", _MEMORY)),)),
    Field(
        "temperature",
        (
            ("nvmlDeviceGetTemperatureV", _temperature),
            ("nvmlDeviceGetTemperature", _temperature_before_r570),
        ),
    ),
    Field(
        "throttle reasons",
        ((_EVENTS[0], _throttled(*_EVENTS)), (_REASONS[0], _throttled(*_REASONS))),
    ),
    Field("power limit", (("nvmlDeviceGetEnforcedPowerLimit", _power_limit),), every=40),
    Field("SM clock limit", ((_MAX_CLOCK, _clock(LIMIT, _MAX_CLOCK, "sm", _SM)),), every=40),
    Field(
        "memory clock limit",
        ((_MAX_CLOCK, _clock(LIMIT, _MAX_CLOCK, "memory", _MEMORY)),),
        every=40,
    ),
)


@dataclass(slots=True)
class Device:
    """One GPU, or one MIG slice of one, and what has been learnt about it."""

    handle: Any
    attributes: dict[str, str]
    claims: Callable[[int], bool] | None  # whether a pid that NVML names is the target's
    fields: tuple[Field, ...] = FIELDS
    counts_processes: bool = True
    absent: dict[str, str] = field(default_factory=dict)  # field → why
    lost: str = ""  # why, once it does not answer any more
    failed_reads: int = 0
    _way: dict[str, int] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)  # fields that have been read once

    @property
    def uuid(self) -> str:
        return self.attributes["hw.id"]

    def read(self, round_number: int) -> list[Sample]:
        """The fields due in this round. Raises NvmlLost where NVML itself is gone."""
        samples: list[Sample] = []
        answered, reason = False, ""
        due = [one for one in self.fields if round_number % one.every == 0]
        if self.counts_processes:
            due.append(
                Field("processes", (("nvmlDeviceGetComputeRunningProcesses", self._processes),))
            )
        for one in due:
            if self.lost or one.name in self.absent:
                continue
            try:
                values = self._read_field(one)
            except pynvml.NVMLError as error:
                reason = f"{one.name}: {escape(str(error))}"
                self.failed_reads += 1
                continue
            answered = True
            now_ns = time.monotonic_ns()
            samples += [
                Sample(metric, value, now_ns, {**self.attributes, **attributes})
                for metric, value, attributes in values
            ]
        if reason and not answered and not self.lost:
            self.lost = reason
        return samples

    def _read_field(self, one: Field) -> list[Value]:
        """Tries the ways that are left; none left: the field is absent from now on.

        Raises NVMLError for what may pass, and NvmlLost."""
        ways = [reader for needed, reader in one.ways if hasattr(pynvml, needed)]
        why = "not in this version of nvidia-ml-py"
        for way in range(self._way.get(one.name, 0), len(ways)):
            try:
                values = list(ways[way](self.handle))
            except pynvml.NVMLError as error:
                if error.value in _LIBRARY_LOST:
                    raise NvmlLost(escape(str(error))) from error
                if error.value in _DEVICE_LOST:
                    self.lost = escape(str(error))
                    raise
                # Denied from the start (a slice may not ask about its parent): as good as absent.
                denied = error.value == pynvml.NVML_ERROR_NO_PERMISSION
                if error.value not in _ABSENT and not (denied and one.name not in self._known):
                    raise
                why = escape(str(error))
            else:
                self._way[one.name] = way
                self._known.add(one.name)
                return values
        self.absent[one.name] = why
        return []

    def _processes(self, handle: Any) -> Iterator[Value]:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)[:MAX_PROCESSES]
        yield "dsagent.gpu.processes", float(len(processes)), {}
        if self.claims is None:
            return
        held = [
            process.usedGpuMemory
            for process in processes
            if process.usedGpuMemory is not None and self.claims(process.pid)
        ]
        if held:  # none of the target's here is not the same as the target holding nothing
            yield "dsagent.gpu.target.memory.usage", float(sum(held)), {}


def _text(read: Callable[..., str], *arguments: Any) -> str | None:
    """A string of NVML's, or None where it has none."""
    try:
        return escape(read(*arguments), 96)
    except (pynvml.NVMLError, UnicodeDecodeError):
        return None


@dataclass(slots=True)
class NvmlSession:
    """From nvmlInit to nvmlShutdown."""

    devices: list[Device]
    unreachable: list[str] = field(default_factory=list)  # devices there are but cannot be had
    rounds: int = 0

    @classmethod
    def open(cls, claims: Callable[[int], bool] | None, uuids: tuple[str, ...]) -> NvmlSession:
        """Finds the devices (only those of `uuids`, if any are given).

        Raises NvmlLost, also where there is no such device.
        """
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlLost(escape(str(error))) from error
        session = cls([])
        try:
            session._find(claims, uuids)
        except pynvml.NVMLError as error:
            session.close()
            raise NvmlLost(escape(str(error))) from error
        if not session.devices:
            session.close()
            raise NvmlLost("; ".join(session.unreachable) or "it knows no such device")
        return session

    def _find(self, claims: Callable[[int], bool] | None, uuids: tuple[str, ...]) -> None:
        driver = _text(pynvml.nvmlSystemGetDriverVersion)
        for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_DEVICES)):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            except pynvml.NVMLError as error:
                self.unreachable.append(f"device {index}: {escape(str(error))}")
                continue
            found: list[Device] = []
            for one in (handle, *_mig_handles(handle)):
                try:
                    found.append(_device(one, driver, claims))
                except pynvml.NVMLError as error:
                    self.unreachable.append(f"device {index}: {escape(str(error))}")
            if len(found) > 1 and found[0].handle is handle:
                # Its slices say this of themselves; saying it twice would double every sum.
                found[0].fields = tuple(one for one in FIELDS if one is not MEMORY)
                found[0].counts_processes = False
            self.devices += [device for device in found if not uuids or device.uuid in uuids]

    def read(self) -> list[Sample]:
        """One round over all devices. Raises NvmlLost when none of them answers any more."""
        samples = [
            sample
            for device in self.devices
            if not device.lost
            for sample in device.read(self.rounds)
        ]
        self.rounds += 1
        if all(device.lost for device in self.devices):
            raise NvmlLost("; ".join(self.problems()))
        return samples

    def problems(self) -> list[str]:
        """Devices that are lost or cannot be had."""
        lost = [f"{device.uuid}: {device.lost}" for device in self.devices if device.lost]
        return lost + self.unreachable

    def absences(self) -> list[str]:
        """Fields that no device has, or only some, and why, each told once."""
        found: dict[str, str] = {}
        for device in self.devices:
            for name, why in device.absent.items():
                found.setdefault(name, why)
        return [f"{name} ({why})" for name, why in found.items()]

    def close(self) -> None:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return  # it was not there any more: nothing is left to shut down


def _device(handle: Any, driver: str | None, claims: Callable[[int], bool] | None) -> Device:
    """Raises NVMLError where the device does not say who it is."""
    known = {
        "hw.id": escape(pynvml.nvmlDeviceGetUUID(handle), 96),
        "hw.type": "gpu",
        "hw.name": _text(pynvml.nvmlDeviceGetName, handle),
        "hw.vendor": "NVIDIA",
        "hw.driver_version": driver,
    }
    return Device(handle, {name: text for name, text in known.items() if text is not None}, claims)


def _mig_handles(handle: Any) -> list[Any]:
    """The MIG slices of a device that can be seen from here."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
        if current != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = min(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle), MAX_MIG_DEVICES)
    except pynvml.NVMLError:
        return []  # no such thing on this device
    handles = []
    for index in range(count):
        try:
            handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except pynvml.NVMLError:
            continue  # no slice in this place, or not ours to see
    return handles

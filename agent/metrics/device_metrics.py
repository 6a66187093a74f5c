"""What the samples of nvml.py and proc.py may be called: of devices, processes, the machine."""

from __future__ import annotations

from dsagent.agent.metrics.metric import Metric
from dsagent.instrumentation import names

_DEVICE = ("hw.id", "hw.type", "hw.name", "hw.vendor", "hw.driver_version")
_COMM = "process.executable.name"

GPU_UTILIZATION = Metric(
    "hw.gpu.utilization", "gauge", "1", "Time in which some kernel ran.", _DEVICE
)
GPU_MEMORY_USAGE = Metric("hw.gpu.memory.usage", "gauge", "By", "Device memory in use.", _DEVICE)
GPU_MEMORY_LIMIT = Metric("hw.gpu.memory.limit", "gauge", "By", "Device memory there is.", _DEVICE)
GPU_MEMORY_UTILIZATION = Metric(
    "hw.gpu.memory.utilization", "gauge", "1", "Device memory in use.", _DEVICE
)
GPU_POWER = Metric("hw.power", "gauge", "W", "Power drawn.", _DEVICE)
GPU_ENERGY = Metric("hw.energy", "counter", "J", "Energy used.", _DEVICE)
GPU_TEMPERATURE = Metric("hw.temperature", "gauge", "Cel", "Temperature.", _DEVICE)
GPU_ERRORS = Metric("hw.errors", "counter", "{error}", "Errors.", (*_DEVICE, names.ERROR_TYPE))
GPU_CLOCK = Metric("dsagent.gpu.clock", "gauge", "Hz", "Clock now.", (*_DEVICE, "clock"))
GPU_CLOCK_LIMIT = Metric(
    "dsagent.gpu.clock.limit", "gauge", "Hz", "Highest clock.", (*_DEVICE, "clock")
)
GPU_POWER_LIMIT = Metric("dsagent.gpu.power.limit", "gauge", "W", "Power limit in force.", _DEVICE)
GPU_THROTTLED = Metric(
    "dsagent.gpu.throttled",
    "gauge",
    "{state}",
    "1 while the device holds its clocks back for this reason.",
    (*_DEVICE, "reason"),
)
GPU_PROCESSES = Metric(
    "dsagent.gpu.processes", "gauge", "{process}", "Processes on the device.", _DEVICE
)
GPU_TARGET_MEMORY_USAGE = Metric(
    "dsagent.gpu.target.memory.usage",
    "gauge",
    "By",
    "Device memory held by the target's processes.",
    _DEVICE,
)
PROCESS_CPU_TIME = Metric(
    "process.cpu.time", "counter", "s", "CPU time of the target.", (_COMM, "cpu.mode")
)
PROCESS_MEMORY_USAGE = Metric(
    "process.memory.usage", "gauge", "By", "Resident memory of the target.", (_COMM,)
)
PROCESS_THREAD_COUNT = Metric(
    "process.thread.count", "gauge", "{thread}", "Threads of the target.", (_COMM,)
)
PROCESS_PAGING_FAULTS = Metric(
    "process.paging.faults",
    "counter",
    "{fault}",
    "Page faults of the target: major ones waited for a disk.",
    (_COMM, "system.paging.fault.type"),
)
PROCESS_CONTEXT_SWITCHES = Metric(
    "process.context_switches",
    "counter",
    "{context_switch}",
    "Context switches of the target.",
    (_COMM, "process.context_switch.type"),
)
PROCESS_OPEN_FILES = Metric(
    "process.unix.file_descriptor.count",
    "gauge",
    "{file_descriptor}",
    "Open files of the target.",
    (_COMM,),
)
PROCESS_DISK_IO = Metric(
    "process.disk.io",
    "counter",
    "By",
    "Bytes the target read from and wrote to disks.",
    (_COMM, "disk.io.direction"),
)
SYSTEM_CPU_TIME = Metric(
    "system.cpu.time", "counter", "s", "CPU time of the whole machine, by mode.", ("cpu.mode",)
)
CGROUP_CPU_THROTTLED = Metric(
    "dsagent.cgroup.cpu.throttled", "counter", "s", "Time the target's cgroup was throttled."
)

GPU_METRICS = (
    GPU_UTILIZATION,
    GPU_MEMORY_USAGE,
    GPU_MEMORY_LIMIT,
    GPU_MEMORY_UTILIZATION,
    GPU_POWER,
    GPU_ENERGY,
    GPU_TEMPERATURE,
    GPU_ERRORS,
    GPU_CLOCK,
    GPU_CLOCK_LIMIT,
    GPU_POWER_LIMIT,
    GPU_THROTTLED,
    GPU_PROCESSES,
    GPU_TARGET_MEMORY_USAGE,
)
PROCESS_METRICS = (
    PROCESS_CPU_TIME,
    PROCESS_MEMORY_USAGE,
    PROCESS_THREAD_COUNT,
    PROCESS_PAGING_FAULTS,
    PROCESS_CONTEXT_SWITCHES,
    PROCESS_OPEN_FILES,
    PROCESS_DISK_IO,
    SYSTEM_CPU_TIME,
    CGROUP_CPU_THROTTLED,
)

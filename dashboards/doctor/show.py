"""Reports as text for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dsagent.dashboards.doctor.check import Report
from dsagent.dashboards.doctor.findings import Finding, one_line


def show(reports: Sequence[Report], what: str | None) -> str:
    """One line a file, its findings below; at the end what it comes to."""
    lines = []
    for report in reports:
        lines.append(f"{report.path}: {_verdict(report, what is not None)}")
        found = Counter(_finding(finding) for finding in report.findings)
        found += Counter(f"quiet: {one_line(quiet.reason, 200)}" for quiet in report.quiet)
        lines += [f"  {text}{f' ({n} ×)' if n > 1 else ''}" for text, n in found.items()]
    findings = sum(len(report.findings) for report in reports)
    against = f"against {what}" if what else "without metrics: only what the files say themselves"
    lines.append(f"{len(reports)} files {against}: {findings or 'no'} findings")
    return "\n".join(lines)


def _finding(finding: Finding) -> str:
    where = f" {finding.where}:" if finding.where else ""
    return f"{finding.problem}:{where} {one_line(finding.message, 300)}"


def _verdict(report: Report, evaluated: bool) -> str:
    word = "alive" if evaluated else "without fault"
    quiet = len({each.where for each in report.quiet})
    text = f"{report.expressions} expressions, {report.alive} {word}"
    if quiet:
        text += f", {quiet} panels quiet"
    return f"{text}, {report.elsewhere} not PromQL" if report.elsewhere else text

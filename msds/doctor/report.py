"""The results of a preflight as data, as JSON and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from msds.doctor.checks import FAIL, STATUSES, Result


@dataclass(frozen=True)
class DoctorReport:
    """Results in the order of the checks."""

    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed; warnings and skipped checks do not count."""
        return all(result.finding.status != FAIL for result in self.results)

    @property
    def summary(self) -> dict[str, int]:
        counts = Counter(result.finding.status for result in self.results)
        return {status: counts[status] for status in STATUSES}

    def to_json(self) -> dict[str, object]:
        """passed: bool. summary: {pass, warn, fail, skip} -> number. checks: [{name, status, found, next_step,
        seconds}], next_step "" where there is nothing to do."""
        return {
            "passed": self.passed,
            "summary": self.summary,
            "checks": [
                {
                    "name": result.name,
                    "status": result.finding.status,
                    "found": result.finding.found,
                    "next_step": result.finding.next_step,
                    "seconds": round(result.seconds, 3),
                }
                for result in self.results
            ],
        }

    def render(self) -> str:
        """The results as lines of text for a terminal, without a final line break."""
        width = max((len(result.name) for result in self.results), default=0)
        lines = []
        for result in self.results:
            first, *more = result.finding.found.splitlines() or [""]
            lines.append(f"{result.finding.status}  {result.name:<{width}}  {first}")
            lines += [f"{'':<{width + 8}}{line}" for line in more]
            if result.finding.next_step:
                lines.append(f"{'':<{width + 8}}next: {result.finding.next_step}")
        lines += ["", ", ".join(f"{count} {status}" for status, count in self.summary.items() if count)]
        return "\n".join(lines)

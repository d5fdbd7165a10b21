"""What came out: a table for people, the same as JSON, and the words of a verdict."""

from dataclasses import dataclass

from .cases import Case
from .stats import Finding, Round, percent


@dataclass
class Result:
    """One case: its first rounds, and those of its own where it was measured again."""

    case: Case
    rounds: list[Round]
    seen: Finding
    again: list[Round]
    confirmed: Finding | None

    def holds(self) -> bool:
        """Seen, and seen again in the same direction."""
        found = self.confirmed
        return bool(found and found.flagged and (found.change > 0) == (self.seen.change > 0))

    def regressed(self, threshold: float) -> bool:
        """Slower for certain, and by more than `threshold` percent."""
        return self.holds() and percent(self.confirmed.change) > threshold

    def verdict(self, threshold: float) -> str:
        if not self.seen.flagged:
            return ""
        if not self.confirmed:
            return "seen, not measured again"
        again = f"{change(self.confirmed.change)} ± {width(self.confirmed.noise)} in {self.confirmed.rounds} more rounds"
        if not self.holds():
            return f"seen, not confirmed: {again}"
        if self.confirmed.change < 0:
            return f"faster: {again}"
        return f"{'REGRESSION' if self.regressed(threshold) else 'slower'}: {again}"


def change(log_ratio: float) -> str:
    return f"{percent(log_ratio):+.1f} %"


def width(log_ratio: float) -> str:
    return f"{percent(log_ratio):.1f} %"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def table(results: list[Result], threshold: float) -> str:
    """Aligned columns."""
    header = ["case", "BASE ms", "HEAD ms", "change", "noise", "null arm", ""]
    rows = [
        [
            r.case.name,
            milliseconds(r.seen.base_seconds),
            milliseconds(r.seen.head_seconds),
            change(r.seen.change),
            f"± {width(r.seen.noise)}",
            change(r.seen.null),
            r.verdict(threshold),
        ]
        for r in results
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row):
        first, *middle, last = zip(row, widths)
        cells = [first[0].ljust(first[1]), *(c.rjust(w) for c, w in middle), last[0]]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, [header, *rows]))


def summary(results: list[Result], threshold: float) -> str:
    """One sentence, or a line for each confirmed regression."""
    bad = [r for r in results if r.regressed(threshold)]
    if bad:
        names = ", ".join(f"{r.case.name} ({change(r.confirmed.change)})" for r in bad)
        return f"confirmed regression over {threshold:g} %: {names}"
    if moved := [r for r in results if r.holds()]:
        return f"no confirmed regression over {threshold:g} %; {len(moved)} of {len(results)} cases changed"
    blind = [r.case.name for r in results if percent(r.seen.noise) > threshold]
    if blind:
        return f"no change seen, but noise above {threshold:g} % in {', '.join(blind)}: more --rounds or a stiller machine would tell"
    return f"no change beyond noise in {len(results)} cases"


def finding(f: Finding | None):
    if f is None:
        return None
    return {
        "change_percent": percent(f.change),
        "noise_percent": percent(f.noise),
        "null_percent": percent(f.null),
        "base_ms": f.base_seconds * 1e3,
        "head_ms": f.head_seconds * 1e3,
        "rounds": f.rounds,
        "flagged": f.flagged,
    }


def as_json(results: list[Result], threshold: float, about: dict) -> dict:
    """Everything, with the milliseconds of each round as [BASE, its copy, HEAD]."""

    def times(rounds):
        return [[t * 1e3 for t in (r.base, r.null, r.head)] for r in rounds]

    cases = [
        {
            "case": r.case.name,
            "seen": finding(r.seen),
            "confirmed": finding(r.confirmed),
            "regression": r.regressed(threshold),
            "rounds_ms": times(r.rounds),
            "rounds_again_ms": times(r.again),
        }
        for r in results
    ]
    return {**about, "threshold_percent": threshold, "cases": cases}

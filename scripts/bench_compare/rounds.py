"""Measuring: the three arms, the cases they have in common, and rounds of all of them."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from . import Trouble
from .cases import Case, commands
from .stats import Round
from .turns import Failed, together

# BASE, a second copy of its file, and HEAD.
ARMS = ("base", "null", "head")


@contextmanager
def programs(cache: Path, base: Path, head: Path) -> Iterator[dict[str, Path]]:
    """A fresh copy of a program for each arm: where its file happens to lie in memory is part of the noise."""
    with TemporaryDirectory(prefix="arms-", dir=cache) as folder:
        arms = {arm: Path(folder) / f"doyen-{arm}" for arm in ARMS}
        for arm, path in arms.items():
            shutil.copy(head if arm == "head" else base, path)
        yield arms


@dataclass
class Common:
    """What both revisions can measure; in words what one of them cannot; and seconds that a round took."""

    cases: list[Case]
    missing: list[str]
    seconds: float
    device: str


@dataclass
class Bench:
    """The arms, and what they are called with."""

    arms: dict[str, Path]
    threads: int
    rng: random.Random

    def lacks(self, arm: str, cases: list[Case]) -> tuple[dict[Case, str], str]:
        """What an arm cannot measure, with its words, and the device it names."""
        (command,) = commands(cases, self.threads)
        try:
            report = together({arm: self.arms[arm]}, command, self.rng)[arm]
        except Failed as e:
            if len(cases) == 1:
                return {cases[0]: str(e)}, ""
            # One that is not known spoils the call for all.
            alone = [self.lacks(arm, [case]) for case in cases]
            return {c: why for found, _ in alone for c, why in found.items()}, max(device for _, device in alone)
        without = {c: "its report has no such row" for c in cases if c.read(report) is None}
        return without, str(report.get("device", ""))

    def common(self, cases: list[Case]) -> Common:
        """Asks BASE and HEAD for every case once. Nothing of it counts."""
        start = time.monotonic()
        missing, device = {}, ""
        for group in commands(cases, self.threads).values():
            for arm in ("base", "head"):
                without, named = self.lacks(arm, group)
                device = named or device
                for case, why in without.items():
                    missing.setdefault(case, f"{case.name}: not in {arm.upper()} ({why})")
        both = [case for case in cases if case not in missing]
        if not both:
            raise Trouble("the revisions have no case in common:\n" + "\n".join(f"  {m}" for m in missing.values()))
        return Common(both, list(missing.values()), (time.monotonic() - start) * len(ARMS) / 2, device)

    def measure(
        self, cases: list[Case], rounds: int, progress: Callable[[int, float], None]
    ) -> dict[Case, list[Round]]:
        """Every case so many times on all arms; `progress` hears of every round and the seconds since the first."""
        results: dict[Case, list[Round]] = {case: [] for case in cases}
        start = time.monotonic()
        for number in range(rounds):
            for command, group in commands(cases, self.threads).items():
                try:
                    reports = together(self.arms, command, self.rng)
                except Failed as e:
                    raise Trouble(f"{command}: {e}; it had worked before") from None
                for case in group:
                    times = [case.read(reports[arm]) for arm in ARMS]
                    if None in times:
                        raise Trouble(f"{command}: no row of {case.name}; it had been there before")
                    results[case].append(Round(*times))
            progress(number + 1, time.monotonic() - start)
        return results

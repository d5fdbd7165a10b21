"""From rounds to a verdict: paired log ratios, medians, and noise that the null arm gives.

A round has three times of a case, taken in the same second: of BASE, of a second copy of BASE (the null arm) and of
HEAD. What they share (a slow minute, a drift) cancels in their ratios:

    null   = log(null / base)                            by its making nothing but noise, of variance 2 s^2
    change = log(head) - (log(base) + log(null)) / 2     of variance 1.5 s^2 where there is no change

The change of a case is the median over its rounds. Its noise is the half width of an interval around 0 that medians of as
many rounds leave by chance in one of twenty runs *in any case of the run*: Student's quantile at ALPHA over the number of
cases (Bonferroni; it holds however dependent they are), times the standard error of a median. The scale in it is a median of
absolute deviations, which single disturbed rounds do not move: of the null arm around 0 and of the changes around their
median. It is not believed when it is much smaller than what the other cases of the run have, as a few rounds can look alike by
chance. And noise is never less than the null arm's own median.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist, median

# Chance of a false flag in any case of a run, before it is measured again.
ALPHA = 0.05
# What a median of absolute deviations is multiplied by to be a standard deviation, where noise is normal.
TO_SIGMA = 1 / NormalDist().inv_cdf(0.75)
# Standard error of a median over that of a mean, where noise is normal; where tails are heavy it is smaller.
OF_MEDIAN = math.sqrt(math.pi / 2)
# Part of the median scale of all cases that is the least a case is believed to have.
LEAST_SHARE = 0.5
# The same sources moved in memory: changes below this say nothing about the code.
LEAST_NOISE = math.log(1.01)


@dataclass(frozen=True)
class Round:
    """Seconds of one case on each arm, taken one after the other."""

    base: float
    null: float
    head: float

    def change(self) -> float:
        """Log ratio of HEAD to both copies of BASE."""
        return math.log(self.head) - (math.log(self.base) + math.log(self.null)) / 2

    def noise(self) -> float:
        """Log ratio of the copies of BASE."""
        return math.log(self.null / self.base)


@dataclass(frozen=True)
class Finding:
    """One case after its rounds. Ratios are logarithms."""

    change: float
    noise: float
    null: float
    base_seconds: float
    head_seconds: float
    rounds: int

    @property
    def flagged(self) -> bool:
        """The change is more than noise."""
        return abs(self.change) > self.noise


def percent(log_ratio: float) -> float:
    """A log ratio as a change in percent."""
    return 100 * math.expm1(log_ratio)


def within(t: float, df: int) -> float:
    """Probability of Student's t between -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2
    term, total = (math.cos(angle), math.cos(angle)) if odd else (1.0, 1.0)
    for k in range(2 + odd, df - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    if odd:
        return 2 / math.pi * (angle + (math.sin(angle) * total if df > 1 else 0.0))
    return math.sin(angle) * total


def student(alpha: float, df: int) -> float:
    """What Student's t exceeds on either side with a probability of alpha."""
    low, high = 0.0, 1.0
    while within(high, df) < 1 - alpha:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, df) < 1 - alpha else (low, middle)
    return high


def scale(rounds: list[Round]) -> float:
    """Standard deviation of a round's change: that of a single measurement, by both copies of BASE around each other and by the
    changes around their median, times the root of 1.5."""
    changes = [r.change() for r in rounds]
    middle = median(changes)
    single = [abs(r.noise()) / math.sqrt(2) for r in rounds] + [abs(c - middle) / math.sqrt(1.5) for c in changes]
    return TO_SIGMA * median(single) * math.sqrt(1.5)


def findings(results: dict) -> dict:
    """case -> rounds to case -> Finding, each with the noise that this many cases allow for."""
    scales = {case: scale(rounds) for case, rounds in results.items()}
    least = LEAST_SHARE * median(scales.values())
    out = {}
    for case, rounds in results.items():
        n = len(rounds)
        error = OF_MEDIAN * max(scales[case], least) / math.sqrt(n)
        null = median(r.noise() for r in rounds)
        out[case] = Finding(
            change=median(r.change() for r in rounds),
            noise=max(student(ALPHA / len(results), n - 1) * error, abs(null), LEAST_NOISE),
            null=null,
            base_seconds=median(math.sqrt(r.base * r.null) for r in rounds),
            head_seconds=median(r.head for r in rounds),
            rounds=n,
        )
    return out

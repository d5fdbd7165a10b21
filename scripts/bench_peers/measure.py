"""Interleaved samples and quantiles.

Machines are shared and change speed from one second to the next. So contenders take turns, round after round, and a share of
the floor is one of the read loop's rate in that round: Doyen's loop, which runs between its own calls.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Samples:
    """Of one contender in one case."""

    seconds: list = field(default_factory=list)
    # Bytes that the calls had to read, where they differ from call to call, and their rate over the floor's.
    bytes: list = field(default_factory=list)
    shares: list = field(default_factory=list)

    def add(self, seconds: float, moved: float):
        self.seconds.append(seconds)
        self.bytes.append(moved)

    def share(self, floor: float):
        """Shares of a floor in bytes per second, for what has none yet."""
        done = len(self.shares)
        self.shares += [b / s / floor for b, s in zip(self.bytes[done:], self.seconds[done:])]

    def extend(self, other: "Samples"):
        self.seconds += other.seconds
        self.bytes += other.bytes
        self.shares += other.shares


def quantiles(values):
    """Median and quartiles as a dictionary, or None."""
    if not len(values):
        return None
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "p25": float(low), "p75": float(high), "samples": len(values)}

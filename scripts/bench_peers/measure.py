"""Interleaved samples, the read loop as the floor, and quantiles.

Machines are shared and change speed from one second to the next. So contenders take turns, round after round, and each
sample lies between two passes of a loop that only reads; a share of the floor is that of the same moment.
"""

import threading
import time
from dataclasses import dataclass, field

import numpy as np


class ReadLoop:
    """Sums a buffer too large for any cache, a slice per thread."""

    def __init__(self, threads: int, megabytes: int = 512, sample: int = 32):
        self.data = np.ones(megabytes << 17, np.uint64)
        self.step = min(sample, megabytes) << 17
        self.threads = threads
        self.next = 0

    def sample(self) -> float:
        """Bytes per second of the next piece of the buffer."""
        if self.next + self.step > len(self.data):
            self.next = 0
        pieces = np.array_split(self.data[self.next : self.next + self.step], self.threads)
        self.next += self.step
        workers = [threading.Thread(target=np.add.reduce, args=(p,)) for p in pieces[1:]]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        np.add.reduce(pieces[0])
        for worker in workers:
            worker.join()
        return self.step * 8 / (time.perf_counter() - start)


@dataclass
class Samples:
    """Of one contender in one case."""

    seconds: list = field(default_factory=list)
    # Bytes that the calls had to read, where they differ from call to call, and their rate over the floor's.
    bytes: list = field(default_factory=list)
    shares: list = field(default_factory=list)

    def add(self, seconds: float, moved: float, floor: float):
        self.seconds.append(seconds)
        self.bytes.append(moved)
        self.shares.append(moved / seconds / floor)

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


def take_turns(contenders: dict, rounds: int, sample) -> dict:
    """`rounds` times, each contender in turn: sample(contender) -> Samples. The order is turned by one each round."""
    results = {name: Samples() for name in contenders}
    names = list(contenders)
    for _ in range(rounds):
        for name in names:
            results[name].extend(sample(contenders[name]))
        names = names[1:] + names[:1]
    return results

"""Doyen's side: `doyen bench` as a process of its own, its JSON as samples."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .cases import Attention, QMoe
from .measure import Samples


class Refused(Exception):
    """The program said no; its words."""


def call(command) -> dict:
    done = subprocess.run([str(c) for c in command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.stdout.strip()}")
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Variant:
    """How Doyen runs an operator."""

    numerics: str
    scales: str

    @property
    def scale_bytes(self):
        return 4 if self.scales == "f32" else 2


def operator(doyen: Path, group, variant: Variant, threads: int, repetitions: int) -> tuple:
    """One round of the cases of a group: case -> samples (the medians of `repetitions` calls and their share); and the rate of
    the read loop meanwhile, in bytes per second."""
    case = group[0]
    command = [doyen, "bench", "--op", case.op, "--threads", threads, "--numerics", variant.numerics, "--json"]
    command += ["--repetitions", repetitions, "--tokens", ",".join(str(c.tokens) for c in group)]
    if isinstance(case, Attention):
        command += ["--context", case.context, "--heads", case.heads, "--kv-heads", case.kv_heads]
        command += ["--head-size", case.head_size, "--kv", "f32"]
    else:
        command += ["--bits", case.format.bits, "--block", case.format.block, "--scales", variant.scales]
        if isinstance(case, QMoe):
            command += [
                "--experts",
                case.experts,
                "--top-k",
                case.top_k,
                "--hidden",
                case.hidden,
                "--inter",
                case.inter,
            ]
        else:
            command += ["--n", case.rows, "--k", case.columns]
    report = call(command)
    cases = {c["m"]: c for c in report["cases"]}
    out = {}
    for case in group:
        measured = cases[case.tokens]
        seconds = measured["ms"]["median"] / 1e3
        rate = measured["gb_s"]["median"] * 1e9
        out[case] = Samples([seconds], [rate * seconds], [measured["share_of_read"]["median"]])
    return out, report["read_gb_s"]["median"] * 1e9

"""A child process with its peak memory and wall time."""

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass


@dataclass
class Done:
    out: str
    err: str
    seconds: float
    peak_bytes: int


def run(command, env=None) -> Done:
    """Runs to the end; SystemExit with its words when it fails."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        child = subprocess.Popen([str(c) for c in command], stdout=out, stderr=err, env={**os.environ, **(env or {})})
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        done = Done(out.read(), err.read(), seconds, usage.ru_maxrss * 1024)
    if child.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed ({child.returncode}):\n{done.err[-2000:]}")
    return done

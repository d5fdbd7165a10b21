"""Running programs at once, of which one at a time computes: the others are stopped.

A shared machine is fast for a second and slow for the next. Programs that run after each other meet different seconds, and
their times differ by a third while nothing changed. In turns of some ten milliseconds all of them meet the same ones.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryFile

from .cases import Command

# No call of the suite takes a tenth of it on a machine that is any use.
TIMEOUT = 300


class Failed(Exception):
    """A program did not measure what it was asked to; its words."""


def report(child: subprocess.Popen, out, err) -> dict:
    """The JSON of a program that has ended."""
    out.seek(0)
    err.seek(0)
    if child.returncode:
        said = [line.strip() for line in err.read().decode(errors="replace").splitlines() if line.strip()]
        raise Failed(next((line for line in said if line.startswith("error")), (said or ["it says nothing"])[-1]))
    try:
        return json.load(out)
    except ValueError:
        raise Failed("it prints something else than JSON") from None


def alternate(children: dict[str, subprocess.Popen], turn: float, rng: random.Random):
    """Lets stopped children run in turns until all have ended or one has failed. The order is another one each time."""
    waiting, end = list(children), time.monotonic() + TIMEOUT
    while waiting:
        if time.monotonic() > end:
            raise Failed(f"it takes more than {TIMEOUT} s")
        for name in rng.sample(waiting, len(waiting)):
            child = children[name]
            # The last one has nobody to give way to.
            alone = len(waiting) == 1
            os.kill(child.pid, signal.SIGCONT)
            try:
                child.wait(TIMEOUT if alone else turn)
                waiting.remove(name)
                if child.returncode:
                    return
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGSTOP)


def together(programs: dict[str, Path], command: Command, rng: random.Random) -> dict[str, dict]:
    """The reports of all programs, called in the same way."""
    with contextlib.ExitStack() as stack:
        children, files = {}, {}
        for name, program in programs.items():
            files[name] = [stack.enter_context(TemporaryFile()) for _ in range(2)]
            out, err = files[name]
            child = subprocess.Popen([program, *command.words], stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            # SIGKILL ends stopped ones too.
            stack.callback(lambda child=child: child.poll() is None and (child.kill(), child.wait()))
            os.kill(child.pid, signal.SIGSTOP)
            children[name] = child
        alternate(children, command.turn_ms / 1e3, rng)
        failed = {name: child for name, child in children.items() if child.returncode}
        return {name: report(child, *files[name]) for name, child in (failed or children).items()}

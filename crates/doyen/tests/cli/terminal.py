"""Drives `doyen chat` on a pseudo terminal: argv is the binary and its arguments. Fails with what was seen."""

import os
import pty
import select
import signal
import sys
import time

LIMIT_S = 120
CTRL_C, CTRL_D, UP = b"\x03", b"\x04", b"\x1b[A"


class Terminal:
    def __init__(self, argv):
        self.seen = b""
        self.at = 0
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(argv[0], argv)

    def send(self, data):
        os.write(self.fd, data)

    def fail(self, why):
        os.kill(self.pid, signal.SIGKILL)
        sys.exit(f"{why}; seen: {self.seen!r}")

    def read(self, deadline):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self.fd], [], [], left)[0]:
            return False
        try:
            data = os.read(self.fd, 4096)
        except OSError:  # the other side has closed
            return False
        self.seen += data
        return bool(data)

    def expect(self, text):
        """Waits for `text` after what was expected before."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen[self.at :]:
            if not self.read(deadline):
                self.fail(f"no {text!r} after {self.seen[:self.at]!r}")
        self.at = self.seen.index(text, self.at) + len(text)

    def expect_more(self, count):
        """Waits for `count` bytes after what was expected before."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.seen) < self.at + count:
            if not self.read(deadline):
                self.fail("no more output")
        self.at = len(self.seen)

    def ends(self):
        """Waits for the end of the program; returns its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self.read(deadline):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def main():
    first = Terminal(sys.argv[1:])
    first.expect(b"> ")
    first.send(CTRL_C)  # at the prompt: says how to leave, and stays
    first.expect(b"Ctrl-D")
    first.expect(b"> ")
    first.send(b"hello there\r")
    first.expect(b"\n")
    first.expect_more(12)  # in the middle of an answer that goes on for long
    first.send(CTRL_C)
    first.expect(b"ended by interrupted")
    first.expect(b"> ")
    first.send(b"/set max-new-tokens 2\r")
    first.expect(b"max-new-tokens is 2")
    first.send(b"one \\\r")  # a message of two lines
    first.expect(b". ")
    first.send(b"two\r")
    first.expect(b"> ")
    first.send(b"/stats\r")
    first.expect(b"2 generated")
    first.expect(b"> ")
    first.send(CTRL_D)
    if (code := first.ends()) != 0:
        first.fail(f"exit code {code}")

    second = Terminal(sys.argv[1:])
    second.expect(b"> ")
    second.send(UP * 5)  # the history of the conversation before; one message has two lines
    second.expect(b"hello there")
    second.send(CTRL_C)
    second.expect(b"> ")
    second.send(b"/quit\r")
    if (code := second.ends()) != 0:
        second.fail(f"exit code {code}")


main()

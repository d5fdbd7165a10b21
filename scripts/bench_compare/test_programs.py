"""Everything around the statistics, with a git repository and programs made for the purpose."""

import os
import random
import stat
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from . import Trouble, revisions
from .cases import SUITE, Command, chosen, commands
from .rounds import Bench
from .turns import Failed, together

# A `doyen bench` that knows matmulnbits at 4 and 8 bits, and whose calls take as long as a file says.
PROGRAM = """\
#!/bin/sh
case "$*" in
*--op\\ matmulnbits*) ;;
*) echo "starting"; echo "error: invalid value for '--op <OP>'" >&2; exit 2 ;;
esac
case "$*" in
*--bits\\ 2*|*--bits\\ *,2*) echo "error: 2 is not a width" >&2; exit 2 ;;
esac
echo '{"device": "cpu, 1 thread", "cases": [
  {"m": 1, "bits": 4, "ms": {"p25": MS}}, {"m": 1, "bits": 8, "ms": {"p25": MS}}]}'
"""


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Folder(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)


class Revisions(Folder):
    def setUp(self):
        super().setUp()
        names = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        self.environment = {**os.environ, **names}
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit("one")

    def git(self, *words):
        subprocess.run(["git", "-C", self.folder, *words], check=True, env=self.environment)

    def commit(self, text):
        (self.folder / "file").write_text(text)
        self.git("add", "file")
        self.git("commit", "--quiet", "--message", text)

    def test_two_revisions(self):
        self.commit("two")
        base, head = revisions.pair(self.folder, "HEAD~1", "main")
        self.assertEqual((base.subject, head.subject), ("one", "two"))
        self.assertNotEqual(base.commit, head.commit)

    def test_the_same_commit_and_the_same_files_are_refused(self):
        with self.assertRaisesRegex(Trouble, "same commit"):
            revisions.pair(self.folder, "main", "HEAD")
        self.commit("two")
        self.commit("one")
        with self.assertRaisesRegex(Trouble, "same files"):
            revisions.pair(self.folder, "HEAD~2", "HEAD")

    def test_unknown_revisions_are_named(self):
        for name in ("nowhere", "--help", ""):
            with self.assertRaisesRegex(Trouble, f"'{name}' is no revision"):
                revisions.pair(self.folder, name, "main")

    def test_uncommitted_files_are_found(self):
        self.assertEqual(revisions.uncommitted(self.folder), [])
        (self.folder / "file").write_text("changed")
        (self.folder / "new").write_text("")
        self.assertEqual(sorted(revisions.uncommitted(self.folder)), ["file", "new"])

    def test_a_cache_has_one_user(self):
        lock = revisions.only_here(self.folder / "cache")
        self.addCleanup(lock.close)
        with self.assertRaisesRegex(Trouble, "another bench-compare"):
            revisions.only_here(self.folder / "cache")
        lock.close()
        revisions.only_here(self.folder / "cache").close()


class Cases(unittest.TestCase):
    def test_names_are_unique_and_chosen_by_words(self):
        self.assertEqual(len({c.name for c in SUITE}), len(SUITE))
        self.assertEqual({c.name for c in chosen("decode, int2/4", False)}, {"model decode", "qmoe int2/4 m=1"})
        self.assertEqual(chosen("nothing of the kind", False), [])
        self.assertTrue(0 < len(chosen(None, True)) < len(SUITE))

    def test_cases_of_a_call_share_it(self):
        found = list(commands(chosen("matmul int", False), 1))
        self.assertEqual(len(found), 2)
        self.assertIn("4,8,2", found[0].words)


class Measuring(Folder):
    def bench(self, **times):
        arms = {arm: program(self.folder, arm, PROGRAM.replace("MS", str(ms))) for arm, ms in times.items()}
        return Bench(arms, 1, random.Random(1))

    def test_rounds_have_a_time_of_each_arm(self):
        bench = self.bench(base=2.0, null=2.5, head=3.0)
        cases = chosen("matmul int8 m=1,matmul int4 m=1", False)
        ticks = []
        for rounds in bench.measure(cases, 3, lambda number, _: ticks.append(number)).values():
            self.assertEqual([(r.base, r.null, r.head) for r in rounds], [(2e-3, 2.5e-3, 3e-3)] * 3)
        self.assertEqual(ticks, [1, 2, 3])

    def test_what_a_revision_lacks_is_left_out_with_its_words(self):
        bench = self.bench(base=1.0, null=1.0, head=1.0)
        common = bench.common(chosen("matmul int,attention f32 m=1", False))
        self.assertEqual([c.name for c in common.cases], ["matmul int4 m=1", "matmul int8 m=1"])
        self.assertEqual(common.device, "cpu, 1 thread")
        text = "\n".join(common.missing)
        self.assertIn("matmul int2 m=1: not in BASE (error: 2 is not a width)", text)
        self.assertIn("matmul int4 m=32: not in BASE (its report has no such row)", text)
        self.assertIn("attention f32 m=1: not in BASE (error: invalid value for '--op <OP>')", text)

    def test_nothing_in_common_is_an_error(self):
        with self.assertRaisesRegex(Trouble, "no case in common"):
            self.bench(base=1.0, null=1.0, head=1.0).common(chosen("attention", False))


class Turns(Folder):
    def test_programs_take_turns(self):
        """Each sees pauses in which the others run, and none runs while another does."""
        text = "#!/usr/bin/env python3\nimport json, time\n"
        text += "end, seen = time.process_time() + 0.15, []\n"
        text += "while time.process_time() < end: seen.append(time.monotonic())\n"
        text += "print(json.dumps([seen[0], seen[-1], max(b - a for a, b in zip(seen, seen[1:]))]))\n"
        programs = {name: program(self.folder, name, text) for name in ("a", "b", "c")}
        reports = together(programs, Command((), 10), random.Random(1))
        self.assertLess(max(r[0] for r in reports.values()), min(r[1] for r in reports.values()))
        self.assertGreater(min(r[2] for r in reports.values()), 0.008)

    def test_one_that_fails_ends_the_others(self):
        programs = {
            "good": program(self.folder, "good", "#!/bin/sh\nsleep 60\n"),
            "bad": program(self.folder, "bad", "#!/bin/sh\necho 'error: no' >&2\nexit 2\n"),
        }
        start = time.monotonic()
        with self.assertRaisesRegex(Failed, "error: no"):
            together(programs, Command((), 10), random.Random(1))
        self.assertLess(time.monotonic() - start, 30)


if __name__ == "__main__":
    unittest.main()

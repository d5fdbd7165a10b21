"""The command line of scripts/bench-compare."""

import argparse
import filecmp
import json
import random
import signal
import sys
from pathlib import Path

from . import Trouble, report, revisions
from .cases import SUITE, chosen
from .revisions import say
from .rounds import Bench, programs
from .stats import findings

ROOT = Path(__file__).resolve().parents[2]
EPILOG = f"""\
Both revisions are built in the cache (release profile, one target folder; programs are kept by commit). Then BASE, a
second copy of BASE (the null arm) and HEAD measure every case at the same time, in turns of some ten milliseconds. What
changed by more than the noise is measured again, alone and with more rounds, before it counts.

cases:
  {chr(10).join('  ' + c.name + ('  (quick)' if c.quick else '') for c in SUITE).strip()}

exit status:
  0  no confirmed regression over the threshold
  1  a confirmed one
  2  nothing could be compared

examples:
  scripts/bench-compare main HEAD
  scripts/bench-compare v0.1.0 my-branch --cases qmoe,decode --rounds 20
  scripts/bench-compare main HEAD --quick --json change.json"""


def at_least(least: int):
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def arguments():
    kind = argparse.RawDescriptionHelpFormatter
    about = "Is HEAD slower than BASE? Two git revisions on this machine, with a null arm."
    parser = argparse.ArgumentParser("bench-compare", description=about, epilog=EPILOG, formatter_class=kind)
    parser.add_argument("base", metavar="BASE", help="a branch, tag or commit")
    parser.add_argument("head", metavar="HEAD", help="another one")
    parser.add_argument("--cases", metavar="WORD,..", help="only cases whose name holds one of these")
    parser.add_argument("--quick", action="store_true", help="fewer cases, 6 rounds")
    parser.add_argument("--rounds", type=at_least(5), help="rounds of all cases [8]")
    parser.add_argument("--confirm-rounds", type=at_least(5), help="rounds of what was seen [twice --rounds]")
    parser.add_argument("--threshold", type=float, default=15, metavar="PERCENT", help="what a regression exceeds [15]")
    parser.add_argument("--threads", type=at_least(1), default=1, help="of the programs; more are much noisier [1]")
    parser.add_argument("--cache", type=Path, default=ROOT / "target/bench-compare", help="[target/bench-compare]")
    parser.add_argument("--seed", type=int, help="of the order of turns")
    parser.add_argument("--build-only", action="store_true", help="build both, measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    args.cache = args.cache.resolve()
    args.rounds = args.rounds or (6 if args.quick else 8)
    args.confirm_rounds = args.confirm_rounds or 2 * args.rounds
    args.chosen = chosen(args.cases, args.quick)
    if not args.chosen:
        parser.error(f"no case holds any of {args.cases!r}; --help lists them")
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"{args.json}: its folder is not there")
    return args


def progress(what: str, rounds: int):
    """A line a round; on a terminal always the same one."""
    terminal = sys.stderr.isatty()

    def tell(number: int, seconds: float):
        left = seconds / number * (rounds - number)
        text = f"{what}: round {number} of {rounds}, {left:.0f} s left"
        end = "\n" if number == rounds or not terminal else ""
        print(f"\r{text:60}" if terminal else text, end=end, file=sys.stderr, flush=True)

    return tell


def built(args) -> tuple[revisions.Revision, revisions.Revision, Path, Path]:
    base, head = revisions.pair(ROOT, args.base, args.head)
    if changed := revisions.uncommitted(ROOT):
        some = ", ".join(changed[:3]) + (", .." if len(changed) > 3 else "")
        say(f"note: uncommitted changes are part of neither revision ({some}); commit them to measure them")
    old, new = (revisions.build(ROOT, args.cache, r) for r in (base, head))
    revisions.prune(args.cache)
    return base, head, old, new


def measured(args, bench: Bench, common) -> list[report.Result]:
    """All cases; then once more those that changed."""
    first = bench.measure(common.cases, args.rounds, progress("all cases", args.rounds))
    seen = findings(first)
    flagged = [case for case in common.cases if seen[case].flagged]
    again, confirmed = {}, {}
    if flagged:
        say("once more: " + ", ".join(f"{c.name} ({report.change(seen[c].change)})" for c in flagged))
        again = bench.measure(flagged, args.confirm_rounds, progress("what changed", args.confirm_rounds))
        confirmed = findings(again)
    return [report.Result(c, first[c], seen[c], again.get(c, []), confirmed.get(c)) for c in common.cases]


def compare(args) -> int:
    base, head, old, new = built(args)
    if args.build_only:
        print(f"{old}\n{new}")
        return 0
    if filecmp.cmp(old, new, shallow=False):
        print(f"{base} and {head} build the same program, byte for byte: no change")
        return 0
    with programs(args.cache, old, new) as arms:
        bench = Bench(arms, args.threads, random.Random(args.seed))
        common = bench.common(args.chosen)
        for words in common.missing:
            say(f"left out: {words}")
        say(f"{len(common.cases)} cases, {args.rounds} rounds, some {common.seconds * args.rounds:.0f} s")
        results = measured(args, bench, common)
    print(f"BASE {base}\nHEAD {head}\n{common.device}, {args.rounds} rounds; changes of time, + is slower\n")
    print(report.table(results, args.threshold) + "\n\n" + report.summary(results, args.threshold))
    if args.json:
        about = {"base": vars(base), "head": vars(head), "device": common.device, "left_out": common.missing}
        args.json.write_text(json.dumps(report.as_json(results, args.threshold, about), indent=1) + "\n")
    return int(any(r.regressed(args.threshold) for r in results))


def main() -> int:
    # So that programs are ended and temporary files removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = arguments()
    try:
        with revisions.only_here(args.cache):
            return compare(args)
    except (Trouble, OSError) as e:
        say(f"bench-compare: {e}")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""From two git revisions to two programs: names, one worktree, one build at a time, programs kept by commit."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import Trouble

# What the cargo of another day may have been told; programs built under other words are no pair.
SETTINGS = ("RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_", "CARGO_PROFILE_", "RUSTC", "RUSTUP_", "CC")
# Always ours: where the build goes, and that release builds are what the profile says.
OURS = {"CARGO_INCREMENTAL": "0"}


@dataclass(frozen=True)
class Revision:
    """A commit under the name it was asked for."""

    name: str
    commit: str
    tree: str
    subject: str

    def __str__(self):
        return f"{self.name} ({self.commit[:10]} {self.subject})"


def say(text: str):
    print(text, file=sys.stderr, flush=True)


def git(folder: Path, *words) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise Trouble(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.rstrip()


def resolve(root: Path, name: str) -> Revision:
    """The commit that a name means."""
    try:
        commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except Trouble:
        hint = "give a branch, a tag or a commit (git log --oneline)"
        raise Trouble(f"{name!r} is no revision of {root}: {hint}") from None
    tree, subject = git(root, "show", "--no-patch", "--format=%T %s", commit).split(" ", 1)
    return Revision(name, commit, tree, subject)


def pair(root: Path, base: str, head: str) -> tuple[Revision, Revision]:
    """Both revisions; Trouble where there is nothing to compare."""
    base, head = resolve(root, base), resolve(root, head)
    if base.commit == head.commit:
        raise Trouble(f"{base.name} and {head.name} are the same commit {base.commit[:10]}: nothing to compare")
    if base.tree == head.tree:
        raise Trouble(f"{base} and {head} have the same files: nothing to compare")
    return base, head


def uncommitted(root: Path) -> list[str]:
    """Changed and new files of the working tree."""
    return [line[3:] for line in git(root, "status", "--porcelain").splitlines()]


def only_here(cache: Path):
    """Holds the cache until the file is closed; Trouble when another process does."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = (cache / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise Trouble(f"another bench-compare uses {cache}: wait for it, or give another folder with --cache") from None
    return lock


def compiler() -> str:
    """What besides the sources decides about a program."""
    try:
        version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        raise Trouble(f"rustc -vV: {e}") from None
    return version + "".join(f"{k}={v}\n" for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS))


def build(root: Path, cache: Path, revision: Revision) -> Path:
    """The program of a revision, from the cache or built now.

    All revisions are built at one path with one target folder. So what they share is compiled once, and programs
    of equal sources are equal: paths of files are in the messages of panics. Checking out gives files that differ
    a new time of change, by which cargo knows what to compile again.
    """
    setting = hashlib.sha256(compiler().encode()).hexdigest()[:8]
    kept = cache / "programs" / f"{revision.commit}-{setting}"
    if kept.exists():
        os.utime(kept)
        return kept
    tree = cache / "tree"
    if not (tree / ".git").exists():
        # Forced, for a worktree that git still knows though somebody removed the cache.
        git(root, "worktree", "add", "--force", "--detach", str(tree), revision.commit)
    git(tree, "checkout", "--quiet", "--force", "--detach", revision.commit)
    git(tree, "clean", "-fdxq")
    say(f"building {revision}")
    command = ["cargo", "build", "--release", "--locked", "--package", "doyen", "--bin", "doyen"]
    target = cache / "build"
    done = subprocess.run(command, check=False, cwd=tree, env={**os.environ, **OURS, "CARGO_TARGET_DIR": str(target)})
    if done.returncode:
        raise Trouble(f"{revision} does not build (see above); its sources are in {tree}")
    kept.parent.mkdir(exist_ok=True)
    # Last under its name, so that an interrupted copy is made again.
    shutil.copy(target / "release" / "doyen", kept.with_suffix(".part"))
    kept.with_suffix(".part").rename(kept)
    return kept


def prune(cache: Path, keep: int = 12):
    """Removes the programs that were used longest ago: each is some 90 MB."""
    programs = sorted((cache / "programs").iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in programs[keep:]:
        old.unlink()

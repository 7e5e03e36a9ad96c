"""`scripts/compare`: what two versions of kvpin do differently with the same requests, byte for byte.

It says nothing, and exits with 0, if there is no difference.

    scripts/compare OLD NEW            each a checkout, a revision, or a file that --record wrote
    scripts/compare --record FILE NEW  writes what NEW does
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.compare.transcripts import Transcript, differences, masked, read, write
from tests.compare.world import ROOT, run


def main() -> None:
    """Compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help="a checkout, a revision or a recorded file"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what the version does to FILE")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name has the pattern")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    versions, only = arguments.versions, arguments.only
    expected = 1 if arguments.record or arguments.child else 2
    if len(versions) != expected:
        parser.error(f"name {expected} version{'s' if expected > 1 else ''}")
    if arguments.child:
        with tempfile.TemporaryDirectory() as directory:
            write(arguments.child, asyncio.run(run(Path(versions[0]), Path(directory), only)))
        return
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda version: transcript_of(version, only), versions))
    if arguments.record:
        write(arguments.record, found[0])
        return
    lines = list(differences(*found))
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(bool(lines))


def transcript_of(version: str, only: str = "") -> Transcript:
    """What a version does: recorded in a file, or run in a process of its own.

    Raises:
        CalledProcessError: its kvpin does not run.
    """
    if Path(version).is_file():
        return read(Path(version))
    with checkout_of(version) as checkout, tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "transcript"
        command = [sys.executable, "-m", "tests.compare", "--child", file, "--only", only, checkout]
        subprocess.run(command, cwd=ROOT, check=True)
        return masked(read(file), (checkout, ROOT))


@contextmanager
def checkout_of(version: str) -> Iterator[Path]:
    """The directory of a version; one of a revision is temporary."""
    if Path(version).is_dir():
        yield Path(version).resolve()
        return
    git = ["git", "-C", ROOT, "worktree"]
    with tempfile.TemporaryDirectory() as parent:
        place = Path(parent) / "checkout"
        subprocess.run([*git, "add", "--quiet", "--detach", place, version], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", place], check=True)


if __name__ == "__main__":
    main()

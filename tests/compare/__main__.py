"""`scripts/compare`: says what two versions of kvpin do differently with the same requests.

scripts/compare OLD NEW            each a checkout, a revision, or a file that --record wrote
scripts/compare --record FILE NEW  writes what NEW does
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.compare.cases import cases
from tests.compare.masks import masked
from tests.compare.world import ROOT, Transcript, run


def main() -> None:
    """Compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help="a checkout, a revision or a recorded file"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what the version does to FILE")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases whose name contains TEXT, in a new world"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        wanted = [case for case in cases() if arguments.only in case.name]
        checkout = Path(arguments.versions[0])
        with tempfile.TemporaryDirectory() as directory:
            write(arguments.child, masked(asyncio.run(run(checkout, Path(directory), wanted)), checkout))
        return
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda version: transcript_of(version, arguments.only), arguments.versions))
    if arguments.record:
        write(arguments.record, found[0])
        return
    differs = False
    for line in differences(*found):
        differs = True
        print(line)
    sys.exit(differs)


def transcript_of(version: str, only: str = "") -> Transcript:
    """What a version does: recorded in a file, or run in a process of its own."""
    if Path(version).is_file():
        return read(Path(version))
    with checkout_of(version) as checkout, tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "transcript"
        command = [sys.executable, "-m", "tests.compare", "--child", str(file), "--only", only, str(checkout)]
        subprocess.run(command, cwd=ROOT, check=True)
        return read(file)


@contextmanager
def checkout_of(version: str) -> Iterator[Path]:
    """The directory of a version; one of a revision is temporary."""
    if Path(version).is_dir():
        yield Path(version).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as parent:
        place = Path(parent) / "checkout"
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), version], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def differences(old: Transcript, new: Transcript) -> Iterator[str]:
    """A unified diff of each part of each case that differs."""
    for case in dict.fromkeys((*old, *new)):
        before, after = old.get(case, {}), new.get(case, {})
        for part in dict.fromkeys((*before, *after)):
            texts = before.get(part, ""), after.get(part, "")
            if texts[0] != texts[1]:
                lines = (text.splitlines() for text in texts)
                yield from difflib.unified_diff(
                    *lines, f"{case}, {part}, old", f"{case}, {part}, new", n=2, lineterm=""
                )


def write(file: Path, transcript: Transcript) -> None:
    """Writes a transcript, compressed."""
    file.write_bytes(lzma.compress(json.dumps(transcript).encode(), preset=9))


def read(file: Path) -> Transcript:
    """Reads one."""
    return json.loads(lzma.decompress(file.read_bytes()))


if __name__ == "__main__":
    main()

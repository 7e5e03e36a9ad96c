"""Environments of the clients, in the cache: one for each file of pins, made when it is first needed.

python -m tests.clients.environments          makes all of them
python -m tests.clients.environments --lock   writes the newest versions into pins/
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.make_gguf import cache_dir
from tests.clients.matrix import CLIENTS, REQUIREMENTS, Client

HERE = Path(__file__).parent
PINS, PROGRAMS = HERE / "pins", HERE / "programs"
UV = "uv==0.13.9"


class NotInstalled(Exception):
    """An environment could not be made."""


def program_of(client: Client) -> list[str]:
    """The command that runs a client's program in its environment, without the world."""
    home, program = environment(client.pins), PROGRAMS / client.program
    if program.suffix == ".py":
        return [str(home / "bin" / "python"), str(program)]
    return [str(home / "node_modules" / "node" / "bin" / "node"), str(program)]


@functools.cache
def environment(name: str) -> Path:
    """The directory of an environment, which is made if it is missing."""
    pins = PINS / name
    files = sorted(pins.iterdir()) if pins.is_dir() else [pins.with_suffix(".txt")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    home = cache_dir() / f"clients-{name}-{digest}"
    with _only_one(name):
        if not home.exists():
            made = home.with_suffix(".new")
            shutil.rmtree(made, ignore_errors=True)
            print(f"installing {name} into {home} …", file=sys.stderr)  # noqa: T201
            if pins.is_dir():
                _install_node(files, made)
            else:
                _install_python(files[0], made)
            made.rename(home)
    return home


def _install_python(requirements: Path, home: Path) -> None:
    uv = _uv()
    _call(uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, home)
    into = ("--python", home / "bin" / "python", "--compile-bytecode")
    _call(uv, "pip", "install", "--quiet", *into, "--requirements", requirements)


def _install_node(files: list[Path], home: Path) -> None:
    home.mkdir()
    for file in files:
        shutil.copy(file, home)
    _call("npm", "ci", "--no-audit", "--no-fund", "--loglevel", "error", cwd=home)


@functools.cache
def _uv() -> Path:
    home = cache_dir() / UV.replace("==", "-")
    if not home.exists():
        made = home.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        _call(sys.executable, "-m", "venv", made)
        _call(made / "bin" / "python", "-m", "pip", "--quiet", "install", UV)
        made.rename(home)
    return home / "bin" / "uv"


@contextmanager
def _only_one(name: str) -> Iterator[None]:
    """Keeps another process from installing the same at the same time."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f"clients-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _call(*command: str | Path, cwd: Path | None = None) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalled(
            f"run 'python -m tests.clients.environments' once with a network connection: {error}"
        ) from error


def lock() -> None:
    """Pins the newest versions of everything that `matrix.REQUIREMENTS` allows."""
    for name, wanted in REQUIREMENTS.items():
        if (PINS / name).is_dir():
            options = ("--package-lock-only", "--omit-lockfile-registry-resolved", "--ignore-scripts")
            _call("npm", "install", *options, "--save-exact", *wanted, cwd=PINS / name)
            continue
        command = [_uv(), "pip", "compile", "-", "--universal", "--python-version", "3.11", "--no-annotate"]
        text = subprocess.run(
            [*command, "--no-header", "--quiet"],
            input="\n".join(wanted),
            text=True,
            check=True,
            capture_output=True,
        ).stdout
        (PINS / f"{name}.txt").write_text(text)


def install(names: Iterable[str]) -> None:
    """Makes the environments of these clients.

    Raises:
        NotInstalled: one could not be made.
    """
    for pins in dict.fromkeys(CLIENTS[name].pins for name in names):
        environment(pins)


def main() -> None:
    """The command line."""
    if sys.argv[1:] == ["--lock"]:
        lock()
    try:
        install(CLIENTS)
    except NotInstalled as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

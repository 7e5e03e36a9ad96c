"""The vocabularies and chat templates that llama-cpp-python ships: fetched once, cached."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from scripts.make_gguf import cache_dir

VERSION = "0.3.36"
_MODELS = "/vendor/llama.cpp/models/"
_KINDS = (".jinja", ".gguf", ".inp", ".out")


def shipped_models() -> Path:
    """The directory of the vocabularies and templates that llama-cpp-python ships."""
    directory = cache_dir() / f"llama-models-{VERSION}"
    if not directory.exists():
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir()) as work:
            _unpack(_download(Path(work)), Path(work) / "models")
            (Path(work) / "models").rename(directory)
    return directory


def _download(work: Path) -> Path:
    """The sources as an archive. pip asks their build backend for the version, so it must be there."""
    subprocess.run([sys.executable, "-m", "venv", str(work / "tools")], check=True)
    pip = [str(work / "tools/bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "scikit-build-core>=0.9.2"], check=True)
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(work)]
    subprocess.run([*pip, "download", *options, f"llama-cpp-python=={VERSION}"], check=True)
    return next(work.glob("*.tar.gz"))


def _unpack(archive: Path, directory: Path) -> None:
    directory.mkdir()
    with tarfile.open(archive) as files:
        for member in files:
            content = files.extractfile(member) if _MODELS in member.name else None
            if content is not None and member.name.endswith(_KINDS):
                (directory / Path(member.name).name).write_bytes(content.read())

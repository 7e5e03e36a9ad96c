"""What users install holds all that kvpin needs, and nothing else. scripts/test-packaging installs it."""

import re
import shutil
import subprocess
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from proxy.core.peers.messages import VERSION
from proxy.fleet.saved_state import SavedState, encode

ROOT = Path(__file__).parent.parent
PACKAGES = {
    path.relative_to(ROOT).as_posix()
    for package in ("proxy", "engine_adapter")
    for path in (ROOT / package).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("wheel"))
    return zipfile.ZipFile(next(WheelBuilder(str(ROOT)).build(directory=folder, versions=["standard"])))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(next(SdistBuilder(str(ROOT)).build(directory=str(folder)))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    assert {"proxy/py.typed", "proxy/api/static/index.html"} < PACKAGES
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == PACKAGES


def test_the_wheel_brings_the_licences_of_what_it_holds(wheel):
    licences = [name.rpartition("/")[2] for name in wheel.namelist() if ".dist-info/licenses/" in name]
    assert sorted(licences) == ["LICENSE", "htm.LICENSE", "preact.LICENSE", "uplot.LICENSE"]


def test_a_wheel_made_from_the_sdist_is_the_same(wheel, sdist, tmp_path):
    made = next(WheelBuilder(str(sdist)).build(directory=str(tmp_path), versions=["standard"]))
    assert zipfile.ZipFile(made).namelist() == wheel.namelist()


def test_the_sdist_holds_little_else(sdist):
    files = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    others = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", ".gitignore"}
    assert files == PACKAGES | others


def test_there_is_one_version():
    mine = version("kvpin")
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "kvpin" / "Chart.yaml").read_text())
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert {chart["version"], chart["appVersion"], newest} == {mine}


def test_the_newest_release_names_what_it_understands():
    changes = (ROOT / "CHANGELOG.md").read_text()
    said = re.match(r".*?^### Compatibility\n(.*?)^### ", changes, re.MULTILINE | re.DOTALL)[1]
    state = encode(SavedState(isolated=False, pins=[], engines=[])).split(maxsplit=2)[1].decode()
    assert f"Exchange between kvpins: version {VERSION[0]}." in said
    assert f"Files of `state_dir`: version {state}." in said


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        ([], "engine,examples"),
        (["--port", "1"], "engine,examples"),
        (["--managed", "embedded: --model x"], "engine,examples"),
        (["--engine", "vllm=http://h", "--engine", "embedded"], "engine,examples"),
        (["--engine", "vllm=http://h", "--config", "kvpin.toml"], "engine,examples"),
        (["--engine", "llama-server: -m model.gguf -np 4"], "examples"),
        (["--engine=vllm=http://h", "--port", "1"], "examples"),
        (["--engines-from", "dns://h:1"], "engine,examples"),
    ],
)
def test_serve_installs_torch_only_for_embedded_engines(tmp_path, words, extras):
    for name, text in (("scripts/install", "echo $1"), (".venv/bin/kvpin", "echo $*")):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    script = shutil.copy(ROOT / "scripts" / "serve", tmp_path / "scripts" / "serve")
    said = subprocess.run([script, *words], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [extras, " ".join(["serve", *words])]

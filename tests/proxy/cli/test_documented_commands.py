"""Every command that the documentation shows: run, or at least read, or named as one that no test runs."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml
from helm_python import chart

from proxy.cli.main import app
from proxy.server import run
from scripts.documented_commands import NOT_RUN, READ, ROOT, RULES, RUN, rule_of, shown
from tests.llama import llama_server

EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
SHOWN = list(shown())
UsageError = typer.BadParameter.__base__


def of_rule(by):
    """Pages and commands that one test is for."""
    ruled = ((page, command, rule_of(command)) for page, command in SHOWN)
    return [(page, command) for page, command, rule in ruled if rule and rule.by.endswith(f"::{by}")]


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_it_is_known_what_becomes_of_it(page, command):
    assert rule_of(command) is not None, "scripts/documented_commands.py needs a rule for it"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern[:40])
def test_every_rule_is_of_use_and_tells_what_there_is(rule):
    assert any(rule_of(command) is rule for _, command in SHOWN)
    assert rule.fate in (RUN, READ, NOT_RUN)
    if rule.fate != NOT_RUN:
        path, _, name = rule.by.partition("::")
        assert (f"def {name}(" if name else "") in (ROOT / path).read_text(encoding="utf-8")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A directory with the files that commands name."""
    monkeypatch.chdir(tmp_path)
    Path("kvpin.toml").touch()
    Path("tests").symlink_to(ROOT / "tests")
    request = {"input_length": 70, "output_length": 1, "block_tokens": 64}
    lines = [request | {"timestamp": 1000 * n, "hash_ids": [n % 5]} for n in range(20)]
    Path("traffic.jsonl").write_text("\n".join(map(json.dumps, lines)))


@contextmanager
def allowing(pattern):
    """Errors of use whose message has the pattern."""
    try:
        yield
    except UsageError as error:
        if not re.search(pattern, error.format_message()):
            raise


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("page", "command"), of_rule("test_kvpin_reads_it"))
def test_kvpin_reads_it(kvpin, page, command, monkeypatch):
    """`serve` makes its settings, or refuses them in the words that the page quotes. Of others, no option is
    unknown; in the midst of a sentence, some arguments may be left out."""
    words = shlex.split(command.replace("…", "").replace("$KEY", "KEY"))
    if words[0] == "docker":
        words = words[words.index("kvpin") :]
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "scripts/serve":
        words[:1] = ["kvpin", "serve"]
    if words[1] == "serve":
        monkeypatch.setattr(run, "serve", lambda load: load() and 0)
        result = kvpin(*words[1:])
        assert result.exit_code == 0 or result.stderr.strip() in (ROOT / page).read_text(encoding="utf-8")
        return
    program, names = typer.main.get_command(app), words[1:]
    while names and hasattr(program, "commands") and names[0] in program.commands:
        program = program.commands[names.pop(0)]
    left_out = nullcontext()
    if f"`{command}`" in (ROOT / page).read_text(encoding="utf-8"):
        left_out = allowing("Missing|requires an argument")
    with left_out:
        program.make_context("kvpin", names)


@pytest.mark.parametrize(("page", "command"), of_rule("test_bash_reads_it"))
def test_bash_reads_it(page, command):
    named = [ROOT / word for word in command.split() if word.startswith("scripts/")]
    assert [path for path in named if not path.exists()] == [], page
    assert os.access(named[0], os.X_OK)
    subprocess.run(["bash", "-n", named[0]], check=True)


@pytest.mark.parametrize(("page", "command"), of_rule("test_llama_server_reads_it"))
def test_llama_server_reads_it(page, command, tmp_path):
    """With `--help`, it ends when it has read its words."""
    words = shlex.split(command.replace("/dev/shm/kv", str(tmp_path)))  # noqa: S108 - as the page has it
    words = [llama_server(), *words[1:], "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, "--slot-save-path PATH" in done.stdout) == (0, True), (page, done.stderr)


@pytest.mark.parametrize(("page", "command"), of_rule("test_helm_renders_it"))
def test_helm_renders_it(page, command):
    """With the file of values that the page shows."""
    name, path, *words = shlex.split(command)[2:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    (text,) = re.findall(
        rf"^# {given['--values']}\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    key, _, value = given["--set"].partition("=")
    above, _, leaf = key.partition(".")
    values = yaml.safe_load(text) | {above: {leaf: value}}
    with chart.Chart.load(str(ROOT / path)) as loaded:
        rendered = "".join(loaded.render(values=values, name=name, namespace=given["--namespace"]).values())
    assert value in rendered
    assert values["settings"]["discovery"][0]["source"] in rendered


@pytest.mark.parametrize(("page", "command"), of_rule("test_what_it_names_is_there"))
def test_what_it_names_is_there(page, command):
    """Files of the checkout, stages and variables of Docker's files, systemd's units, extras."""
    words = shlex.split(command)
    files = [ROOT / word for word in words if word.startswith("deploy/") or word == "constraints.txt"]
    assert [path for path in files if not path.exists()] == [], page
    texts = "".join(path.read_text("utf-8") for path in files if path.suffix != ".txt")
    for flag, word in pairwise(words):
        wanted = {"--target": f" AS {word}\n", "--profile": f"profiles: [{word}]"}.get(flag, "")
        assert wanted in texts
    for word in words:
        name = re.match(r"([A-Z]+)=", word)
        assert name is None or f"${{{name[1]}:" in texts
        assert not re.fullmatch(r"kvpin\.\w+", word) or (ROOT / "deploy" / "systemd" / word).exists()
        extras = re.fullmatch(r"(?:kvpin|\.)\[(.*)\]", word)
        assert extras is None or set(extras[1].split(",")) <= EXTRAS


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("page", "command"), of_rule("test_replays_work"))
def test_replays_work(kvpin, page, command):
    """On the beginning of the trace."""
    words = shlex.split(command)[1:]
    result = kvpin(*words, "--jobs", "1", "--limit", "20")
    assert result.exit_code == 0, (page, result.output)
    for flag, path in re.findall(r"--(json|csv) (\S+)", command):
        assert Path(path).stat().st_size > 100, flag


@pytest.mark.parametrize(("page", "command"), of_rule("test_the_hash_of_a_key"))
def test_the_hash_of_a_key(page, command):
    words, env = ["sh", "-c", command], {"KEY": "a key"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == hashlib.sha256(b"a key").hexdigest(), page


@pytest.mark.live
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("page", "command"), of_rule("test_curl_watches_events"))
def test_curl_watches_events(live_proxy, page, command):
    words = shlex.split(
        command.replace("http://127.0.0.1:8000", live_proxy).replace("$KVPIN_ADMIN_KEY", "secret")
    )
    with subprocess.Popen([*words, "--silent"], stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout.readline() == "event: snapshot\n", page
        curl.kill()

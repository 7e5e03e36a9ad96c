"""Every command that the documentation shows: run, or at least read, or named as one that no test runs."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import typer

from proxy import server
from proxy.cli.main import app
from scripts.documented_commands import NOT_RUN, READ, ROOT, RULES, RUN, commands, rule_of, shown

SHOWN = list(shown())
UsageError = typer.BadParameter.__base__


def of_rule(by):
    """Pages and commands that one test is for."""
    return [
        (page, command)
        for page, command in SHOWN
        if (rule := rule_of(command)) and rule.by.endswith(f"::{by}")
    ]


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


def test_commands_of_a_page():
    page = (
        "```\nA=1 kvpin serve --engine \\\n  x   # comment\noutput\n```\n"
        "```console\n$ kvpin stats\nkvpin: output\n```\n"
        "`kvpin route --all`, `kvpin is a proxy`, `scripts/test`, `other`\n```toml\nkvpin = 1\n```\n"
    )
    assert commands(page) == [
        "A=1 kvpin serve --engine x",
        "kvpin stats",
        "kvpin route --all",
        "scripts/test",
    ]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A directory with the files that commands name."""
    monkeypatch.chdir(tmp_path)
    Path("kvpin.toml").touch()
    Path("tests").symlink_to(ROOT / "tests")
    lines = [
        {
            "timestamp": 1000 * n,
            "input_length": 70,
            "output_length": 1,
            "hash_ids": [n % 5],
            "block_tokens": 64,
        }
        for n in range(20)
    ]
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
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "scripts/serve":
        words[:1] = ["kvpin", "serve"]
    if words[1] == "serve":
        monkeypatch.setattr(server, "serve", lambda load: load() and 0)
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


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("page", "command"), of_rule("test_replays_work"))
def test_replays_work(kvpin, page, command):
    """On the beginning of the trace."""
    words = shlex.split(command)[1:]
    result = kvpin(*words, "--jobs", "1", "--limit", "20")
    assert result.exit_code == 0, (page, result.output)
    for flag, path in re.findall(r"--(json|csv|plot|html) (\S+)", command):
        assert Path(path).stat().st_size > 100, flag


@pytest.mark.parametrize(("page", "command"), of_rule("test_the_hash_of_a_key"))
def test_the_hash_of_a_key(page, command):
    done = subprocess.run(
        ["sh", "-c", command], env={"KEY": "a key"}, capture_output=True, text=True, check=True
    )
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

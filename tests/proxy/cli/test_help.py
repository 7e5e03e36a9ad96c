import re

import pytest

from scripts.make_reference import cli_page

HELP = cli_page()


def test_no_type_of_python_is_shown():
    assert re.findall(r"<[\w\[\] ]+>", HELP) == []


@pytest.mark.parametrize(
    "line",
    [
        "Usage: kvpin init [OPTIONS] URL...",
        "Usage: kvpin requests [OPTIONS] [ID]",
        "Usage: kvpin engines add [OPTIONS] KIND=URL[,name=value…]",
        "  URL  Addresses of kvpins or engines, with /v1 or without; several are compared.  [required]",
        "  --port PORT                     Port, 0 for a free one [8000].",
    ],
)
def test_what_is_shown_instead(line):
    assert f"\n{line}\n" in HELP


@pytest.mark.parametrize("words", [(), ("engines",), ("tables",), ("config",)], ids=" ".join)
def test_summaries_are_not_cut(kvpin, words):
    summaries = kvpin(*words, "--help").stdout.partition("\nCommands:\n")[2]
    assert summaries
    assert "..." not in summaries


def test_an_argument_without_help_is_shown(kvpin):
    result = kvpin("engines", "add", "--help")
    assert "\nArguments:\n  KIND=URL[,name=value…]  [required]\n" in result.stdout

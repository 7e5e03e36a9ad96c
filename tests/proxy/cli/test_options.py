import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from proxy.cli.options import option, with_options


@dataclass(frozen=True)
class Place:
    host: str = option("NAME", "Where.", "here", envvar="THE_HOST")
    port: int = option("N", "Which.", 8000)


@with_options
def visit(
    *,
    name: Annotated[str, typer.Argument()],
    place: Place,
    loud: Annotated[bool, typer.Option("--loud")] = False,
) -> None:
    """Visit somebody."""
    typer.echo(f"{name} {place} {loud}")


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(visit)
    return lambda *words, **env: CliRunner().invoke(app, words, env=env)


def test_a_dataclass_becomes_its_options_in_its_place():
    assert [*inspect.signature(visit).parameters] == ["name", "host", "port", "loud"]


def test_a_command_gets_the_dataclass(run):
    assert run("ada", "--port", "9").stdout == "ada Place(host='here', port=9) False\n"
    assert run("ada", "--loud", THE_HOST="there").stdout == "ada Place(host='there', port=8000) True\n"


def test_its_help_is_the_commands_own(run):
    text = run("--help").stdout
    assert "Visit somebody." in text
    assert "Where." in text

"""Calls of the admin API. A call that fails ends the program with one line."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
POLL_S = 0.2
TIMEOUT_S = 75.0
# Fields of the admin API → flags; other fields come from arguments without a flag.
_SAME = ("prompt", "token_ids", "prompt_cache_key", "engine", "tenant", "model", "cache_salt", "all", "limit")
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in _SAME} | {
    "messages": "--messages-file",
    "ttl_s": "--ttl",
}
# Field names in messages: after a path, or by names that cannot be English words.
_PATH = re.compile(r"^(.*) - at `\$\.(\w+)([^`]*)`$")
_FIELD = re.compile(r"\b(token_ids|prompt_cache_key|cache_salt|ttl_s)\b")

UrlOption = Annotated[str, typer.Option("--url", envvar="KVPIN_URL", metavar="URL", help="Address of kvpin.")]
AdminKeyOption = Annotated[
    str | None,
    typer.Option("--admin-key", envvar="KVPIN_ADMIN_KEY", metavar="KEY", help="Key of the admin API."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Calls `/admin/v1` of one kvpin. A failure ends the program with one line and status 1."""

    url: str
    admin_key: str | None

    def get(self, path: str, **query: str | int) -> Any:  # noqa: ANN401 - JSON
        """Sends a GET; returns the decoded answer."""
        return self._call("GET", path, params=query)

    def post(self, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """Sends a POST with JSON; returns the decoded answer."""
        return self._call("POST", path, json=body)

    def delete(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Sends a DELETE; returns the decoded answer, None for an empty one."""
        return self._call("DELETE", path)

    def run(self, verb: str, body: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Starts an operation and waits for its end. Ctrl-C cancels it.

        Args:
            verb: e.g. `flush`.
            body: its target and options.
            show: called with the operation after each poll.
        """
        operation: dict[str, Any] = self.post(f"/{verb}", {**body, "wait_s": 0.1})
        try:
            while operation["state"] == "running":
                show(operation)
                time.sleep(POLL_S)
                operation = self.get(f"/operations/{operation['id']}")
        except KeyboardInterrupt:
            self.delete(f"/operations/{operation['id']}")
            typer.echo(f"cancelled {operation['id']}", err=True)
            raise typer.Exit(130) from None
        show(operation)
        return operation

    def _call(self, method: str, path: str, **options: Any) -> Any:  # noqa: ANN401 - JSON
        import httpx  # noqa: PLC0415 - `kvpin serve` starts without it

        headers = {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}
        # The base_url of clients, with its /v1, is taken too.
        base = self.url.rstrip("/").removesuffix("/v1").removesuffix("/admin")
        address = f"{base}/admin/v1{path}"
        try:
            answer = httpx.request(
                method, address, headers=headers, timeout=TIMEOUT_S, trust_env=False, **options
            )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            fail(f"--url {self.url!r} is not an address: {error}")
        except httpx.ConnectError:
            fail(f"nothing answers at {self.url}: start kvpin, or name its address (--url or KVPIN_URL)")
        except httpx.HTTPError as error:
            fail(f"{self.url}: {str(error) or type(error).__name__}")
        if answer.is_error:
            fail(_error_of(answer))
        return answer.json() if answer.content else None


def fail(message: str) -> NoReturn:
    """Ends the program with one line on standard error and status 1."""
    typer.echo(f"kvpin: {message}", err=True)
    raise typer.Exit(1)


def print_json(value: object) -> None:
    """Prints an answer as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _error_of(answer: httpx.Response) -> str:
    """The message of an error in OpenAI's shape, in terms of flags; without a message, the status."""
    try:
        error = answer.json()["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{answer.request.url}: {answer.status_code} {answer.reason_phrase}"
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return "the admin key is missing or wrong: use --admin-key or KVPIN_ADMIN_KEY (401)"
    return f"{_with_flags(message, param)} ({answer.status_code})"


def _with_flags(message: str, param: object) -> str:
    """A message of the admin API with the flags of this program in place of the API's fields."""
    message = _PATH.sub(lambda match: f"{_FLAGS.get(match[2], match[2])}{match[3]}: {match[1]}", message)
    message = _FIELD.sub(lambda match: _FLAGS[match[0]], message)
    field = re.split(r"[.\[]", param)[0] if isinstance(param, str) else ""
    flag = _FLAGS.get(field)
    if flag is not None and message.startswith(f"{field} "):
        message = flag + message.removeprefix(field)
    return message if flag is None or flag in message or field in message else f"{message} ({flag})"

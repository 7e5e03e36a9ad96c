"""Calls of the admin API, and options that commands share. A call that fails ends the program with one
line."""

from __future__ import annotations

import inspect
import json
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints
from urllib.parse import quote

import typer

if TYPE_CHECKING:
    import httpx


# --- options as fields of a dataclass: declared once, and one argument of each command that has them ----

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def option(value: str | None, text: str, default: Any = None, *names: str, **more: Any) -> Any:  # noqa: ANN401 - of any type
    """A field that is an option: the word for its value and its help; else as `typer.Option` takes it."""
    return field(default=default, metadata={"option": typer.Option(*names, metavar=value, help=text, **more)})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: an argument whose type is a dataclass becomes the options that the
    dataclass declares, in its place."""
    arguments = inspect.signature(command, eval_str=True).parameters.values()
    groups, parameters = dict[str, Any](), list[inspect.Parameter]()
    for each in arguments:
        if is_dataclass(each.annotation):
            groups[each.name] = each.annotation
            parameters += _options_of(each.annotation)
        else:
            parameters.append(each.replace(kind=_KEYWORD))

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401 - typer passes what it parsed
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(kind: Any) -> list[inspect.Parameter]:  # noqa: ANN401 - a dataclass
    hints = get_type_hints(kind, include_extras=True)
    types = {each.name: Annotated[hints[each.name], each.metadata["option"]] for each in fields(kind)}
    return [
        inspect.Parameter(each.name, _KEYWORD, default=each.default, annotation=types[each.name])
        for each in fields(kind)
    ]


def flag_of(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


# --- calls of the admin API. A call that fails ends the program with one line ---------------------------

_URL = "http://127.0.0.1:8000"
POLL_S = 0.2
TIMEOUT_S = 75.0
_NO_KVPIN = "is no kvpin: name kvpin's address (--url or KVPIN_URL)"
KEY_FILE = "KVPIN_ADMIN_KEY_FILE"
_KEY_HELP = f"Key of the admin API; or {KEY_FILE}."
# Seconds without an event. A snapshot comes every second.
EVENT_S = 15.0
# Fields of the admin API → flags; other fields come from arguments without a flag.
_SAME = (
    "prompt", "token_ids", "prompt_cache_key", "engine", "tenant", "model", "cache_salt", "all", "limit",
    "name", "expires", "extra_id", "new_tenant",
)  # fmt: skip
_FLAGS = {name: flag_of(name) for name in _SAME} | {
    "messages": "--messages-file",
    "ttl_s": "--ttl",
    "models": "--model",
    "table_id": "--id",
}
# Field names in messages: after a path, or by names that cannot be English words.
_PATH = re.compile(r"^(.*) - at `\$\.(\w+)([^`]*)`$")
_FIELD = re.compile(r"\b(token_ids|prompt_cache_key|cache_salt|ttl_s|extra_id|table_id|new_tenant)\b")

JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def path_part(name: str) -> str:
    """A word of the command line as one part of a path."""
    return quote(name, safe="", errors="surrogateescape")


class AdminError(Exception):
    """A call failed: why, in one line."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Calls `/admin/v1` of one kvpin. A failure ends the program with one line and status 1.

    Its fields are options of a command, see `option`. Without an `admin_key`, the one in the file that
    KVPIN_ADMIN_KEY_FILE names is taken, if any.
    """

    url: str = option("URL", "Address of kvpin.", _URL, envvar="KVPIN_URL")
    admin_key: str | None = option("KEY", _KEY_HELP, envvar="KVPIN_ADMIN_KEY")

    def get(self, path: str, **query: str | int) -> Any:  # noqa: ANN401 - JSON
        """Sends a GET; returns the decoded answer."""
        return self._call("GET", path, params=query)

    def post(self, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """Sends a POST with JSON; returns the decoded answer."""
        try:
            content = json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
        except ValueError:
            fail("numbers must be finite, and texts must be UTF-8")
        return self._call("POST", path, content=content, headers={"content-type": "application/json"})

    def upload(self, path: str, content: bytes, **query: str | int) -> Any:  # noqa: ANN401 - JSON
        """Sends a POST with bytes; returns the decoded answer."""
        from rich.console import Console  # noqa: PLC0415 - slow to import

        headers = {"content-type": "application/octet-stream"}
        with Console(stderr=True).status(f"sending {len(content):,} bytes to {self.url} …"):
            return self._call("POST", path, content=content, headers=headers, params=query)

    def delete(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Sends a DELETE; returns the decoded answer, None for an empty one."""
        return self._call("DELETE", path)

    def run(self, verb: str, body: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Starts an operation and waits for its end. Ctrl-C cancels it. `show` gets it after each poll."""
        operation: dict[str, Any] = self.post(f"/{verb}", {**body, "wait_s": 0.1})
        try:
            while operation["state"] == "running":
                show(operation)
                time.sleep(POLL_S)
                operation = self.get(f"/operations/{operation['id']}")
        except KeyboardInterrupt:
            ended = self.delete(f"/operations/{operation['id']}")  # it may have ended by itself
            typer.echo(f"{ended['state']} {operation['id']}", err=True)
            raise typer.Exit(130) from None
        show(operation)
        return operation

    def _call(self, method: str, path: str, **options: Any) -> Any:  # noqa: ANN401 - JSON
        try:
            with self._stream(method, path, TIMEOUT_S, **options) as answer:
                content = answer.read()
        except AdminError as error:
            fail(str(error))
        try:
            return json.loads(content) if content else None
        except ValueError:
            fail(f"{self.url} {_NO_KVPIN}")

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """The server-sent events of a GET: names and decoded data, until kvpin ends the stream. Raises
        AdminError if kvpin does not answer, refuses, or breaks off."""
        with self._stream("GET", path, EVENT_S) as answer:
            name, rest = "", b""
            for data in answer.iter_bytes():
                *lines, rest = (rest + data).split(b"\n")  # httpx ends lines within texts, too
                for line in lines:
                    field, _, value = line.partition(b": ")
                    if field == b"event":
                        name = value.decode()
                    elif field == b"data":
                        yield name, json.loads(value)

    def _is_kvpin(self, client: httpx.Client, headers: dict[str, str]) -> bool:
        """True if there is what every kvpin has."""
        with client.stream("GET", f"{base_of(self.url)}/admin/v1/engines", headers=headers) as answer:
            return answer.status_code != HTTPStatus.NOT_FOUND

    @contextmanager
    def _stream(
        self,
        method: str,
        path: str,
        timeout_s: float,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        **options: Any,  # noqa: ANN401
    ) -> Iterator[httpx.Response]:
        """The answer to a request, once its headers are there; raises AdminError."""
        import httpx  # noqa: PLC0415 - `kvpin serve` starts without it

        address = f"{base_of(self.url)}/admin/v1{path}"
        sent = {**headers, **key_header(self.admin_key or _key_in_file())}
        try:
            with (
                httpx.Client(timeout=timeout_s, trust_env=False, verify=authorities()) as client,
                client.stream(method, address, headers=sent, **options) as answer,
            ):
                if not answer.is_success:
                    answer.read()
                    if not _tells_operation(answer):
                        is_missing = answer.status_code == HTTPStatus.NOT_FOUND
                        is_there = not is_missing or self._is_kvpin(client, sent)
                        raise AdminError(_error_of(answer) if is_there else f"{self.url} {_NO_KVPIN}")
                yield answer
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise AdminError(f"--url {self.url!r} is not an address: {error}") from error
        except httpx.ConnectError as error:
            raise AdminError(
                untrusted(self.url, error)
                or f"nothing answers at {self.url}: start kvpin, or name its address (--url or KVPIN_URL)"
            ) from error
        except httpx.HTTPError as error:
            raise AdminError(f"{self.url}: {str(error) or type(error).__name__}") from error


def base_of(url: str) -> str:
    """The address of a kvpin. The base_url of clients, with its /v1, and the admin API's are taken too."""
    return url.rstrip("/").removesuffix("/v1").removesuffix("/admin")


def authorities() -> ssl.SSLContext:
    """The authorities that may have signed a kvpin's certificate: those of `SSL_CERT_FILE` and
    `SSL_CERT_DIR`, else the machine's own."""
    return ssl.create_default_context()


def untrusted(url: str, error: BaseException) -> str | None:
    """The error's text if what answers at `url` has a certificate that is not trusted; None for any other
    error of a connection."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    return (
        f"the certificate of {url} is not trusted: {cause.verify_message}; SSL_CERT_FILE=FILE names the "
        "authorities that signed it"
    )


def key_header(key: str | None) -> dict[str, str]:
    """The header that carries a key, if there is one. One that no header can carry ends the program."""
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        fail("no header can carry the key: it must be one line of ASCII")
    return {"authorization": f"Bearer {key}"} if key else {}


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends the program with one line on standard error, and this status."""
    typer.echo(f"kvpin: {message}", err=True)
    raise typer.Exit(status)


def show(answer: Any, view: str, *, as_json: bool) -> None:  # noqa: ANN401 - JSON
    """Prints an answer as JSON, or by the function that `view` names: `answer_tables.show_stats`. It is
    imported late, because rich is slow to import."""
    if as_json:
        print_json(answer)
        return
    module, _, name = view.rpartition(".")
    getattr(import_module(f"proxy.cli.{module}"), name)(answer)


def print_json(value: object) -> None:
    """Prints an answer as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _tells_operation(answer: httpx.Response) -> bool:
    """True if the answer is an operation that failed, not an error."""
    try:
        body = answer.json()
    except ValueError:
        return False
    return isinstance(body, dict) and body.keys() >= {"id", "verb", "state"}


def _key_in_file() -> str | None:
    """The admin key that `kvpin serve` reads from a file, too; None where no file is named."""
    path = os.environ.get(KEY_FILE)
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        fail(f"the admin key in {path!r} ({KEY_FILE}) cannot be read: {reason}")


def _error_of(answer: httpx.Response) -> str:
    """The message of an error in OpenAI's shape, in terms of flags; without a message, the status."""
    if answer.has_redirect_location:
        return f"{answer.request.url} redirects to {answer.headers['location']}: name that address"
    try:
        error = answer.json()["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{answer.request.url}: {answer.status_code} {answer.reason_phrase}"
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return f"the admin key is missing or wrong: use --admin-key, KVPIN_ADMIN_KEY or {KEY_FILE} (401)"
    from_options = answer.request.method != "DELETE"  # its fields stand in the path: they are arguments
    return f"{_with_flags(message, param) if from_options else message} ({answer.status_code})"


def _with_flags(message: str, param: object) -> str:
    """A message of the admin API with the flags of this program in place of the API's fields."""
    message = _PATH.sub(lambda match: f"{_FLAGS.get(match[2], match[2])}{match[3]}: {match[1]}", message)
    message = _FIELD.sub(lambda match: _FLAGS[match[0]], message)
    field = re.split(r"[.\[]", param)[0] if isinstance(param, str) else ""
    flag = _FLAGS.get(field)
    if flag is not None and message.startswith(f"{field} "):
        message = flag + message.removeprefix(field)
    return message if flag is None or flag in message or field in message else f"{message} ({flag})"

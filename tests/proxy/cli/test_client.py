import asyncio
import json
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trustme
import typer

from proxy.cli import client
from proxy.cli.client import AdminClient
from proxy.cli.load_test import BenchError, first_model


@contextmanager
def admin(script, authority=None):
    """An admin API whose answers `script(method, path, body)` gives as (status, body). It speaks https with a
    certificate of the `authority`, if there is one."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            size = int(self.headers.get("content-length") or 0)
            seen.append((self.command, self.path, self.rfile.read(size), self.headers.get("authorization")))
            status, body = script(*seen[-1][:3])
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            if status == 301:
                self.send_header("location", f"https://k{self.path}")
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - http.server names them

        def log_message(self, *_):
            pass

    seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if authority is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("127.0.0.1").configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"{'http' if authority is None else 'https'}://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join(5)


def failure(capsys, call):
    with pytest.raises(typer.Exit) as caught:
        call()
    assert caught.value.exit_code == 1
    error = capsys.readouterr().err
    assert error.startswith("kvpin: ")
    assert error.count("\n") == 1
    return error


def test_authorities_of_the_environment_are_trusted(tmp_path, monkeypatch, capsys):
    authority, path = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    listed = {"a": 1, "data": [{"id": "m"}]}
    with admin(lambda *_: (200, listed), authority) as (url, _):
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        said = failure(capsys, lambda: AdminClient(url, None).get("/stats"))
        assert f"the certificate of {url} is not trusted: " in said
        assert "SSL_CERT_FILE=FILE names the authorities" in said
        with pytest.raises(BenchError, match="is not trusted"):
            asyncio.run(first_model(f"{url}/v1", None))
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        assert AdminClient(url, None).get("/stats") == listed
        assert asyncio.run(first_model(f"{url}/v1", None)) == "m"


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/admin/v1"])
def test_the_address_may_be_the_base_url_of_clients(end):
    with admin(lambda *_: (200, {})) as (url, seen):
        AdminClient(url + end, None).get("/stats")
    assert seen[0][1] == "/admin/v1/stats"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\udcff"])
def test_what_is_no_json_is_not_sent(capsys, value):
    with admin(lambda *_: (200, {})) as (url, seen):
        error = failure(capsys, lambda: AdminClient(url, None).post("/pin", {"a": value}))
    assert "numbers must be finite" in error
    assert seen == []


def error(message, param=None):
    return {"error": {"message": message, "param": param}}


@pytest.mark.parametrize("key", ["caf\u00e9", "hush\nhush", "hush\0"])
def test_a_key_that_no_header_can_carry_is_not_shown(capsys, key):
    said = failure(capsys, lambda: AdminClient("http://127.0.0.1:1", key).post("/flush", {}))
    assert said == "kvpin: no header can carry the key: it must be one line of ASCII\n"


def test_a_key_may_end_with_a_line_end():
    with admin(lambda *_: (200, {})) as (url, seen):
        AdminClient(url, "k\r\n").get("/stats")
        AdminClient(url, "\n").get("/stats")
    assert [authorization for *_, authorization in seen] == ["Bearer k", None]


def test_a_redirect_is_no_success(capsys):
    with admin(lambda *_: (301, b"")) as (url, _):
        said = failure(capsys, lambda: AdminClient(url, None).delete("/prompt_tables/x"))
        where = "/admin/v1/prompt_tables/x"
        assert said == f"kvpin: {url}{where} redirects to https://k{where}: name that address\n"
    with admin(lambda *_: (300, b"")) as (url, _):
        assert "300 Multiple Choices" in failure(capsys, lambda: AdminClient(url, None).get("/stats"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (error("no such engine", "engine"), "kvpin: no such engine (404)\n"),
        (error("it is wrong", "ttl_s"), "it is wrong (--ttl) (404)"),
        (error("too long", "messages[0].content"), "too long (--messages-file) (404)"),
        (error("must be above 0 - at `$.ttl_s`", "ttl_s"), "kvpin: --ttl: must be above 0 (404)"),
        (error("token_ids is empty", "token_ids"), "kvpin: --token-ids is empty (404)"),
        (error("new_tenant makes one", "tenant"), "--new-tenant makes one (404)"),
        (error("limit must be 1", "limit"), "kvpin: --limit must be 1 (404)"),
        (error("plain"), "plain (404)"),
        (b"<html>", "404 Not Found"),
        ({"error": "x"}, "404 Not Found"),
        ([1], "404 Not Found"),
    ],
)
def test_errors_are_one_line(capsys, body, said):
    with admin(lambda _, path, __: (200, {}) if path.endswith("/engines") else (404, body)) as (url, _):
        assert said in failure(capsys, lambda: AdminClient(url, None).post("/flush", {}))


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "{url} is no kvpin: "),
        (200, "{url} is no kvpin: "),
        (401, "--admin-key, KVPIN_ADMIN_KEY or KVPIN_ADMIN_KEY_FILE"),
    ],
)
def test_what_is_no_kvpin_or_wants_a_key_is_called_so(capsys, status, said):
    with admin(lambda *_: (status, b"<html>" if status == 200 else error("no"))) as (url, _):
        assert said.format(url=url) in failure(capsys, lambda: AdminClient(url, None).get("/stats"))


def test_a_field_in_the_path_is_no_option(capsys):
    body = error("there is no table 'x'", "table_id")
    with admin(lambda method, *_: (404 if method == "DELETE" else 200, body)) as (url, _):
        said = failure(capsys, lambda: AdminClient(url, None).delete("/prompt_tables/x"))
    assert said == "kvpin: there is no table 'x' (404)\n"


def test_the_key_may_stand_in_a_file(capsys, monkeypatch, tmp_path):
    file = tmp_path / "admin.key"
    monkeypatch.setenv("KVPIN_ADMIN_KEY_FILE", str(file))
    with admin(lambda *_: (200, {})) as (url, seen):
        missing = failure(capsys, lambda: AdminClient(url, None).get("/stats"))
        assert str(file) in missing
        assert "No such file" in missing
        file.write_text("k\n")
        AdminClient(url, None).get("/stats")
        AdminClient(url, "given").get("/stats")
        file.write_bytes(b"\xff")
        assert "not text" in failure(capsys, lambda: AdminClient(url, None).get("/stats"))
    assert [authorization for *_, authorization in seen] == ["Bearer k", "Bearer given"]


def operation(state, done=0):
    return {"id": "op-1", "state": state, "engines": [{"engine": "e", "done": done, "total": 2}]}


def test_a_long_operation_is_followed(monkeypatch):
    monkeypatch.setattr(client, "POLL_S", 0.001)
    states = iter([(202, operation("running")), (200, operation("running", 1)), (200, operation("done", 2))])
    shown = []
    with admin(lambda *_: next(states)) as (url, seen):
        last = AdminClient(url, None).run("flush", {"all": True}, shown.append)
    assert last["state"] == "done"
    assert [s["engines"][0]["done"] for s in shown] == [0, 1, 2]
    assert json.loads(seen[0][2]) == {"all": True, "wait_s": 0.1}
    assert [path for _, path, *_ in seen[1:]] == ["/admin/v1/operations/op-1"] * 2


@pytest.mark.parametrize("status", [404, 502])
def test_an_operation_that_failed_is_no_error_of_the_request(status):
    failed = operation("failed") | {"verb": "flush", "error": "1 of 2 engines failed: e: gone"}
    with admin(lambda *_: (status, failed)) as (url, _):
        assert AdminClient(url, None).run("flush", {"all": True}, lambda _: None) == failed


@pytest.mark.parametrize("state", ["cancelled", "done"])
def test_an_interrupt_cancels_it_unless_it_has_ended(capsys, state):
    def interrupt(_operation):
        raise KeyboardInterrupt

    with (
        admin(lambda method, *_: (200, operation(state if method == "DELETE" else "running"))) as (url, seen),
        pytest.raises(typer.Exit) as caught,
    ):
        AdminClient(url, None).run("flush", {}, interrupt)
    assert caught.value.exit_code == 130
    assert seen[-1][:2] == ("DELETE", "/admin/v1/operations/op-1")
    assert f"{state} op-1" in capsys.readouterr().err


def test_the_data_of_an_event_may_hold_line_separators():
    event = 'event: snapshot\ndata: {"model": "a\u2028b"}\n\n'.encode()
    with admin(lambda *_: (200, event)) as (url, _):
        assert list(AdminClient(url, None).events("/events")) == [("snapshot", {"model": "a\u2028b"})]

"""How much of a coding agent's first prompt in a new directory is reused by a llama-server behind kvpin?

Each real agent runs in one directory, and then in another one with the same file. Its first prompts of the
two go to a kvpin before a llama-server with the tiny model: without rules, and with some.

    scripts/agents                                                 installs agents, outside the checkout
    python benchmarks/new_directory.py --prompts DIR               runs those that are installed
    python benchmarks/new_directory.py --prompts DIR --measure     measures the prompts that are in DIR
        [--rules none --rules paths,dates --rules agents]  [--template FILE]  [--agent pi]

The stand-in that collects the prompts answers each with one word: an agent's first prompt is all that counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from harness import CACHE, ROOT, kvpin, llama_server

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import gguf_path

HOME = CACHE / "agents"
SAY = "Say hi, and nothing else."
RUN_S = 90.0
CTX = 40_960


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Attributes:
        command: its program below `HOME`, and arguments; {url} and {say} are filled in.
        env: environment variables, filled in likewise.
        files: what it reads below its home directory.
        before: a command that sets it up.
        typed: what it reads from its standard input.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    typed: str = ""


AGENTS = {
    "Qwen Code": Agent(
        ("npm/node_modules/.bin/qwen", "--auth-type", "openai", "-y", "-p", "{say}"),
        {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": "{url}", "OPENAI_MODEL": "m"},
    ),
    "Kimi Code": Agent(
        ("kimi/node_modules/.bin/kimi", "-p", "{say}"),
        files={
            ".kimi-code/config.toml": 'default_model = "m"\n[providers.local]\ntype = "openai"\n'
            'base_url = "{url}"\napi_key = "x"\n[models.m]\nprovider = "local"\nmodel = "m"\n'
            "max_context_size = 200000\n"
        },
    ),
    "Cline": Agent(
        ("npm/node_modules/.bin/cline", "--auto-approve", "true", "{say}"),
        before=("npm/node_modules/.bin/cline", "auth", "-p", "openai", "-k", "x", "-m", "m", "-b", "{url}"),
    ),
    "Vibe": Agent(
        ("mistral-vibe/bin/vibe", "--trust", "--auto-approve", "-p", "{say}"),
        {"MISTRAL_API_KEY": "x"},
        {
            ".vibe/config.toml": 'active_model = "m"\nenable_telemetry = false\n'
            "enable_update_checks = false\n"
            '[[providers]]\nname = "local"\napi_base = "{url}"\n'
            '[[models]]\nname = "m"\nprovider = "local"\nalias = "m"\n'
        },
    ),
    "Continue": Agent(
        ("npm/node_modules/.bin/cn", "--auto", "--config", "{home}/config.yaml", "-p", "{say}"),
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {
            "config.yaml": "name: local\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: m\n"
            "    provider: openai\n    model: m\n    apiBase: {url}\n    apiKey: x\n    roles: [chat]\n"
            "    capabilities: [tool_use]\n"
        },
    ),
    "pi": Agent(
        ("pi/node_modules/.bin/pi", "--provider", "local", "--model", "m", "-p", "{say}"),
        files={
            ".pi/agent/models.json": '{"providers": {"local": {"baseUrl": "{url}", "apiKey": "x", '
            '"api": "openai-completions", "models": [{"id": "m"}]}}}'
        },
    ),
    "gptme": Agent(
        ("gptme/bin/gptme", "-m", "local/m", "--non-interactive", "{say}"),
        {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "x"},
    ),
}


# --- the agents' prompts -------------------------------------------------------------------------------


class _Stub(BaseHTTPRequestHandler):
    """Answers each chat with one word, and keeps its body."""

    server: _Server

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"x","created":1}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if "messages" not in body:
            self._send(b"{}")
            return
        self.server.bodies.append(body)
        message = {"role": "assistant", "content": "hi"}
        told = {"id": "c", "model": "m", "created": 1}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if body.get("stream"):
            base = {**told, "object": "chat.completion.chunk"}
            chunks = (
                {**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
                {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage},
            )
            events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            self._send(events.encode(), "text/event-stream")
        else:
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            done = {**told, "object": "chat.completion", "choices": [choice], "usage": usage}
            self._send(json.dumps(done).encode())

    def _send(self, content: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Stub)
        self.bodies = list[dict[str, Any]]()


def prompts_of(agent: Agent, root: Path) -> list[dict[str, Any]]:
    """The agent's first prompt in each of two directories with the same file."""
    return [
        _prompt_in(root / "work" / name, agent, root / "home") for name in ("first/tides", "second/harbour")
    ]


def settle(agent: Agent, home: Path, work: Path, marks: Mapping[str, str]) -> tuple[Agent, dict[str, str]]:
    """Makes an agent's home, and the directory in which it works. Returns the agent with its words filled in,
    `marks` among them, and its environment."""
    for path in (home, work):
        path.mkdir(parents=True, exist_ok=True)
    (work / "tides.py").write_text("print('tides')\n")
    filled = {"{home}": str(home), "{work}": str(work), "{say}": SAY, **marks}

    def fill(text: str) -> str:
        for mark, value in filled.items():
            text = text.replace(mark, value)
        return text

    for path, text in agent.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(fill(text))
    env = {
        "HOME": str(home),
        "PATH": f"{HOME / 'kimi/node_modules/.bin'}:{os.environ['PATH']}",  # Kimi Code needs node 24
        "TERM": "dumb",
        **{key: fill(value) for key, value in agent.env.items()},
    }
    before, command = [fill(each) for each in agent.before], [fill(each) for each in agent.command]
    return replace(agent, before=before, command=command), env


def _prompt_in(work: Path, agent: Agent, home: Path) -> dict[str, Any]:
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    agent, env = settle(agent, home, work, {"{url}": f"http://127.0.0.1:{server.server_port}/v1"})
    if agent.before:
        _run(agent.before, work, env, lambda: False)
    _run(agent.command, work, env, lambda: _first(server.bodies) is not None)
    server.shutdown()
    if (first := _first(server.bodies)) is None:
        raise RuntimeError(f"sent no chat; {len(server.bodies)} requests came")
    return first


def _first(bodies: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first chat of the agent itself: not one that makes a title."""
    return next((body for body in bodies if len(json.dumps(body)) > 4000), None)


def _run(command: list[str], work: Path, env: dict[str, str], has_enough: Callable[[], bool]) -> None:
    with (work.parent / "log").open("ab") as log:
        process = subprocess.Popen(
            [str(HOME / command[0]), *command[1:]],
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        end = time.monotonic() + RUN_S
        while process.poll() is None and time.monotonic() < end and not has_enough():
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- what an engine reuses of them ---------------------------------------------------------------------


def measure(bodies: list[dict[str, Any]], rules: str, template: Path) -> tuple[int, int]:
    """Tokens of the last prompt that a server reuses which had the others before, and all of its tokens."""
    flags = ["--chat-template-file", str(template), "--cache-ram", "0", "-t", "2"]
    chosen = [] if rules == "none" else [part for rule in rules.split(",") for part in ("--normalise", rule)]
    with ExitStack() as running:
        server = running.enter_context(llama_server(gguf_path("tiny"), *flags, slots=1, ctx=CTX))
        url = running.enter_context(kvpin("--port", "0", "--engine", f"llama_server={server}", *chosen))
        for body in bodies:
            asked = {key: body[key] for key in ("messages", "tools") if key in body}
            asked |= {"model": "tiny", "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=600, trust_env=False)
            usage = answer.raise_for_status().json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def main() -> None:
    """Runs the agents, or measures their prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True, help="directory of the agents' prompts")
    parser.add_argument("--measure", action="store_true", help="measure the prompts that are there")
    parser.add_argument("--rules", action="append", help="none, or rules of docs/normalise.md; repeatable")
    parser.add_argument("--template", type=Path, default=ROOT / "benchmarks/qwen2_5_chat_template.jinja")
    parser.add_argument("--agent", action="append", choices=list(AGENTS), help="only this one; repeatable")
    options = parser.parse_args()
    options.prompts.mkdir(parents=True, exist_ok=True)
    names = options.agent or list(AGENTS)
    if options.measure:
        for name in names:
            if (path := options.prompts / f"{name}.json").exists():
                for rules in options.rules or ["none", "agents"]:
                    cached, tokens = measure(json.loads(path.read_text()), rules, options.template)
                    share = f"{cached:6,} of {tokens:6,} ({cached / tokens:5.1%})"
                    print(f"{name:10} | {rules:30} | {share}", flush=True)
    else:
        for name in names:
            root = Path(tempfile.mkdtemp(prefix="kvpin-agents-"))
            try:
                prompts = prompts_of(AGENTS[name], root)
                (options.prompts / f"{name}.json").write_text(json.dumps(prompts))
                print(name, [len(json.dumps(each)) for each in prompts], flush=True)
            except (OSError, RuntimeError) as error:
                print(f"{name}: {error}; see {root}", flush=True)
            else:
                shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Real coding agents through kvpin: what each request came to, and how much of its prompt was cached.

Each agent works on a task in a directory of its own: it calls its shell, reads the result, and calls it
again. The model is tiny and would call nothing. So a relay stands between kvpin and the engine: the engine
computes each prompt and tells its usage, and a script then answers in the model's place. A second relay,
between the agent and kvpin, notes statuses and headers.

    agent → relay (notes) → kvpin → relay (script) → llama-server, vLLM or the embedded engine

    scripts/agents                                             installs the agents, outside the checkout
    python benchmarks/coding_agents.py                         all agents, a llama-server, six templates
        [--agent Codex]  [--template Qwen3.5-4B]  [--calls 4]  [--engine llama_server|vllm|embedded]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from harness import ROOT, engine, free_port, kvpin, llama_server, made_model
from new_directory import AGENTS as CHAT_AGENTS
from new_directory import HOME, Agent, settle

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import gguf_path
from scripts.shipped_models import shipped_models

MODEL = "m"
SAY = "Read tides.py with your shell, and say what it prints."
TEMPLATES = (
    "Qwen3.5-4B",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "google-gemma-4-31B-it",
    "openai-gpt-oss-120b",
    "GLM-4.6",
    "deepseek-ai-DeepSeek-V3.1",
)
CTX = 65_536
RUN_S = 900.0
BLOCK = 32
_ERROR = 400
_CHAT = "/v1/chat/completions"
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "host"}


_PROVIDER = "model_providers.kvpin"
AGENTS = {
    "Codex": Agent(
        (
            *("codex/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--json", "-m", MODEL),
            *("--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=kvpin"),
            *("-c", f"{_PROVIDER}.name=kvpin", "-c", f'{_PROVIDER}.base_url="{{url}}"'),
            *("-c", f"{_PROVIDER}.wire_api=responses", "{say}"),
        ),
        {"CODEX_HOME": "{home}"},
    ),
    "Claude Code": Agent(
        ("claude-code/node_modules/.bin/claude", "-p", "{say}", "--allowedTools", "Bash", "--model", MODEL),
        {
            "ANTHROPIC_BASE_URL": "{base}",
            "ANTHROPIC_AUTH_TOKEN": "x",
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "OpenCode": Agent(
        ("opencode/node_modules/.bin/opencode", "run", "--auto", "-m", f"kvpin/{MODEL}", "{say}"),
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {
            ".config/opencode/opencode.json": '{"provider": {"kvpin": {"npm": "@ai-sdk/openai-compatible", '
            '"options": {"baseURL": "{url}", "apiKey": "x"}, "models": {"m": {}}}}}'
        },
    ),
    "aider": Agent(
        (
            *("aider/bin/aider", "--model", f"openai/{MODEL}", "--openai-api-base", "{url}"),
            *("--openai-api-key", "x", "--yes-always", "--no-git", "--no-check-update", "--no-analytics"),
            *("--no-show-model-warnings", "--no-show-release-notes", "--no-pretty", "--no-detect-urls"),
            *("--edit-format", "diff", "--map-tokens", "0", "tides.py"),
        ),
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        typed="".join(f"Say more about line {turn} of tides.py.\n" for turn in range(5)),
    ),
    **{name: agent for name, agent in CHAT_AGENTS.items() if name != "gptme"},
}


_R = TypeVar("_R", bound="Relay")

# --- relays --------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    """Passes a request on, and its answer back as it comes."""

    protocol_version = "HTTP/1.1"
    server: Relay

    def log_message(self, *_args: object) -> None:
        pass

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.close_connection = True
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.server.serve(self, body)

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = _pass  # noqa: N815 - names of the standard library

    def answer(self, status: int, headers: Mapping[str, str], parts: Iterator[bytes]) -> None:
        """Sends an answer in parts; the connection ends with it."""
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        for part in parts:
            self.wfile.write(part)
            self.wfile.flush()


class Relay(ThreadingHTTPServer):
    """Passes everything on to `upstream`."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", free_port()), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave as they like."""

    @contextmanager
    def ask(self, handler: _Handler, body: bytes) -> Iterator[http.client.HTTPResponse]:
        """The upstream's answer."""
        connection = http.client.HTTPConnection(self.upstream, timeout=RUN_S)
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in _HOP}
        with contextlib.closing(connection):
            connection.request(handler.command, handler.path, body or None, headers)
            yield connection.getresponse()

    def serve(self, handler: _Handler, body: bytes) -> None:
        """Serves a request."""
        with self.ask(handler, body) as answer:
            handler.answer(answer.status, dict(answer.getheaders()), _parts(answer))


def _parts(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while part := answer.read1(65536):
        yield part


@dataclass
class Request:
    """A request of an agent's, as the relay before kvpin saw it.

    Attributes:
        texts: what its messages say.
        begun, ended: when it came and when its answer was whole, in seconds.
        first_s: time to the first part of the answer that tells a token or a call; None without one.
    """

    path: str
    status: int
    normalised: str
    changed: str
    texts: Sequence[str] = ()
    begun: float = 0.0
    ended: float = float("inf")
    error: str = ""
    first_s: float | None = None

    def lost(self, turns: Sequence[Turn]) -> list[str]:
        """The texts that stand in no prompt that the engine rendered while the request was served, but for a
        line that kvpin drops and tells."""
        prompts = [_bare(each.text) for each in turns if self.begun <= each.at <= self.ended and each.text]
        texts = [each for each in self.texts if not each.startswith("x-anthropic-billing-header")]
        return [each for each in texts if prompts and not any(_bare(each) in told for told in prompts)]


_ESCAPES = re.compile(r'\\+(u[0-9a-fA-F]{4}|[nrt"])|[^A-Za-z0-9]')


def _bare(text: str) -> str:
    """Letters and digits of a text: templates trim it, and some write it as JSON."""
    return _ESCAPES.sub("", text)


def _texts(told: object) -> Iterator[str]:
    """What messages, items, blocks and results say, at any depth."""
    if isinstance(told, list):
        for each in told:
            yield from [each] if isinstance(each, str) else _texts(each)
    elif isinstance(told, dict):
        for name in ("system", "instructions", "messages", "input", "content", "text", "output"):
            value = told.get(name)
            yield from [value] if isinstance(value, str) else _texts(value)


class Notes(Relay):
    """Notes each request of an agent's."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.requests = list[Request]()

    def serve(self, handler: _Handler, body: bytes) -> None:
        """Serves a request, and notes it."""
        begun = time.monotonic()
        with self.ask(handler, body) as answer:
            normalised, changed = (
                answer.getheader(f"x-kvpin-{name}", "") for name in ("normalised", "changed")
            )
            asked = json.loads(body) if body[:1] == b"{" else {}
            path = urlsplit(handler.path).path
            request = Request(path, answer.status, normalised, changed, [*_texts(asked)], begun)
            self.requests.append(request)
            parts = self._watched(answer, request)
            handler.answer(answer.status, dict(answer.getheaders()), parts)
            request.ended = time.monotonic()

    @staticmethod
    def _watched(answer: http.client.HTTPResponse, request: Request) -> Iterator[bytes]:
        seen = b""
        for part in _parts(answer):
            if request.first_s is None:
                seen += part
                if _TOKEN.search(seen):
                    request.first_s = time.monotonic() - request.begun
            if answer.status >= _ERROR:
                request.error += part.decode(errors="replace")
            yield part


_TOKEN = re.compile(
    rb'content_block_delta|output_text\.delta|arguments\.delta|"content": ?"[^"]|"tool_calls": ?\['
)


@dataclass
class Turn:
    """A prompt that the engine computed.

    Attributes:
        at: when its answer began, in seconds.
        text: as the engine's template made it; empty where the engine does not tell.
    """

    cached: int
    prompt: int
    is_agents: bool
    at: float
    text: str


class Script(Relay):
    """Lets the engine compute each chat, and answers in its place: calls of the shell, then a text."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.calls_left = 0
        self.turns = list[Turn]()
        self.ids = 0
        self._engine = threading.Lock()

    def begin(self, calls: int) -> None:
        """Begins an agent's session, once the engine is done with what the last one left behind."""
        with self._engine:
            self.calls_left, self.turns, self.ids = calls, [], 0

    def serve(self, handler: _Handler, body: bytes) -> None:
        """Serves a request."""
        if handler.path != _CHAT or not _is_an_agents(asked := json.loads(body)):
            super().serve(handler, body)
            return
        short = {**asked, "max_tokens": 1, "max_completion_tokens": 1}
        if asked.get("stream"):
            short |= {"stream_options": {"include_usage": True}, "return_progress": True}
        with self._engine, self.ask(handler, json.dumps(short).encode()) as answer:
            raw, status, headers = answer.read(), answer.status, dict(answer.getheaders())
        if status >= _ERROR:
            handler.answer(status, headers, iter([raw]))
            return
        message = self._message(asked)
        events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
        if not events:
            told = json.loads(raw)
            finish = "tool_calls" if "tool_calls" in message else "stop"
            told["choices"] = [{"index": 0, "message": message, "finish_reason": finish}]
            parts = iter([json.dumps(told).encode()])
        else:
            if not any(event.get("usage") for event in events):
                events = _unparsed(events)
            told = next(event for event in reversed(events) if event.get("usage"))
            wants_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
            parts = _events(events, message, wants_usage=wants_usage)
        usage = told["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        turn = Turn(cached, usage["prompt_tokens"], bool(asked.get("tools")), time.monotonic(), "")
        turn.text = self._rendered(asked)
        self.turns.append(turn)
        handler.answer(status, headers, parts)

    def _rendered(self, asked: Mapping[str, Any]) -> str:
        """The prompt, as a llama-server's template makes it; empty from another engine."""
        told = httpx.post(
            f"http://{self.upstream}/apply-template", json=asked, timeout=RUN_S, trust_env=False
        )
        return str(told.json().get("prompt", "")) if told.is_success else ""

    def _message(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": f"It prints the tides, said {self.ids} times.",
        }
        shell = _shell(asked.get("tools") or ())
        if shell and self.calls_left:
            self.calls_left -= 1
            self.ids += 1
            name, arguments = shell(f"cat tides.py; echo step {self.ids}")
            called = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": f"call{self.ids:05}", "type": "function", "function": called}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return message


def _is_an_agents(asked: Mapping[str, Any]) -> bool:
    """True for a prompt of an agent's; kvpin's own trials are short."""
    return len(json.dumps(asked["messages"])) > 2000 or bool(asked.get("tools"))


def _unparsed(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stream of a llama-server that could not parse the noise of its model, with an end and usage."""
    progress = next(event["prompt_progress"] for event in events if "prompt_progress" in event)
    total, cached = progress["total"], progress["cache"]
    usage = {"prompt_tokens": total, "completion_tokens": 1, "total_tokens": total + 1}
    usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
    timings = {"cache_n": cached, "prompt_n": total - cached, "predicted_n": 1}
    head = {name: value for name, value in events[0].items() if name not in {"choices", "prompt_progress"}}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    return [events[0], head | {"choices": [end]}, head | {"choices": [], "usage": usage, "timings": timings}]


def _events(
    events: Sequence[Mapping[str, Any]], message: Mapping[str, Any], *, wants_usage: bool
) -> Iterator[bytes]:
    """An engine's stream with another message in it."""
    head = {name: events[0][name] for name in ("id", "object", "created", "model") if name in events[0]}
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or ())]
    delta = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}]
    finish = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}
    for event in events:  # the end, with what the engine tells of it
        if "prompt_progress" in event:
            continue
        is_last = any(choice.get("finish_reason") for choice in event["choices"])
        if is_last or (event.get("usage") and wants_usage):
            chunks.append({**event, "choices": [finish] if event["choices"] else []})
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def _shell(tools: Sequence[Mapping[str, Any]]) -> Callable[[str], tuple[str, dict[str, Any]]] | None:
    """Makes a call of the tool that runs commands; None where no tool does."""
    for tool in tools:
        function = tool.get("function") or {}
        properties = (function.get("parameters") or {}).get("properties") or {}
        for name in ("cmd", "command", "commands"):
            if name in properties:
                return lambda text, function=function, name=name: (
                    function["name"],
                    _filled(function, name, text),
                )
    return None


def _filled(function: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    schema = function["parameters"]
    of_type: dict[str, Any] = {"string": "tides", "boolean": False, "integer": 5, "number": 5}
    wanted = {each: schema["properties"][each] for each in schema.get("required") or ()}
    arguments = {
        each: of_type.get(about.get("type", "string")) for each, about in wanted.items() if each != name
    }
    for each, about in wanted.items():
        if each != name and about.get("enum"):
            arguments[each] = about["enum"][0]
    about = schema["properties"][name]
    is_list = about.get("type") == "array" or any(
        each.get("type") == "array" for each in about.get("anyOf", ())
    )
    return {name: [text] if is_list else text, **arguments}


# --- runs ----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What an agent's session came to."""

    requests: list[Request]
    turns: list[Turn]
    printed: str
    returned: int | None

    def __str__(self) -> str:
        """For people: one line."""
        own = [turn for turn in self.turns if turn.is_agents] or self.turns
        shares = [f"{turn.cached / turn.prompt:.0%}" for turn in own]
        later = own[1:]
        share = sum(turn.cached for turn in later) / max(sum(turn.prompt for turn in later), 1)
        lost = max((before.prompt - now.cached for before, now in zip(own, later, strict=False)), default=0)
        bad = [
            f"{each.status} {each.path} {each.error[:200]}" for each in self.requests if each.status >= _ERROR
        ]
        told = sorted(
            {word for each in self.requests for word in f"{each.normalised},{each.changed}".split(",")}
        )
        n_read = sum(bool(turn.text) for turn in self.turns)
        lost_texts = sorted({text[:60] for each in self.requests for text in each.lost(self.turns)})
        return (
            f"{len(own)} turns, first prompt {own[0].prompt if own else 0:,}, "
            f"later turns cached {share:.1%}, at most {lost} of the last prompt lost | {' '.join(shares)} | "
            f"{', '.join(filter(None, told)) or 'unchanged'} | {'; '.join(bad) or 'no error'} | "
            f"{f'not in the prompt: {lost_texts}' if lost_texts else f'no text lost in {n_read} prompts'}"
        )


def work(agent: Agent, notes: Notes, script: Script, calls: int, root: Path) -> Outcome:
    """Runs an agent once: `calls` tool calls, then an answer."""
    directory = root / "work"
    marks = {"{url}": f"{notes.url}/v1", "{base}": notes.url, "{say}": SAY}
    agent, env = settle(agent, root / "home", directory, marks)
    script.begin(calls)
    notes.requests = []
    if agent.before:
        _run(agent.before, directory, env)
    returned, printed = _run(agent.command, directory, env, agent.typed)
    return Outcome(notes.requests, script.turns, printed, returned)


def _run(
    command: Sequence[str], directory: Path, env: Mapping[str, str], typed: str = ""
) -> tuple[int | None, str]:
    """Runs a command to its end, or for `RUN_S`; returns its status and what it printed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as keys:
        keys.write(typed.encode())
        keys.seek(0)
        process = subprocess.Popen(
            [str(HOME / command[0]), *command[1:]],
            cwd=directory,
            env=dict(env),
            stdin=keys,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(RUN_S)
        status = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


@contextmanager
def served(kind: str, template: str, log: Path) -> Iterator[tuple[Notes, Script]]:
    """An engine of this kind, kvpin before it, and the two relays."""
    with ExitStack() as stack:
        if kind == "llama_server":
            flags = ["--chat-template-file", str(shipped_models() / f"{template}.jinja"), "--cache-ram", "0"]
            url = stack.enter_context(llama_server(gguf_path("tiny"), *flags, slots=2, ctx=CTX))
        elif kind == "vllm":
            url = stack.enter_context(_vllm(log / "vllm", template))
        else:
            model = made_model("agents-model", "--max-model-len", str(CTX))
            options = ("--kv-blocks", "8192", "--threads", "1", "--served-model-name", MODEL)
            url = stack.enter_context(engine("--model", str(model), *options))
        script = started(stack, Script(url))
        proxy = stack.enter_context(kvpin("--engine", f"{kind}={script.url}", log=log / "kvpin"))
        _wait_tokenised(proxy)
        yield started(stack, Notes(proxy)), script


def _wait_tokenised(url: str) -> None:
    """Returns once kvpin knows what the engine's template loses."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        pools = httpx.get(f"{url}/admin/v1/stats", trust_env=False).json()["pools"]
        if not any(word in pool["tokenisation"]["detail"] for pool in pools for word in _PENDING):
            return
        time.sleep(0.2)
    raise TimeoutError("kvpin did not compare its tokens with the engine's within 300 s")


_PENDING = ("being loaded", "not checked", "is checked once")


@contextmanager
def _vllm(log: Path, template: str) -> Iterator[str]:
    """A vLLM with this template, which parses no calls: the script makes them."""
    from tests.vllm_live.vllm_world import VllmOptions, running_vllm  # noqa: PLC0415 - needs pytest

    calls = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    path = str(shipped_models() / f"{template}.jinja")
    flags = ("--chat-template", path, "--served-model-name", MODEL, *calls)
    with running_vllm(log, VllmOptions(blocks=1024, context=8192, flags=flags)) as server:
        server.wait()
        yield server.url


def started(stack: ExitStack, relay: _R) -> _R:
    """Serves with a relay until the stack closes."""
    threading.Thread(target=relay.serve_forever, args=(0.05,), daemon=True).start()
    stack.callback(relay.server_close)
    stack.callback(relay.shutdown)
    return relay


def main() -> None:
    """Prints a line for each agent on each engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agent", action="append", choices=list(AGENTS), help="only this one; repeatable")
    parser.add_argument("--template", action="append", help="of a llama-server; repeatable")
    parser.add_argument("--engine", default="llama_server", choices=("llama_server", "vllm", "embedded"))
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--show", action="store_true", help="what the agents print, and why kvpin missed")
    options = parser.parse_args()
    for template in options.template or TEMPLATES:
        with tempfile.TemporaryDirectory() as log, served(options.engine, template, Path(log)) as relays:
            for name in options.agent or AGENTS:
                agent = AGENTS[name]
                if not (HOME / agent.command[0]).exists():
                    print(f"{name}: not installed", flush=True)
                    continue
                root = Path(tempfile.mkdtemp(prefix="kvpin-agents-"))
                outcome = work(agent, *relays, options.calls, root)
                print(f"{template} | {name} | {outcome}", flush=True)
                if options.show:
                    print(outcome.returned, outcome.printed[-3000:], flush=True)
                    url = f"http://{relays[0].upstream}/admin/v1/requests"
                    for record in httpx.get(url, timeout=RUN_S, trust_env=False).json()["requests"]:
                        print(f"kvpin: {record['miss']} {record['differs_at']}", flush=True)
                shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()

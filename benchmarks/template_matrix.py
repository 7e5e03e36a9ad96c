"""What chat templates do with the messages of agents, straight and as kvpin repairs them.

For each chat template that llama-cpp-python ships, starts a real llama-server with it. The server renders
chats of eleven shapes, whose texts are marked: a shape is kept if no text is missing from the prompt. The
server may also refuse it. Then kvpin's adapter asks what the server loses, as when an engine joins, the same
chats are repaired by that, and rendered again.

    python benchmarks/template_matrix.py                   all templates: about four minutes
    python benchmarks/template_matrix.py --template Qwen   those whose name contains this
    python benchmarks/template_matrix.py --through 14      14 of them through a whole kvpin: two minutes
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from engine_adapter import make_adapter
from engine_adapter.prompt.template_trials import MessageShape
from proxy.core.message_repair import repaired
from proxy.prompt.exactness import lost_by
from proxy.request.normalising import REPAIRS
from scripts.shipped_models import shipped_models
from tests.engines import engine_spec
from tests.live.llama_world import MODEL, LlamaWorld, llama_world
from tests.llama import running_llama_server

_Messages = list[dict[str, Any]]


def _said(role: str, at: int) -> dict[str, Any]:
    return {"role": role, "content": f"mark {at}."}


def _call(at: int, content: str | None, arguments: object) -> dict[str, Any]:
    function = {"name": "tide", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": f"call0000{at}", "type": "function", "function": function}],
    }


def _result(of: int, at: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{of}", "content": f"mark {at}."}


_USER = _said("user", 0)
SHAPES: Mapping[str, _Messages] = {
    "late system": [_said("system", 0), _said("user", 1), _said("system", 2)],
    "system after an answer": [_USER, _said("assistant", 1), _said("system", 2), _said("user", 3)],
    "two systems": [_said("system", 0), _said("system", 1), _said("user", 2)],
    "developer": [_said("system", 0), _said("developer", 1), _said("user", 2)],
    "assistant first": [_said("assistant", 0), _said("user", 1)],
    "two users": [_USER, _said("user", 1)],
    "user after result": [_USER, _call(1, "", {}), _result(1, 1), _said("user", 2)],
    "result alone": [_USER, _result(1, 1), _said("user", 2)],
    "null content": [_USER, _call(1, None, {"port": "mark 1."}), _result(1, 2)],
    "arguments as text": [_USER, _call(1, "", '{"port":"mark 1."}'), _result(1, 2)],
    "arguments as object": [_USER, _call(1, "", {"port": "mark 1."}), _result(1, 2)],
}  # fmt: skip
_TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Height of the tide",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]},
    },
}


def _fields(messages: _Messages) -> dict[str, Any]:
    uses_tools = any("tool_calls" in each or each["role"] == "tool" for each in messages)
    return {"messages": messages, **({"tools": [_TOOL]} if uses_tools else {})}


def _outcome(server: str, fields: Mapping[str, Any]) -> str:
    """What the server makes of a chat: `kept`, `refused`, or what is lost."""
    answer = httpx.post(f"{server}/apply-template", json=fields, timeout=60, trust_env=False)
    if not answer.is_success:
        return "refused"
    prompt = answer.json()["prompt"]
    marks = str(fields["messages"]).count("mark ")
    lost = [at for at in range(marks) if f"mark {at}." not in prompt]
    return "lost" if lost else "kept"


async def _lost_by(server: str) -> frozenset[MessageShape]:
    adapter = make_adapter(engine_spec("llama_server", server, model=MODEL))
    try:
        await adapter.connect()
        return await lost_by(adapter, MODEL) or frozenset()
    finally:
        await adapter.aclose()


def _compare(path: Path, work: Path) -> dict[str, tuple[str, str]]:
    """Each shape's outcome straight, and repaired."""
    log = work / f"{path.stem}.log"
    with running_llama_server(log, None, "--chat-template-file", str(path), slots=1) as server:
        repairs = {REPAIRS[shape] for shape in asyncio.run(_lost_by(server.url))}
        found = {}
        for name, messages in SHAPES.items():
            fields = _fields(messages)
            changes, _ = repaired(fields, repairs)
            found[name] = _outcome(server.url, fields), _outcome(server.url, {**fields, **changes})
        return found


def _through(path: Path, work: Path) -> Counter[str]:
    """The shapes that a server takes through a whole kvpin, and those that kvpin repaired."""
    counts = Counter[str]()
    (work / path.stem).mkdir()
    with llama_world(work / path.stem, "--chat-template-file", str(path)) as world:
        world.until(lambda: _is_compared(world), "the comparison of its tokens")
        for messages in SHAPES.values():
            answer = world.post("chat/completions", {"max_tokens": 1, **_fields(messages)})
            # The server cannot parse what the random model says; it has taken the prompt.
            is_noise = "does not match the expected" in answer.text
            took = answer.is_success or is_noise
            counts["taken" if took else f"status {answer.status_code}"] += 1
            counts["repaired"] += "x-kvpin-normalised" in answer.headers
    return counts


def _is_compared(world: LlamaWorld) -> bool:
    (pool,) = world.kvpin.admin("GET", "stats").json()["pools"]
    return pool["tokenisation"] is not None and "loaded" not in pool["tokenisation"]["detail"]


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--template", default="", help="only those whose name contains this")
    parser.add_argument("--through", type=int, default=0, help="only as many, through a whole kvpin")
    options = parser.parse_args()
    paths = [path for path in sorted(shipped_models().glob("*.jinja")) if options.template in path.name]
    with tempfile.TemporaryDirectory() as work:
        if options.through:
            for path in paths[:: max(len(paths) // options.through, 1)]:
                print(f"{path.stem}: {dict(_through(path, Path(work)))}", flush=True)
        else:
            _print_all(paths, Path(work))


def _print_all(paths: Sequence[Path], work: Path) -> None:
    straight, after = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    for path in paths:
        for name, (before, then) in _compare(path, work).items():
            straight[name][before] += 1
            after[name][then] += 1
            if then != "kept":
                print(f"{path.stem}: {name}: {before} → {then}", flush=True)
    print(f"\n{len(paths)} templates\n\n| shape | straight: refused | lost | repaired: refused | lost |")
    print("|---|---:|---:|---:|---:|")
    for name in SHAPES:
        row = [counts[name][what] for counts in (straight, after) for what in ("refused", "lost")]
        print(f"| {name} | {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()

"""Lists every command that README, CONTRIBUTING and docs/ show: what runs it, or why nothing does.

    .venv/bin/python scripts/documented_commands.py

A test fails if a command has no line in `RULES`, or a line no command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from proxy.cli.arguments import EXAMPLES  # noqa: E402 - found by the line before

RUN, READ, NOT_RUN = "run", "read", "not run"
_HERE = "tests/proxy/cli/test_documented_commands.py::"
_EXAMPLES = "tests/proxy/cli/test_help.py::test_each_works"
# What a line of a block begins with where the line is a command.
_PROGRAM = re.compile(
    r"kvpin|scripts/[\w-]+|\.venv/\S+|python3?|pip|docker|helm|curl|mkdir|cp|printf|systemctl|vllm|lmcache|llama-server"
    r"|trtllm-serve"
)
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: how commands that match are checked.

    Attributes:
        pattern: matches whole commands.
        fate: RUN: a test runs it, on addresses and files of its own; READ: its program reads the words but
            starts nothing, or what they name is there; NOT_RUN.
        by: the test or script, or why it is not run.
    """

    pattern: str
    fate: str
    by: str


RULES = (
    Rule("|".join(map(re.escape, EXAMPLES.values())), RUN, _EXAMPLES),
    Rule("kvpin (" + "|".join(sorted(set(EXAMPLES) - {"serve"})) + ")", RUN, _EXAMPLES),
    Rule(r"kvpin replay (tests/data/|traffic\.jsonl --engines).*", RUN, _HERE + "test_replays_work"),
    Rule(
        r"kvpin engine( \[.*)?",
        READ,
        "tests/proxy/cli/test_serve.py::test_the_engines_own_options_are_passed_through",
    ),
    Rule(r"([A-Z_]+=\S+ )*(kvpin|scripts/serve) ?.*", READ, _HERE + "test_kvpin_reads_it"),
    Rule(r"scripts/test", RUN, ".ci/run"),
    Rule(r"scripts/(check|install engine,dev)", RUN, "scripts/test"),
    Rule(r"scripts/compare .*", READ, "tests/compare/test_compare.py::test_kvpin_does_what_was_recorded"),
    Rule(r"scripts/docs", RUN, "tests/test_site.py::test_every_page_is_in_the_sidebar"),
    Rule(r"scripts/llama-server", RUN, "tests/llama.py::llama_server"),
    Rule(
        r"\.venv/bin/python -m pytest tests/contract( -k mykind)?|scripts/test tests/proxy( -k flow|/core)",
        RUN,
        "scripts/test",
    ),
    Rule(r"\.venv/bin/python examples/ttft_demo\.py", RUN, "tests/live/test_examples.py::test_ttft_demo"),
    Rule(
        r"\.venv/bin/python examples/prompt_order\.py", RUN, "tests/live/test_examples.py::test_prompt_order"
    ),
    Rule(
        r"\.venv/bin/hatchling build",
        RUN,
        "tests/test_packaging.py::test_a_wheel_made_from_the_sdist_is_the_same",
    ),
    Rule(r"docker run \S.* kvpin serve .*", READ, _HERE + "test_kvpin_reads_it"),
    Rule(r"scripts/(test-|with-|format|vendor-|agents).*", READ, _HERE + "test_bash_reads_it"),
    Rule(r"llama-server .*", READ, _HERE + "test_llama_server_reads_it"),
    Rule(r"helm install .*", READ, _HERE + "test_helm_renders_it"),
    Rule(
        r"(\S+=\S+ )*docker (build|compose) .*|cp deploy/.*|systemctl .*",
        READ,
        _HERE + "test_what_it_names_is_there",
    ),
    Rule(r"(.* )?\S*pip install .*(\.|\[\w+\]'?)", READ, _HERE + "test_what_it_names_is_there"),
    Rule(r"(\S+=\S+ )*(vllm|lmcache) .*", NOT_RUN, "needs vLLM; scripts/test-vllm starts it on a tiny model"),
    Rule(
        r"(\S+=\S+ )*trtllm-serve .*|python -m sglang\.launch_server .*|docker run --gpus .*",
        NOT_RUN,
        "needs a GPU",
    ),
    Rule(r"pip install torch .*", NOT_RUN, "installs gigabytes; scripts/install does the same"),
    Rule(
        r"python benchmarks/new_directory\.py .*", NOT_RUN, "needs real agents; scripts/agents installs them"
    ),
    Rule(r"mkdir -p /dev/shm/kv", NOT_RUN, "makes a directory outside the checkout"),
    Rule(r"printf .* \| sha256sum", RUN, _HERE + "test_the_hash_of_a_key"),
    Rule(r"curl -N .*/admin/v1/events", RUN, _HERE + "test_curl_watches_events"),
)


def pages() -> Iterator[Path]:
    """The pages that people write; those of docs/reference are made from the code."""
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    yield from (page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference")


def commands(text: str) -> list[str]:
    """The commands of a page, each once: those in blocks, and kvpin's and scripts within a line."""
    found: dict[str, None] = {}
    for lang, block in _FENCE.findall(text):
        if lang in ("", "console"):
            found.update(dict.fromkeys(_of_block(block)))
    verbs = "|".join({name.partition(" ")[0] for name in EXAMPLES} | {"engine"})
    inline = re.compile(rf"kvpin (?:{verbs})\b.*|scripts/[\w-]+(?: .*)?|\.venv/\S+ .*|docker \S.*")
    code = re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    found.update(dict.fromkeys(filter(inline.fullmatch, code)))
    return list(found)


def _of_block(block: str) -> Iterator[str]:
    lines = re.sub(r" *\\\n\s*", " ", block).splitlines()
    has_prompts = any(line.startswith("$ ") for line in lines)
    for line in lines:
        command = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ "))
        program = re.sub(r"^([A-Z_]+=\S* )+", "", command).partition(" ")[0]
        if line.startswith("$ ") if has_prompts else _PROGRAM.fullmatch(program):
            yield command


def shown() -> Iterator[tuple[str, str]]:
    """Each page and command."""
    for page in pages():
        for command in commands(page.read_text(encoding="utf-8")):
            yield page.relative_to(ROOT).as_posix(), command


def rule_of(command: str) -> Rule | None:
    """The first rule that matches."""
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, command)), None)


def main() -> None:
    """Prints them, how many have which fate, and at the end those that are not run, with the reason."""
    by_fate: dict[str, list[str]] = {RUN: [], READ: [], NOT_RUN: [], "no rule": []}
    for page, command in shown():
        rule = rule_of(command)
        fate, by = (rule.fate, rule.by) if rule is not None else ("no rule", "")
        by_fate[fate].append(f"{fate:8} {page}: {command}\n         {by}")
    for lines in by_fate.values():
        print(*lines, sep="\n")
    print(", ".join(f"{len(lines)} {fate}" for fate, lines in by_fate.items()))


if __name__ == "__main__":
    main()

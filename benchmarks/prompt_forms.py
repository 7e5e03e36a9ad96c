"""Compares the token ids that kvpin makes with those of a llama-server, by form of request and template.

Starts a tiny server once with each chat template that llama-cpp-python ships (see exactness.py), builds the
prompts of tests/live/prompt_forms.py as kvpin does, and compares them with what the server makes.

    python benchmarks/prompt_forms.py                   all templates, about five minutes
    python benchmarks/prompt_forms.py --template Qwen   those whose name contains this
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
from exactness import shipped_models

from engine_adapter import EngineRejected, JsonBody, make_adapter
from engine_adapter.prompt.chat import ChatTokenizer, load_transformers
from engine_adapter.prompt.encoders import exact_encoder
from engine_adapter.prompt.forms import Form
from proxy.prompt import PromptBuilder, PromptTables, verify_exactness
from proxy.prompt.render import CHAT_PATH
from scripts.make_gguf import gguf_path
from tests.engines import engine_spec
from tests.live.prompt_forms import FORMS
from tests.llama import running_llama_server


async def compare(template: Path, tokenizer: ChatTokenizer, log: Path) -> Counter[str]:
    """Counts the forms by who made their ids, and prints each that differs."""
    counts = Counter[str]()
    with running_llama_server(log, None, "--chat-template-file", str(template), slots=1) as server:
        adapter = make_adapter(engine_spec("llama_server", server.url, model="tiny"))
        try:
            builder = PromptBuilder(await adapter.connect(), tables=PromptTables(), engines=lambda: [adapter])
            builder.adopt(tokenizer)
            await verify_exactness(builder, adapter)
            local = [form for form, row in builder.forms.rows.items() if row.source == "local"]
            print(
                f"{template.stem}: {len(local)} of {len(Form)} forms: {builder.exactness.detail}", flush=True
            )
            for name, fields in FORMS.items():
                body = JsonBody(msgspec.json.encode({"model": "tiny", **fields}))
                prompt = await builder.build(CHAT_PATH, body, salt=None)
                try:
                    theirs = await adapter.tokenize(CHAT_PATH, body)
                except EngineRejected:
                    counts["refused by the server"] += 1
                    continue
                counts["unknown" if prompt is None else prompt.source] += 1
                if prompt is not None and prompt.token_ids != theirs:
                    counts["different"] += 1
                    print(f"{template.stem}: {name!r} differs", flush=True)
        finally:
            await adapter.aclose()
    return counts


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--template", default="", help="only those whose name contains this")
    options = parser.parse_args()
    tokenizer = load_transformers(str(gguf_path("tiny")))
    encoder = exact_encoder(tokenizer)
    total = Counter[str]()
    with tempfile.TemporaryDirectory() as work:
        for template in sorted(shipped_models().glob("*.jinja")):
            if options.template in template.name:
                tokenizer.chat_template = template.read_text(encoding="utf-8")
                chats = ChatTokenizer(tokenizer, source=template.name, encoder=encoder)
                counts = asyncio.run(compare(template, chats, Path(work, "log")))
                print(f"{template.stem}: {dict(counts)}", flush=True)
                total += counts
    print(f"\nin all: {dict(total)}; {total['different']} differ")
    raise SystemExit(total["different"] > 0)


if __name__ == "__main__":
    main()

"""Compares the token ids that kvpin makes with those of an engine, by form of request and chat template.

For each chat template that llama-cpp-python ships, builds the prompts of tests/live/prompt_forms.py as kvpin
does, and compares them with what the engine makes. Prints which of the forms that kvpin probes it makes
itself. An engine is started for each template. vLLM and SGLang: tests/live/message_variants.py.

    python benchmarks/prompt_forms.py                   a llama-server, all templates: about five minutes
    python benchmarks/prompt_forms.py --template Qwen   those whose name contains this
    python benchmarks/prompt_forms.py --engine embedded --templates 20    20 of them
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from engine_adapter import ChatError, EngineAdapter, EngineRejected, JsonBody, make_adapter
from engine_adapter.prompt.chat import ChatTokenizer, load_transformers
from engine_adapter.prompt.encoders import exact_encoder
from engine_adapter.prompt.forms import Form
from proxy.prompt import PromptBuilder, RegisteredTables, verify_exactness
from proxy.prompt.render import CHAT_PATH
from scripts.make_checkpoint import checkpoint_path
from scripts.make_gguf import gguf_path
from scripts.shipped_models import shipped_models
from tests.engines import engine_spec, running_engine
from tests.live.prompt_forms import FORMS
from tests.live.server_world import MODEL
from tests.llama import running_llama_server

KINDS = {name: name.replace("-", "_") for name in ("llama-server", "embedded")}
PROBED = [form for form in Form if form not in (Form.DOCUMENTS, Form.OTHER)]


@contextmanager
def running(engine: str, template: Path, work: Path) -> Iterator[str]:
    """The address of an engine with this chat template, which serves `MODEL`."""
    log, model = work / "log", work / "model"
    with ExitStack() as stack:
        if engine == "llama-server":
            flags = ("--alias", MODEL, "--chat-template-file", str(template))
            yield stack.enter_context(running_llama_server(log, None, *flags, slots=1)).url
            return
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(checkpoint_path("model"), model)
        shutil.copyfile(template, model / "chat_template.jinja")
        named = ("--model", str(model), "--served-model-name", MODEL, "--kv-blocks", "64")
        yield stack.enter_context(running_engine(log, *named)).url


async def compare(adapter: EngineAdapter, chats: ChatTokenizer) -> Counter[str]:
    """Counts the probed forms that are made here, and chats by who makes their ids; prints what differs."""
    counts = Counter[str]()
    try:
        info = await adapter.connect()
        builder = PromptBuilder(info, tables=RegisteredTables(), engines=lambda _: [adapter])
        builder.adopt(chats.rendering(info.template_input))
        await verify_exactness(builder, adapter)
        rows = {form: builder.forms.rows[form] for form in PROBED if form in builder.forms.rows}
        here = [form for form, row in rows.items() if row.source == "local"]
        counts.update(f"form: {form}" for form in here)
        counts["forms"] = len(here)
        print(f"{chats.source}: {len(here)} of {len(PROBED)} forms: {builder.exactness.detail}", flush=True)
        for name, fields in FORMS.items():
            body = JsonBody(msgspec.json.encode({"model": MODEL, **fields}))
            prompt = None
            try:
                prompt = await builder.build(CHAT_PATH, body, salt=None)
            except ChatError:  # the embedded engine refuses it, too
                counts["refused here"] += 1
            try:
                theirs = await adapter.tokenize(CHAT_PATH, body)
            except EngineRejected:
                counts["refused by the server"] += 1
                continue
            counts["unknown" if prompt is None else prompt.source] += 1
            if prompt is not None and prompt.token_ids != theirs:
                counts["different"] += 1
                print(f"{chats.source}: {name!r} differs", flush=True)
    finally:
        await adapter.aclose()
    return counts


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", default="llama-server", choices=list(KINDS))
    parser.add_argument("--template", default="", help="only those whose name contains this")
    parser.add_argument("--templates", type=int, default=1000, help="the most of them, evenly spread")
    options = parser.parse_args()
    kind = KINDS[options.engine]
    found = [path for path in sorted(shipped_models().glob("*.jinja")) if options.template in path.name]
    count = min(options.templates, len(found))
    model = gguf_path("tiny") if kind == "llama_server" else checkpoint_path("model")
    tokenizer = load_transformers(str(model))
    encoder, total = exact_encoder(tokenizer), Counter[str]()
    with tempfile.TemporaryDirectory() as work:
        for path in [found[at * len(found) // count] for at in range(count)]:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
            chats = ChatTokenizer(tokenizer, source=path.stem, encoder=encoder)
            with running(options.engine, path, Path(work)) as url:
                named = {"model": MODEL} if kind == "llama_server" else {}
                total += asyncio.run(compare(make_adapter(engine_spec(kind, url, **named)), chats))
    print(f"\n{options.engine}: {total['forms']} of {len(PROBED) * count} forms are made here")
    print(f"{dict(total)}; {total['different']} differ")
    raise SystemExit(total["different"] > 0)


if __name__ == "__main__":
    main()

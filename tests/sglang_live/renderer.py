"""SGLang's own code that makes a chat's prompt, without a server: run by SGLang's Python.

It reads lines of JSON and answers each by a line:

    {"template": TEXT}                         {}: the template of all further chats
    {"chat": BODY}, {"tokenize": BODY}         {"ids": [...]} or {"refused": WHY}

as `/v1/chat/completions` and `/tokenize` do with these bodies.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, TokenizeRequest
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs
from transformers import AutoTokenizer


def main(model: str) -> None:
    """Answers until the input ends."""
    arguments = ServerArgs(model_path=model, device="cpu", tool_call_parser="hermes")
    publish(arguments, role="tokenizer")
    manager = SimpleNamespace(
        server_args=arguments,
        tokenizer=AutoTokenizer.from_pretrained(model),
        model_config=ModelConfig.from_server_args(arguments),
        model_path=model,
        served_model_name="m",
        config_value=lambda name: getattr(arguments, name),
    )
    serving: Any = None
    for line in sys.stdin:
        (kind, given), *_ = json.loads(line).items()
        if kind == "template":
            serving, answer = serving_with(manager, given), {}
        else:
            answer = prompt_of(serving, kind, given)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def serving_with(manager: Any, template: str) -> OpenAIServingTokenize:
    """The server's handler of `/tokenize`, which has that of chats."""
    templates = TemplateManager()
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(template)
        file.flush()
        templates.initialize_templates(manager, manager.model_path, file.name)
    return OpenAIServingTokenize(manager, templates)


def prompt_of(serving: OpenAIServingTokenize, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The ids of a chat, or why it is refused."""
    chats = serving.chat_serving
    try:
        if kind == "tokenize":
            return {"ids": serving._tokenize_chat_request(TokenizeRequest.model_validate(body))}
        request = ChatCompletionRequest.model_validate(body)
        if error := chats._validate_request(request):
            return {"refused": error}
        return {"ids": chats._process_messages(request, is_multimodal=False).prompt_ids}
    except Exception as error:  # noqa: BLE001 - the server answers each with an error
        return {"refused": repr(error)}


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))

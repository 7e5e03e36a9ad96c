"""Turns a request for an answer into requests to the engine, one per choice, and their readers and writer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from engine_adapter.torch_engine.admission import check_token_id
from engine_adapter.torch_engine.answers import AnswerWriter, ChatShape, CompletionShape
from engine_adapter.torch_engine.choices import ChoiceReader, Echo
from engine_adapter.torch_engine.detokenize import Detokenizer
from engine_adapter.torch_engine.grammar import Grammar
from engine_adapter.torch_engine.prompt_tables import Prompt
from engine_adapter.torch_engine.protocol import (
    ChatRequest,
    CompletionRequest,
    PromptRequest,
    answered_of,
    choices_of,
    prompt_of,
    retention_of,
    salt_of,
    sampling_of,
)
from engine_adapter.torch_engine.requests import GenerationRequest, SamplingParams
from engine_adapter.torch_engine.service import EngineService
from engine_adapter.torch_engine.structure import Structure, ToolUse, structure_of, tool_use_of
from engine_adapter.torch_engine.tool_calls import CallFormat, format_of
from engine_adapter.torch_engine.web import ApiError
from engine_adapter.types import TokenIds, extra_array


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request.

    Attributes:
        requests: to the engine; one per choice, as `readers`.
        prompt_tokens, answered: tokens of the prompt, and of the answer's beginning.
    """

    requests: list[GenerationRequest]
    readers: list[ChoiceReader]
    writer: AnswerWriter
    streams: bool
    prompt_tokens: int
    answered: int


async def prepare(service: EngineService, request: PromptRequest) -> Prepared:
    """Checks a request and renders its prompt, before the engine sees it.

    Raises:
        ApiError, ChatError, PromptTableError, RequestRefused: the client's fault.
    """
    default = service.model.default_max_tokens if isinstance(request, ChatRequest) else None
    sampling = sampling_of(request, default_max_tokens=default)
    n = choices_of(request)
    use, format_ = _tool_use(service, request)
    structure = _structure(request, use)
    _check_contents(request)
    prompt = await service.prompt(request)
    service.check_length(request, len(prompt.token_ids))
    answered = answered_of(request, sampling)
    for index, token in enumerate(answered):
        check_token_id(token, f"answer_token_ids[{index}]", service.model.vocab_size)
    salt = salt_of(request.cache_salt)
    grammar = None if structure is None else await service.grammars.compile(structure, salt)
    drops = sampling.max_tokens == 0
    sampling = _within(service, sampling, prompt, answered)
    echo = _echo(service, request, prompt, sampling)
    shows_special = _shows_special(service, use, format_)
    readers = [
        ChoiceReader(
            Detokenizer(service.tokenizer, request.stops, skips_special=not shows_special),
            end_tokens=_ends(service, sampling),
            answered=answered,
            calls=None if use is None else use.reader(format_),
            echo=echo,
            drops=drops,
        )
        for _ in range(n)
    ]
    return Prepared(
        requests=_requests(request, prompt, sampling, answered, grammar),
        readers=readers,
        writer=_writer(service, request, prompt, sampling, answered),
        streams=bool(request.stream),
        prompt_tokens=len(prompt.token_ids),
        answered=len(answered),
    )


def _requests(
    request: PromptRequest,
    prompt: Prompt,
    sampling: SamplingParams,
    answered: TokenIds[int],
    grammar: Grammar | None,
) -> list[GenerationRequest]:
    extra_ids = prompt.extra_ids
    first = GenerationRequest(
        request_id=secrets.token_hex(12),
        token_ids=prompt.token_ids + answered,
        sampling=sampling,
        extra_ids=None if extra_ids is None else extra_ids + extra_array([0] * len(answered)),
        embeddings=prompt.tensors,
        cache_salt=salt_of(request.cache_salt),
        retention=retention_of(request),
        priority=request.priority or 0,
        answered=len(answered),
    )
    return [
        replace(
            first,
            request_id=f"{first.request_id}-{index}",
            sampling=_of_choice(sampling, index),
            constraint=None if grammar is None else grammar.begin(answered),
        )
        for index in range(choices_of(request))
    ]


def _ends(service: EngineService, sampling: SamplingParams) -> frozenset[int]:
    """The tokens that end an answer."""
    ends = frozenset() if sampling.ignore_eos else service.model.eos_token_ids
    return ends.union(sampling.stop_token_ids)


def _writer(
    service: EngineService,
    request: PromptRequest,
    prompt: Prompt,
    sampling: SamplingParams,
    answered: TokenIds[int],
) -> AnswerWriter:
    return AnswerWriter(
        shapes=[
            ChatShape(service.token_bytes)
            if isinstance(request, ChatRequest)
            else CompletionShape(service.token_bytes, answered)
            for _ in range(choices_of(request))
        ],
        model=service.model.name,
        with_logprobs=sampling.logprobs is not None,
        prompt_token_ids=prompt.token_ids.tolist() if request.return_token_ids else None,
        include_usage=request.include_usage,
        tells_tokens=bool(request.stream_token_ids),
        goes_on=bool(answered),
    )


def _check_contents(request: PromptRequest) -> None:
    """Refuses messages without content, as OpenAI does; templates would show the model nothing, or `None`.
    An answer of the model itself may be calls alone. Raises ApiError (400)."""
    messages = request.messages if isinstance(request, ChatRequest) else None
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        match message:
            case {"role": "user" | "system" | "developer" | "tool"} if message.get("content") is None:
                param = f"messages[{index}].content"
                raise ApiError(f"{param} is missing", param=param)


def _within(
    service: EngineService, sampling: SamplingParams, prompt: Prompt, answered: TokenIds[int]
) -> SamplingParams:
    """The limits of what is still to be generated. The engine generates one token at least."""
    room = service.engine.max_model_len - len(prompt.token_ids)
    most = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return replace(
        sampling,
        max_tokens=max(most - len(answered), 1),
        min_tokens=max(sampling.min_tokens - len(answered), 0),
    )


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choice i has the request's seed + i, as elsewhere. The first choice alone scores the prompt."""
    if not index:
        return sampling
    seed = None if sampling.seed is None else sampling.seed + index
    return replace(sampling, seed=seed, prompt_logprobs=None)


def _tool_use(service: EngineService, request: PromptRequest) -> tuple[ToolUse | None, CallFormat | None]:
    """The tools that the answer may use, and the format of calls that the chat template shows the model."""
    if not isinstance(request, ChatRequest):
        return None, None
    template = service.tokenizer.template(request.tools) if request.tools else None
    format_ = None if template is None else format_of(template)
    parallel = request.parallel_tool_calls
    return tool_use_of(request.tools, request.tool_choice, parallel=parallel, format_=format_), format_


def _structure(request: PromptRequest, use: ToolUse | None) -> Structure | None:
    """The structure of the answer; raises ApiError (400) where other fields make it impossible."""
    asked = structure_of(request)
    of_tools = None if use is None else use.structure
    if asked is not None and of_tools is not None:
        if of_tools.kind != "tags":
            raise ApiError(f"tool_choice and {asked.param} exclude each other", param="tool_choice")
        of_tools = None
    structure = asked or of_tools
    if structure is not None:
        for name in ("ignore_eos", "min_tokens"):
            if getattr(request, name):
                raise ApiError(f"{name} and {structure.param} exclude each other", param=name)
    return structure


def _shows_special(service: EngineService, use: ToolUse | None, format_: CallFormat | None) -> bool:
    """True if calls begin with a special token, which text usually leaves out."""
    if use is None or use.named is not None or use.listed or format_ is None:
        return False
    return format_.opens in service.tokenizer.special_tokens


def _echo(
    service: EngineService, request: PromptRequest, prompt: Prompt, sampling: SamplingParams
) -> Echo | None:
    if not isinstance(request, CompletionRequest) or not request.echo:
        return None
    if request.answer_token_ids:
        raise ApiError("echo and answer_token_ids exclude each other", param="echo")
    if prompt.extra_ids is not None:
        raise ApiError("echo: embeddings in a prompt have no text", param="echo")
    given = prompt_of(request.prompt)
    text = given if isinstance(given, str) else service.tokenizer.decode(prompt.token_ids)
    return Echo(text, prompt.token_ids if sampling.prompt_logprobs is not None else None)

"""Turns a request for an answer into requests to the engine, one per choice, and their readers and writer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine_adapter.torch_engine.answers import AnswerWriter, ChatShape, CompletionShape, Piece
from engine_adapter.torch_engine.detokenize import Detokenizer
from engine_adapter.torch_engine.grammar import Grammar, Structure, ToolUse, structure_of, tool_use_of
from engine_adapter.torch_engine.prompt_tables import EnginePrompt
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
from engine_adapter.torch_engine.requests import (
    Finished,
    GenerationRequest,
    PromptScores,
    SamplingParams,
    Token,
)
from engine_adapter.torch_engine.scheduler import check_token_id
from engine_adapter.torch_engine.service import EngineService, Outputs
from engine_adapter.torch_engine.tool_calls import CallFormat, CallReader, Found, format_of
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
    prompt: EnginePrompt,
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
    prompt: EnginePrompt,
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
    service: EngineService, sampling: SamplingParams, prompt: EnginePrompt, answered: TokenIds[int]
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
    service: EngineService, request: PromptRequest, prompt: EnginePrompt, sampling: SamplingParams
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


@dataclass(slots=True)
class Echo:
    """The prompt, which stands before each choice of a completion with `echo`.

    Attributes:
        text: its text.
        unscored: its tokens, while their logprobs are awaited; None otherwise.
        tokens: its tokens with their logprobs.
    """

    text: str
    unscored: TokenIds[int] | None = None
    tokens: list[Token] = field(default_factory=list)

    def score(self, found: PromptScores) -> None:
        """Takes the logprobs. The first token has none."""
        scores = [(None, None), *found.scores]
        self.tokens = [Token(i, *score) for i, score in zip(self.unscored or (), scores, strict=True)]
        self.unscored = None


@dataclass
class ChoiceReader:
    """One choice while it is generated.

    Attributes:
        answered: the answer's tokens before it: new text depends on them.
        drops: the client wants no token of it.
        finish_reason: None until it has ended.
    """

    detokenizer: Detokenizer
    end_tokens: frozenset[int]
    answered: Sequence[int] = ()
    calls: CallReader | None = None
    echo: Echo | None = None
    drops: bool = False
    completion_tokens: int = field(default=0, init=False)
    finish_reason: str | None = field(default=None, init=False)
    _new: Piece = field(init=False)

    def __post_init__(self) -> None:
        self._new = Piece("" if self.echo is None else self.echo.text)
        for token_id in self.answered:
            self._read(self.detokenizer.push(token_id))

    def accept(self, outputs: Outputs) -> None:
        """Reads what the engine made. Nothing counts after the end."""
        for output in outputs:
            if self.finish_reason is not None:
                return
            if isinstance(output, PromptScores):
                if self.echo is not None:
                    self.echo.score(output)
            elif isinstance(output, Token):
                self._accept_token(output)
            elif isinstance(output, Finished):
                self._end("length" if self.drops else output.reason)

    def take(self) -> Piece:
        """Text and tokens since the last call; nothing until the echo is complete."""
        if self.echo is not None:
            if self.echo.unscored is not None:
                return Piece()
            self._new.echoed, self.echo = self.echo.tokens, None
        new, self._new = self._new, Piece()
        return new

    def _accept_token(self, token: Token) -> None:
        if self.drops:
            return
        self.completion_tokens += 1
        self._new.tokens.append(token)
        if token.token_id not in self.end_tokens:
            self._add(self._read(self.detokenizer.push(token.token_id)))
        if self.detokenizer.stopped:
            self._end("stop")

    def _end(self, reason: str) -> None:
        self._add(self._read(self.detokenizer.finish()))
        if self.detokenizer.stopped:
            reason = "stop"
        if self.calls is not None:
            self._add(self.calls.finish())
            if reason == "stop" and self.calls.ends_as is not None:
                reason = self.calls.ends_as
        self.finish_reason = self._new.finish_reason = reason

    def _read(self, text: str) -> Found:
        return Found(text) if self.calls is None else self.calls.push(text)

    def _add(self, found: Found) -> None:
        self._new.text += found.text
        self._new.calls += found.calls

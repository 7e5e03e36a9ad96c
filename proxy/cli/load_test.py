"""A small load test of an OpenAI-compatible server, in the words of vLLM's benchmark.

workload → prompts, arrivals → send → a sample of each request → figures
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from proxy.cli.client import authorities, key_header, untrusted

if TYPE_CHECKING:
    from proxy.cli.measure import BenchOptions

_WORDS = tuple(
    f"{first}{last}" for first in ("ba", "ko", "li", "mu", "ne", "ra") for last in ("d", "l", "n", "t")
)


def prompts_of(load: BenchOptions, salt: str) -> list[str]:
    """The text of each request, in random order over the prefixes. Another salt gives other prefixes: no
    cache holds them yet."""
    chance = random.Random(load.seed)  # noqa: S311 - a load, no secret
    prefixes = [
        f"Document {salt}-{number}: {_text(chance, load.prefix_len)}" for number in range(load.num_prefixes)
    ]
    turns = [number % load.num_prefixes for number in range(load.num_prompts)]
    chance.shuffle(turns)
    return [f"{prefixes[turn]}\n\nQuestion: {_text(chance, load.suffix_len)}" for turn in turns]


def _arrivals(load: BenchOptions) -> Iterator[float]:
    """Seconds from the start to each request."""
    chance, at = random.Random(load.seed), 0.0  # noqa: S311 - likewise
    for _ in range(load.num_prompts):
        yield at
        at += 0.0 if math.isinf(load.request_rate) else chance.expovariate(load.request_rate)


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words))


_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class BenchError(Exception):
    """The server cannot be measured: why, in one sentence."""


@dataclass(slots=True)
class RequestSample:
    """One request. Times in seconds.

    Attributes:
        error: why it failed; empty for one that did not.
        ttft_s: to the first text.
        gaps_s: between the parts of the answer.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them; cached is None where it
            does not tell.
    """

    error: str = ""
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0


async def run(
    base_url: str, load: BenchOptions, salt: str, progress: Callable[[], None]
) -> tuple[list[RequestSample], float]:
    """Sends everything to an address that ends in `/v1`; returns the samples and the seconds from the first
    request to the last answer. The load names the model.

    One request that does not count goes ahead, to see that the server answers. Raises BenchError if it does
    not answer."""
    options: dict[str, Any] = {"limits": httpx.Limits(max_connections=None), "verify": authorities()}
    async with httpx.AsyncClient(timeout=None, trust_env=False, **options) as client:  # noqa: S113 - a load
        first = await _ask(client, base_url, load, "Hello!")
        if first.error:
            raise BenchError(f"{base_url}: {first.error}")
        free = asyncio.Semaphore(load.max_concurrency)
        start = time.perf_counter()

        async def send(prompt: str, at: float) -> RequestSample:
            await asyncio.sleep(start + at - time.perf_counter())
            async with free:
                sample = await _ask(client, base_url, load, prompt)
            progress()
            return sample

        both = zip(prompts_of(load, salt), _arrivals(load), strict=True)
        return await asyncio.gather(*(send(prompt, at) for prompt, at in both)), time.perf_counter() - start


async def first_model(base_url: str, api_key: str | None) -> str:
    """The first model that a server lists; raises BenchError."""
    async with httpx.AsyncClient(trust_env=False, verify=authorities()) as client:
        try:
            answer = await client.get(f"{base_url}/models", headers=key_header(api_key))
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise BenchError(f"{base_url!r} is not an address: {error}") from error
        except httpx.HTTPStatusError as error:
            raise BenchError(f"{base_url}/models: {_error_of(error.response)}") from error
        except httpx.HTTPError as error:
            why = untrusted(base_url, error) or f"nothing answers at {base_url}: {error}"
            raise BenchError(why) from error
        except (ValueError, LookupError, TypeError) as error:
            raise BenchError(f"{base_url}/models lists no model: name one with --model") from error


async def _ask(client: httpx.AsyncClient, base_url: str, load: BenchOptions, prompt: str) -> RequestSample:
    body = {
        "model": load.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": load.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = RequestSample()
    start = last = time.perf_counter()
    try:
        async with client.stream(
            "POST", f"{base_url}/chat/completions", json=body, headers=key_header(load.api_key)
        ) as answer:
            if not answer.is_success:
                await answer.aread()
                return RequestSample(error=_error_of(answer))
            async for line in _lines(answer):
                if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                    continue
                now = time.perf_counter()
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    return RequestSample(error=str(chunk["error"]))
                _read_usage(chunk.get("usage"), sample)
                if not any(choice["delta"].get(name) for choice in chunk["choices"] for name in _TEXT_FIELDS):
                    continue
                if sample.ttft_s:
                    sample.gaps_s.append(now - last)
                else:
                    sample.ttft_s = now - start
                last = now
    except (httpx.InvalidURL, httpx.HTTPError) as error:
        return RequestSample(error=str(error) or type(error).__name__)
    except (ValueError, LookupError, TypeError, AttributeError):
        return RequestSample(error="its answer is not a stream of chat completion chunks")
    sample.latency_s = last - start
    return sample if sample.ttft_s else RequestSample(error="its answer has no text")


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream. httpx also ends a line where a text has a line separator."""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")


def _read_usage(usage: dict[str, object] | None, sample: RequestSample) -> None:
    if not usage:
        return
    sample.prompt_tokens, sample.output_tokens = (
        int(str(usage.get(name) or 0)) for name in ("prompt_tokens", "completion_tokens")
    )
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        cached = details.get("cached_tokens")
        sample.cached_tokens = cached if isinstance(cached, int) else None


def _error_of(answer: httpx.Response) -> str:
    """The status, and the message of an error in OpenAI's shape."""
    try:
        message = f": {answer.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        message = ""
    remedy = "; --api-key gives a client's key" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
    return f"{answer.status_code} {answer.reason_phrase}{message}{remedy}"


Figures = dict[str, float | None]


def figures(samples: Sequence[RequestSample], duration_s: float) -> Figures:
    """Times in milliseconds, throughput a second. None where no request tells.

    TTFT: to the first text. TPOT: of each token after the first. ITL: between two parts of an answer.
    E2EL: to the end of the answer.
    """
    done = [sample for sample in samples if not sample.error]
    prompt, output = (
        sum(getattr(sample, name) for sample in done) for name in ("prompt_tokens", "output_tokens")
    )
    cached = [sample.cached_tokens for sample in done if sample.cached_tokens is not None]
    times = {
        "ttft": [sample.ttft_s for sample in done],
        "tpot": [(s.latency_s - s.ttft_s) / (s.output_tokens - 1) for s in done if s.output_tokens > 1],
        "itl": [gap for sample in done for gap in sample.gaps_s],
        "e2el": [sample.latency_s for sample in done],
    }
    return {
        "completed": len(done),
        "failed": len(samples) - len(done),
        "duration": duration_s,
        "total_input_tokens": prompt,
        "cached_input_tokens": sum(cached) if cached else None,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
        **{name: value for kind, values in times.items() for name, value in _spread(kind, values).items()},
    }


def _spread(kind: str, values: Sequence[float]) -> Figures:
    """Mean, median and 99th percentile in milliseconds, interpolated as numpy does."""
    names = [f"{name}_{kind}_ms" for name in ("mean", "median", "p99")]
    if not values:
        return dict.fromkeys(names)
    p99 = statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
    spread = (statistics.fmean(values), statistics.median(values), p99)
    return {name: value * 1000 for name, value in zip(names, spread, strict=True)}

"""What tests of several packages share."""

import inspect
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from zlib import crc32

import httpx
import pytest
import structlog
from httpx import create_ssl_context
from hypothesis import HealthCheck, settings

from tests.forks import fork_children

pytest_plugins = ["tests.engines", "tests.llama"]

# The same examples in every run: what is red here is red everywhere, and coverage does not flicker. How busy
# the machine is does not matter either.
settings.register_profile(
    "same-every-time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("whole", settings.get_profile("same-every-time"), max_examples=1000)
IS_WHOLE = "WHOLE_TESTS" in os.environ  # scripts/test-nightly
settings.load_profile("whole" if IS_WHOLE else "same-every-time")

ROOT = Path(__file__).parents[1]
# Tests that the coverage of the pure core counts, see tool.coverage.run in pyproject.toml. To trace the
# others, too, would take much of their time.
COVERING = (
    "tests/proxy/core",
    "tests/proxy/fleet",
    "tests/proxy/prompt",
    "tests/proxy/steps",
    "tests/proxy/test_flow.py",
    "tests/proxy/api/fan_out",
    "tests/proxy/api/test_openai.py",
    "tests/flow",
    "tests/engine_adapter/test_",
    "tests/engine_adapter/prompt/test_extra_ids.py",
)
NOT_COVERING = ("tests/flow/test_held_loop.py",)  # it measures time
# The files that take longest, in seconds.
LONGEST = {
    file: float(seconds)
    for file, seconds in map(str.split, (ROOT / "tests" / "longest.txt").read_text().splitlines())
}


def pytest_configure(config: pytest.Config) -> None:
    """Declares the mark of large sets."""
    meaning = "one of a large set, of which each run has every n-th; scripts/test-nightly has all"
    config.addinivalue_line("markers", f"part(n): {meaning}")


# Tests here start kvpins and engines, real or fake.
LIVE = ROOT / "tests" / "live"
# Who uses one of these, as a fixture or by calling it, starts a real engine.
STARTS = {
    *("llama", "start_llama", "llama_server", "running_llama_server", "running_llama_router", "llama_world"),
    *("embedded_engine", "start_engine", "running_engine", "running_kvpin", "starting_kvpin"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests of live engines, keeps a part of large sets, and lets several workers take the longest
    files first, so that none is left with one in the end."""
    for item in items:
        if item.path.is_relative_to(LIVE) or _starts_engine(item):
            item.add_marker("live")
    is_named = config.option.keyword or any("::" in each for each in config.option.file_or_dir)
    if not IS_WHOLE and not is_named:
        left_out = [item for item in items if not _is_in_part(item)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if _is_in_part(item)]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -LONGEST.get(item.path.relative_to(ROOT).as_posix(), 0.0))


def _starts_engine(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    made = (each.func for all_made in item._fixtureinfo.name2fixturedefs.values() for each in all_made)
    called = {name for func in (item.function, *made) for name in _code_of(func).co_names}
    return not STARTS.isdisjoint({*item.fixturenames, *called})


def _code_of(function: Callable[..., object]) -> CodeType:
    return inspect.unwrap(getattr(function, "__func__", function)).__code__


def _is_in_part(item: pytest.Item) -> bool:
    """Whether each run has a test: one of those marked `part(n)`, each n-th case, else all."""
    marker = item.get_closest_marker("part")
    return marker is None or crc32(item.nodeid.encode()) % marker.args[0] == 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Traces the tests that count for the coverage alone."""
    controller = getattr(item.config.pluginmanager.getplugin("_cov"), "cov_controller", None)
    path = item.path.relative_to(ROOT).as_posix()
    counts = path.startswith(COVERING) and not path.startswith(NOT_COVERING)
    if controller is not None and controller.started != counts:
        (controller.resume if counts else controller.pause)()


fork_children()
# Clients read the certificates of the world once, not each anew: that takes 20 ms.
_context = create_ssl_context()


def _one_context(
    verify: ssl.SSLContext | str | bool = True, cert: object = None, trust_env: bool = True
) -> ssl.SSLContext:
    is_default = verify is True and cert is None
    if is_default and not (trust_env and os.environ.keys() & {"SSL_CERT_FILE", "SSL_CERT_DIR"}):
        return _context
    return create_ssl_context(verify=verify, cert=cert, trust_env=trust_env)


httpx._transports.default.create_ssl_context = _one_context

CHATML = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('unknown role ' + message.role) }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\n<call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if not enable_thinking | default(true) %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""

CORPUS = [
    "The cache of a serving engine holds the keys and values of every token it has seen.",
    "system user assistant tool You are a helpful assistant. What is the weather in Paris today?",
    "def render(messages): return ''.join(message['content'] for message in messages)",
    "zażółć gęślą jaźń, größer, çà et là, Привет мир, 漢字かな交じり文, 🙂🚀",
    '0 1 2 3 4 5 6 7 8 9 10 100 1000 2024 3.14159 {"city": "Paris", "days": 3}',
]


@pytest.fixture(autouse=True)
def default_logging():
    """A test that sets up logging does not do so for the tests after it."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    """A small byte-level BPE tokenizer with a ChatML template, as a directory transformers can load."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    ).save_pretrained(directory)
    return directory

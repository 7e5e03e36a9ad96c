"""What tests of several packages share."""

import logging
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.engines", "tests.llama"]

# The same examples in every run: what is red here is red everywhere, and coverage does not flicker. How busy
# the machine is does not matter either.
settings.register_profile(
    "same-every-time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same-every-time")

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

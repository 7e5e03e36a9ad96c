"""Writes a tiny vision model: an Idefics3 with random weights and kvpin-tiny's tokenizer, to serve in tests.

An image becomes 56 tokens (twice as wide as high) or 93 tokens (square), including text such as
`<row_1_col_1>`: more than one block, and never whole blocks. The weights are large enough that another image
gives another answer.

    python scripts/make_vision_model.py DIRECTORY
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

DEFAULT_MODEL = Path(__file__).parent.parent / "engine_adapter" / "torch_engine" / "default_model"
IMAGE_TOKEN = "<image>"  # noqa: S105 - no password
# An image becomes at most two by two tiles of this many pixels, and one tile of the whole: 16 tokens each.
TILE, PATCH, SCALE = 96, 8, 3
ADDED_TOKENS = (
    "<fake_token_around_image>", IMAGE_TOKEN, "<end_of_utterance>", "<global-img>",
    "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>",
)  # fmt: skip
COPIED = ("generation_config.json", "tokenizer_config.json")
SPREAD = 1.5
PROCESSOR = {
    "preprocessor_config.json": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 2 * TILE},
        "max_image_size": {"longest_edge": TILE},
    },
    "processor_config.json": {
        "processor_class": "Idefics3Processor",
        "image_seq_len": (TILE // PATCH // SCALE) ** 2,
    },
}

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{- part.text }}{% elif part.type == 'image' %}{{- '<image>' }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def make_config(tokenizer: Tokenizer) -> Idefics3Config:
    """The model's configuration: a small Llama that looks through a small SigLIP."""
    own = json.loads((DEFAULT_MODEL / "config.json").read_text())
    rows = -(-tokenizer.get_vocab_size() // 64) * 64
    text = {"vocab_size": rows, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
    return Idefics3Config(
        image_token_id=tokenizer.token_to_id(IMAGE_TOKEN),
        scale_factor=SCALE,
        pad_token_id=own["pad_token_id"],
        text_config=own | text | {"head_dim": 32},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": PATCH,
        },
    )


def write_weights(config: Idefics3Config, directory: Path) -> None:
    """Draws the same weights each time and writes them with the configuration."""
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, SPREAD / weight.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(directory)


def make_tokenizer() -> Tokenizer:
    """The default model's tokenizer, with the tokens for images."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ADDED_TOKENS])
    return tokenizer


def main(directory: Path) -> None:
    """Writes the directory, over existing files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    write_weights(make_config(tokenizer), directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name in COPIED:
        shutil.copyfile(DEFAULT_MODEL / name, directory / name)
    for name, content in PROCESSOR.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

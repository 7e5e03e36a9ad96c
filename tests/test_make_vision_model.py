"""The vision model that live tests serve: whole, the same each time, and with a tokenizer kvpin reads."""

import json

import pytest
from transformers import AutoConfig

from engine_adapter.prompt.chat import ChatTokenizer
from scripts.make_vision_model import IMAGE_TOKEN, main


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    main(directory)
    return directory


def test_it_is_whole_and_the_same_each_time(directory, tmp_path):
    main(tmp_path)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files.keys() >= {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"}


def test_its_parts_fit(directory):
    config = AutoConfig.from_pretrained(directory)
    tokenizer = ChatTokenizer.load(str(directory))
    assert tokenizer.encode(IMAGE_TOKEN, add_special_tokens=False).tolist() == [config.image_token_id]
    assert tokenizer.vocab_size <= config.text_config.vocab_size
    tile = config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor
    assert json.loads((directory / "processor_config.json").read_text())["image_seq_len"] == tile**2


def test_text_is_tokenised_without_an_image_processor(directory):
    tokenizer = ChatTokenizer.load(str(directory))
    text = tokenizer.render([{"role": "user", "content": [{"type": "text", "text": "What is there?"}]}])
    assert text == "<|im_start|>user\nWhat is there?<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "What is there?"}]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.chat(messages).token_ids == ids

"""A chat's token counts. What each API makes of them: test_messages_answer.py, test_responses_answer.py."""

import msgspec
import pytest

from proxy.translate.usage import ChatUsage


def usage(details=None, **fields):
    return msgspec.convert({"prompt_tokens": 40, "prompt_tokens_details": details, **fields}, ChatUsage)


@pytest.mark.parametrize(
    ("details", "cached", "written"),
    [
        (None, 0, 32),
        ({"cached_tokens": None}, 0, 32),
        ({"cached_tokens": 16}, 16, 16),
        ({"cached_tokens": 39}, 39, 0),
        ({"cached_tokens": 16, "cache_write_tokens": 0}, 16, 0),
        ({"created_cache_tokens": 5}, 0, 5),
        ({"cache_write_tokens": 7, "created_cache_tokens": 5}, 0, 7),
    ],
)
def test_what_was_read_from_the_cache_and_written_to_it(details, cached, written):
    assert (usage(details).cached, usage(details).written(16)) == (cached, written)


def test_an_engine_that_tells_no_block_size_keeps_every_token():
    assert usage().written(None) == 40


def test_reasoning():
    assert usage().reasoning == 0
    assert usage(completion_tokens_details={"reasoning_tokens": None}).reasoning == 0
    assert usage(completion_tokens_details={"reasoning_tokens": 3}).reasoning == 3

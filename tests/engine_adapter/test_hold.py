from engine_adapter import JsonBody, KvTarget, SelfPlaced
from engine_adapter.types import token_array


class TestSelfPlaced:
    async def test_the_body_goes_as_it_is_and_nothing_is_foreseen(self):
        prompt, body = KvTarget(token_array([1, 2])), JsonBody(b'{"a": 1}')
        assert SelfPlaced().forecast(prompt) is None
        async with SelfPlaced().hold("/v1/completions", body, prompt) as hold:
            assert hold.body is body
            assert (hold.cached_tokens, hold.answer) == (None, None)

from array import array

import pytest

from engine_adapter.llama_server.answer import Answer
from engine_adapter.llama_server.lease import SlotLease
from engine_adapter.llama_server.slot_owners import UNKNOWN_OWNER
from engine_adapter.llama_server.turns import Ask


@pytest.mark.parametrize(
    ("tokens", "salt", "answer", "leaves_own"),
    [
        ([], None, Answer(is_complete=True), True),
        ([], "s", Answer(is_complete=True), True),
        ([5], None, Answer(is_complete=True), False),
        pytest.param([], UNKNOWN_OWNER, Answer(is_complete=True), False, id="owner unknown"),
        ([], None, Answer(is_complete=True, error="no"), False),
        ([], None, Answer(), False),
        ([], None, None, False),
    ],
)
def test_kv_of_an_unknown_prompt_is_its_clients_once_the_answer_is_whole(tokens, salt, answer, leaves_own):
    ask = Ask(array("i", tokens), salt)
    lease = SlotLease(0, ask, 0, True, True, False, array("i"), 0, 0.0, answer)
    assert lease.leaves_own is leaves_own

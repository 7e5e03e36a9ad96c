"""Which user asks what."""

from types import SimpleNamespace


def test_a_chat_is_one_users_and_keeps_its_order(script):
    sessions = ["chat-1", "document-7", "chat-2", "chat-1", "document-7", "chat-2", "chat-1"]
    work = [SimpleNamespace(session=session, at=at) for at, session in enumerate(sessions)]
    of_users = [[question.at for question in mine] for mine in script.shares(work, 3)]
    assert of_users == [[0, 3, 6, 4], [1], [2, 5]]

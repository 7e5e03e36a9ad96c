"""Random lives of one stream, on engines that fail, hang, are lost and give other answers: what must hold
whatever happens. The text passes the real `Passage` of each attempt, in random pieces.
"""

import json
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_adapter import EngineDiverged, WholeEvents
from proxy.core.life import Cause, Life, Phase, RetryBudget, Rules
from proxy.request.migration import Passage

RULES = Rules(first_byte_s=10, idle_s=8, total_s=100, retries=3, queue_s=5)
ENGINES = ("a", "b", "c", "d")
ANSWER = "ababababab! The quick brown fox \n\n jumps over [DONE] the lazy dog."
RUNNING = Phase.IN_TURN, Phase.LEASED, Phase.ANSWERING
FAILURES = [cause for cause in Cause if cause.elsewhere and cause is not Cause.DIVERGED]


def chunk(text, finish=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "1", "choices": [choice]}).encode() + b"\n\n"


def text_of(stream):
    events = [json.loads(each[6:]) for each in stream.split(b"\n\n") if each.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def cut(text, dice, most):
    """Text or bytes in pieces, as an engine or a socket sends them."""
    pieces, at = [], 0
    while at < len(text):
        size = dice.randint(1, most)
        pieces.append(text[at : at + size])
        at += size
    return pieces


class RandomLife(RuleBasedStateMachine):
    """One request, with a stream that another engine can go on with."""

    def __init__(self):
        super().__init__()
        self.now, self.life = 0.0, Life(RULES, RetryBudget(), 0.0)
        self.is_prepared_yet, self.interrupted = False, None
        self.leased, self.paid = [], []  # what is held; engines that were sent the request
        self.client, self.told, self.passage, self.rest = b"", None, None, []
        self.dice = Random(0)  # noqa: S311 - a test

    def blame(self, attempts):
        for attempt in attempts:
            assert attempt.engine == self.paid_or_leased

    def release(self):
        self.paid_or_leased = self.leased.pop() if self.leased else self.life.engine

    def fail(self, cause):
        if self.is_in(*RUNNING):
            if self.client and self.passage is not None:
                self.told = self.passage.told(None)
            self.passage = None
            self.release()
        self.interrupted = None
        went_on = self.told is not None
        self.blame(
            self.life.failed(self.now, cause, ValueError(), has_begun=bool(self.client), can_go_on=went_on)
        )

    def is_in(self, *phases):
        return self.life.phase in phases

    def look(self, received=0):
        if (cause := self.life.look(self.now, received)) is not None:
            self.interrupted = cause
        return cause

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 6.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.is_in(Phase.ADMITTED) and not self.is_prepared_yet)
    @rule(is_wrong=st.booleans())
    def is_prepared(self, is_wrong):
        if is_wrong and self.dice.random() < 0.1:
            self.fail(Cause.INVALID)
        else:
            self.life.prepared()
        self.is_prepared_yet = True

    @precondition(lambda self: self.is_prepared_yet and self.is_in(Phase.ADMITTED))
    @rule()
    def is_placed(self):
        left = [engine for engine in ENGINES if engine not in self.life.tried]
        if left:
            self.life.placed(left[0])
        else:
            self.blame(self.life.none_left())

    @precondition(lambda self: self.is_in(Phase.IN_TURN))
    @rule(seed=st.integers(0, 3), differs=st.booleans())
    def enters(self, seed, differs):
        assert not self.leased
        self.leased.append(self.life.engine)
        self.life.entered(self.now)
        self.dice = Random(seed)  # noqa: S311 - a test
        is_other = differs and self.life.engine in "bc"
        answer = ANSWER.replace("fox", "cat").replace("ababababab", "abababab") if is_other else ANSWER
        stream = [*map(chunk, cut(answer, self.dice, 9)), chunk("", "stop"), b"data: [DONE]\n\n"]
        self.rest = cut(b"".join(stream), self.dice, 200)
        self.passage, self.events = Passage("k", None, self.told), WholeEvents()

    @precondition(lambda self: self.is_in(Phase.LEASED) and not self.life._is_sent)
    @rule()
    def is_sent(self):
        self.paid.append(self.leased[0])
        self.life.sent()

    @precondition(lambda self: self.is_in(Phase.LEASED) and self.life._is_sent)
    @rule()
    def begins(self):
        self.blame(self.life.began(self.now))

    @precondition(lambda self: self.is_in(Phase.ANSWERING))
    @rule(pieces=st.integers(1, 9))
    def sends(self, pieces):
        for _ in range(pieces):
            if not self.rest:
                self.release()
                self.life.answered()
                return
            try:
                piece = self.events.joined(self.rest.pop(0))
                for stage in self.passage.stages:
                    piece = stage(piece)
                self.client += piece
            except EngineDiverged:
                self.fail(Cause.DIVERGED)
                return

    @precondition(lambda self: self.is_in(*RUNNING))
    @rule(cause=st.sampled_from(FAILURES))
    def fails(self, cause):
        self.fail(cause)

    @precondition(lambda self: self.life.is_on_engine)
    @rule()
    def is_lost(self):
        self.interrupted = self.life.lost(self.now) or self.interrupted

    @precondition(lambda self: not self.is_in(Phase.ENDED))
    @rule()
    def is_looked_at(self):
        self.look()

    @precondition(lambda self: self.interrupted is not None and not self.is_in(Phase.ENDED))
    @rule()
    def is_interrupted(self):
        self.fail(self.interrupted)

    @precondition(lambda self: not self.is_in(Phase.ENDED) and self.now > 20)
    @rule()
    def leaves(self):
        if self.leased:
            self.release()
        self.life.ended(Cause.CLIENT_LEFT)

    @invariant()
    def it_ends_with_a_cause_on_no_engine(self):
        is_over = self.is_in(Phase.ENDED)
        assert (self.life.cause is not None) is is_over
        assert not (is_over and self.leased)

    @invariant()
    def one_engine_at_a_time_is_paid_and_none_twice(self):
        assert len(self.leased) <= 1
        assert len(self.paid) == len(set(self.paid)) <= RULES.retries + 1

    @precondition(lambda self: not self.is_in(Phase.ENDED))
    @rule()
    def nothing_more_happens(self):
        self.now += self.may_last()
        cause = self.look()
        assert cause in (self.too_long, Cause.OUR_LIMIT)
        self.fail(cause)

    def may_last(self):
        """Seconds until the state will have lasted too long, by the words of docs/life.md."""
        match self.life.phase:
            case Phase.ADMITTED | Phase.IN_TURN:
                self.too_long = Cause.OUR_LIMIT
                return RULES.first_byte_s + RULES.queue_s
            case Phase.LEASED:
                self.too_long = Cause.ENGINE_LATE if self.life._is_sent else Cause.ENGINE_BUSY
                return RULES.first_byte_s
            case Phase.ANSWERING:
                self.too_long = Cause.ENGINE_LOST if self.life._is_lost else Cause.ENGINE_SILENT
                return RULES.idle_s

    @precondition(lambda self: not self.is_in(Phase.ENDED) and self.now < RULES.total_s)
    @rule()
    def the_whole_time_is_over(self):
        self.now = RULES.total_s
        cause = self.look(self.dice.randint(1, 9))
        assert cause is not None
        self.fail(cause)
        assert self.is_in(Phase.ENDED)

    @invariant()
    def the_client_has_the_beginning_of_one_answer(self):
        text = text_of(self.client)
        other = ANSWER.replace("fox", "cat").replace("ababababab", "abababab")
        assert ANSWER.startswith(text) or other.startswith(text)
        if self.life.cause is Cause.ANSWERED:
            assert text in (ANSWER, other)
            assert self.client.count(b"[DONE]\n\n") == self.client.count(b'"stop"') == 1


RandomLife.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestRandomLife = RandomLife.TestCase

"""The table of a pool that tells, for each form of prompt, who makes the token ids.

    local    kvpin, with the engine's tokenizer and chat template
    engine   an engine is asked, once per prompt
    none     nobody: such prompts are not followed

Probes fill the table when a tokenizer is loaded (see exactness.py). Audits of served prompts correct single
rows: the first prompts of each form are audited, then a sample. A form that an audit took away comes back
when its probes pass again. A prompt may have several forms: it is made by the one that all of its rows trust.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from engine_adapter.prompt.forms import Form
from engine_adapter.prompt.template_trials import MessageShape

Source = Literal["local", "engine", "client"]
"""Who made the token ids of a prompt."""
Trusted = Literal["local", "engine", "none"]
"""Who is to make them."""
_LEAST = ("none", "engine", "local")
# After this many prompts with other ids, all of their form are unknown. One may hold a date that changed
# meanwhile.
_REFUTED = 2
# Prompts of each form that are audited: the first ones, then one of so many.
_FIRST, _EVERY = 16, 100
# Unchecked ids count as right once the engine made the same ids of this many served prompts.
ENOUGH_AGREED = 20
# Forms that no probe can settle: what they contain differs from request to request.
_UNPROBED = frozenset({Form.DOCUMENTS, Form.OTHER})
_NAME_ITS_OWN = (
    "To tokenise here, name tokenizer=DIR: a directory with its tokenizer, and its chat template as "
    "chat_template.jinja"
)
# What becomes of prompts that differ here.
_ELSEWHERE: dict[Trusted, str] = {
    "engine": "the engine tokenises these forms, which costs a round trip for each prompt",
    "none": "these forms are not followed, and go by load",
}


class RowView(msgspec.Struct):
    """One form of prompt.

    Attributes:
        source: who makes the ids of prompts of this form.
        ok: these ids are known to be the engine's own.
        detail: why, in words.
        agreed, differed: served prompts for which the engine reported the same ids, or others.
    """

    source: Trusted
    ok: bool
    detail: str
    agreed: int = 0
    differed: int = 0


class FormRow(RowView):
    """One form of prompt, as it changes. `probed`: kvpin's ids were the engine's on the probes of this
    form."""

    probed: bool = False
    _wrong: dict[Source, int] = {}  # each row gets its own

    def is_unknown(self, source: Source) -> bool:
        """True if ids from this source were wrong more than once."""
        return self._wrong.get(source, 0) >= _REFUTED

    def is_exact(self, source: Source) -> bool:
        """True if ids from this source are the engine's own."""
        return source not in self._wrong and (source == "engine" or self.probed)

    @property
    def is_lost(self) -> bool:
        """True if served prompts took it away from kvpin, although its probes had passed."""
        return self.probed and self.source != "local"

    def confirm(self, source: Source) -> None:
        """Ids from this source were right in a served prompt."""
        self.agreed += 1
        if source == self.source == "local" and not self.differed and self.agreed == ENOUGH_AGREED:
            self.ok = True
            self.detail += f", and the engine made the same ids of {ENOUGH_AGREED} prompts it served"

    def refute(self, source: Source, difference: str, *, can_ask: bool) -> bool:
        """Ids from this source were wrong in a served prompt. Returns False if that was known."""
        self.differed += 1
        self._wrong[source] = self._wrong.get(source, 0) + 1
        if source == "local" == self.source and can_ask:
            self.source, self.ok = "engine", True
        elif source == self.source:
            self.ok = False
            self.source = "none" if self.is_unknown(source) else self.source
        if self._wrong[source] > 1:
            return False
        self.detail = f"it made other ids of a served one: {difference}"
        return True


class Audits:
    """Which prompts an engine is asked to tokenise itself: of each form the first ones, then a sample.
    `healed`: how often forms that were taken away came back. Each time, twice as many are audited."""

    def __init__(self) -> None:
        self.healed = 0
        self._seen: Counter[Form] = Counter()

    def begin(self) -> None:
        """Another process may serve from now on, or forms came back: the first prompts are audited again."""
        self._seen.clear()

    def sample(self, forms: Iterable[Form]) -> bool:
        """A prompt of these forms is about to be served. Returns True if it is to be audited."""
        seen = self._seen
        seen.update(forms)
        return any(seen[form] <= _FIRST << self.healed or seen[form] % _EVERY == 0 for form in forms)


@dataclass(frozen=True, slots=True)
class Exactness:
    """State of a pool's tokenisation: who tokenises, and whether the ids are known to be right.

    Attributes:
        ok: every id is known to be the engine's own.
        detail: one sentence for logs and stats.
        source: who tokenises chats.
        forms: the rows of all forms of prompts.
    """

    ok: bool
    detail: str
    source: Trusted
    forms: dict[Form, RowView] = field(default_factory=dict, repr=False)

    @property
    def event(self) -> str:
        """The event to log for this outcome."""
        if self.source == "local":
            return "tokenizer gives the engine's ids" if self.ok else "tokenizer is not checked"
        return "the engines tokenise" if self.source == "engine" else "prompts are not followed"


class FormTable:
    """The rows of all forms.

    Attributes:
        can_ask: an engine of the pool tokenises requests.
        uses_local: the tokenizer that is loaded here was compared, or is used unchecked.
        outcome: what came of comparing with an engine. Two engines with the same make the same tokens.
        lost_shapes: messages that the engine's chat template refuses or leaves out, as far as is known.
    """

    def __init__(self, *, can_ask: bool, detail: str) -> None:
        """Until there is a tokenizer here, the engines are asked. `detail` tells why there is none."""
        self.can_ask = can_ask
        self.uses_local = False
        self.outcome: Hashable = None
        self.lost_shapes: frozenset[MessageShape] = frozenset()
        self.rows = {form: FormRow("engine" if can_ask else "none", can_ask, detail) for form in Form}

    def make_here(self, detail: str, *, alike: bool) -> None:
        """From now on prompts are made here, unchecked. `alike`: the engine renders with kvpin's own code, so
        no form is special. Else an engine is asked about forms that no probe can settle, if it can be."""
        self.uses_local = True
        for form in Form:
            row = FormRow("local", ok=False, detail=detail)
            if form in _UNPROBED and not alike and self.can_ask:
                row = FormRow("engine", ok=True, detail="engines differ")
            elif form is Form.DOCUMENTS and not alike:
                row = FormRow("none", ok=False, detail="engines differ")
            self.rows[form] = row

    def probe(self, form: Form, difference: str | None, detail: str) -> None:
        """Notes how kvpin's ids differ from the engine's on the probes of a form; None: they are the same."""
        self.uses_local = True
        if difference is None:
            self.rows[form] = FormRow("local", ok=True, detail=detail, probed=True)
        else:
            self.rows[form] = FormRow("engine", ok=True, detail=difference)

    def settle(self, *, alike: bool) -> None:
        """All probes were compared. With kvpin's own code, what is right for plain chats is so for all."""
        plain = self.rows[Form.PLAIN]
        for form in _UNPROBED if alike else ():
            self.rows[form] = FormRow(plain.source, plain.ok, plain.detail, probed=plain.probed)

    @property
    def sources(self) -> dict[Form, Trusted]:
        """Who makes the ids of each form."""
        return {form: row.source for form, row in self.rows.items()}

    def source(self, forms: Iterable[Form]) -> Trusted:
        """Who makes the ids of a prompt of these forms."""
        return min([self.rows[form].source for form in forms], key=_LEAST.index)

    def is_exact(self, forms: Iterable[Form], source: Source) -> bool | None:
        """True if ids of these forms from this source are known to be the engine's own; None if those of one
        form are known to be wrong."""
        exact = True
        for form in forms:
            row = self.rows[form]
            if row.is_unknown(source):
                return None
            exact = exact and row.is_exact(source)
        return exact

    @property
    def lost(self) -> list[Form]:
        """The forms that served prompts took away from kvpin."""
        return [form for form, row in self.rows.items() if row.is_lost]

    def audit(self, forms: frozenset[Form], source: Source, difference: str | None) -> bool:
        """A prompt of these forms was served. A difference counts against its special forms, if it has any.

        Returns:
            True if it is new that such ids differ.
        """
        if difference is None:
            for form in forms:
                self.rows[form].confirm(source)
            return False
        blamed = [self.rows[form] for form in forms - {Form.PLAIN} or forms]
        return sum(row.refute(source, difference, can_ask=self.can_ask) for row in blamed) > 0

    def summary(self, here: str | None, reason: str) -> Exactness:
        """The table in a sentence. `here` is the tokenizer loaded here. While it is not used, `reason` tells
        why."""
        forms = {form: msgspec.convert(row, RowView, from_attributes=True) for form, row in self.rows.items()}
        chats = self.rows[Form.PLAIN]
        # Those whose ids are not made here although probes or served prompts could have shown them.
        differing = [
            (form, row)
            for form, row in self.rows.items()
            if row.source != "local" and (form not in _UNPROBED or row.differed)
        ]
        if here is None or not self.uses_local:
            how = (
                "the engine tokenises each prompt" if chats.source == "engine" else "prompts are not followed"
            )
            return Exactness(chats.ok, f"{how}: {reason}", chats.source, forms)
        if chats.source != "local":
            what = "chat template" if self.rows[Form.TEXT].probed else "tokenizer or chat template"
            detail = (
                "the engine tokenises each chat, which costs a round trip: kvpin does not make its tokens "
                f"with the {what} of {here!r} ({chats.detail}). {_NAME_ITS_OWN}"
            )
            return Exactness(chats.ok, detail, chats.source, forms)
        detail = f"tokenised here with {here!r}, "
        if chats.probed:
            detail += (
                f"as the engine does in {sum(row.probed for row in self.rows.values())} forms of prompts"
            )
        else:
            detail += f"unchecked: {chats.detail}"
        for source, what in _ELSEWHERE.items():
            if some := ", ".join(f"{form} ({row.detail})" for form, row in differing if row.source == source):
                detail += f"; {what}: {some}"
        return Exactness(chats.ok and all(row.ok for _, row in differing), detail, "local", forms)

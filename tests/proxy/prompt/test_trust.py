"""Who makes the token ids of each form of prompt."""

from engine_adapter.prompt.forms import Form
from proxy.prompt.trust import ENOUGH_AGREED, Audits, FormTable

TOOLS = frozenset({Form.PLAIN, Form.TOOLS})
PLAIN = frozenset({Form.PLAIN})


def test_a_form_that_nobody_makes_goes_by_load():
    table = FormTable(can_ask=True, detail="no tokenizer yet")
    for form in Form:
        table.probe(form, "token 7 differs" if form is Form.TOOLS else None, "")
    table.audit(TOOLS, "engine", "token 9")
    table.audit(TOOLS, "engine", "token 9")
    assert "these forms are not followed, and go by load: tools (" in table.summary("a", "").detail


def test_unchecked_ids_count_as_right_after_enough_prompts():
    table = FormTable(can_ask=False, detail="")
    table.make_here("the engine cannot be asked", alike=False)
    for _ in range(ENOUGH_AGREED - 1):
        table.audit(PLAIN, "local", None)
    assert not table.rows[Form.PLAIN].ok
    table.audit(PLAIN, "local", None)
    assert table.rows[Form.PLAIN].ok
    assert "20 prompts" in table.summary("a tokenizer", "").detail
    assert not table.is_exact(PLAIN, "local"), "a few prompts do not show all that a template does"


def test_the_first_of_each_form_are_audited_then_one_in_a_hundred_and_more_of_forms_that_came_back():
    audits = Audits()
    sampled = [at for at in range(1, 301) if audits.sample(PLAIN)]
    assert sampled == [*range(1, 17), 100, 200, 300]
    of_tools = [sum(audits.sample(TOOLS) for _ in range(50))]  # however many came without
    audits.healed = 1
    audits.begin()
    of_tools.append(sum(audits.sample({Form.TOOLS}) for _ in range(50)))
    assert of_tools == [16, 32]

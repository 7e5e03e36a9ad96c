"""The routes: the data plane (/v1), the admin API, health, metrics, the page. HTTP itself is `proxy/http/`.

dispatch.py     which part of kvpin serves a request; ASGI on exchanges, for all but the data plane; health
                and metrics
openai.py       /v1/*: the data plane
paths.py        which paths below /v1 are open, which WebSockets are passed on, the model that a form names
own_answers.py  exceptions → error answers, /v1/models, responses that kvpin keeps
auth.py         keys; which web pages may use the data plane
admin/          /admin/v1/*: the control plane
page.py         the page below /ui, files in `static`
fan_out/        requests for several answers (`n`, several prompts), split and joined
relay.py        requests that another kvpin answers

Several workers answer as one: one of them speaks for all.
siblings.py     the other workers, and who speaks for all
hand_over.py    what a worker hands over to that one: counts, events
together.py     passes operators' requests on to it; it asks others where they must do or know something
"""

"""The routes: the data plane (/v1), the admin API, health, metrics, the page. HTTP itself is `proxy/http/`.

dispatch.py        which part of kvpin serves a request; ASGI on exchanges, for all but the data plane
openai.py          /v1/*: the data plane
paths.py           which paths below /v1 are open
websockets.py      which WebSockets are passed on
models.py          /v1/models
ops.py             /health/*, /metrics
admin/             /admin/v1/*: the control plane
auth.py            keys
error_answers.py   exceptions → error answers
cors.py            which web pages may use the data plane
kept_responses.py  /v1/responses/{id}: responses that kvpin keeps
forms.py           the model that a form names
page.py            /ui/: the page, files in static/
fan_out/           requests for several answers (`n`, several prompts), split and joined
relay/             requests that another kvpin answers
workers/           answers that several workers give as one
"""

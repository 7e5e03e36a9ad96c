"""The steps of `proxy/flow.py`.

request.py      the request that they serve: its life, and its timer
preparation.py  prepare: reads and tokenises the request, finds the pool that may serve it
attempt.py      run: one attempt on one engine, from the lease to its release
forward.py      within it: sends the request to its engine, and the answer to the client; reads what
                that reports of its tokens (engine_adapter/http/answer_fields.py)
other_leg.py    another engine computes the prompt: before that, or at the same time, as neither can answer
                alone
checks.py       at its end: what the engine reports, compared with what was expected
"""

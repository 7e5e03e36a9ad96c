"""The pure core: no await, no I/O, no clock, no logging. Times come in, decisions go out as data.

index/              which engine holds which block, on which tier
placement/          which engine a request goes to, with the reasons
peers/              messages between kvpins, and their replay
admission.py        which requests wait for an engine, and who goes first
quotas.py           what one tenant may use, and has used, by day; memory that requests share
audit.py            predicted against reported cached tokens → trust; whether an engine that fails gets more
books.py            what operators ordered about engines, and which keys are issued, at any kvpin of a group
retention.py        what clients and operators asked to keep
misses.py           the reason that a prompt's KV was not reused, in one word and in a sentence
reasons.py          why a request was placed where it was; what the time to the first byte was spent on
differences.py      where two requests differ
normalise.py        rules that change prompts, so that more of them is equal
prompt_values.py    paths, dates and the like in a prompt, and the references that stand for them
message_repair.py   messages in a shape that their chat template keeps
life.py             the life of a request as a state machine; retries of all requests
"""

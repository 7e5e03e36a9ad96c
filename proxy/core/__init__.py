"""The pure core: no await, no I/O, no clock, no logging. Times come in, decisions go out as data.

index/              which engine holds which block, on which tier
placement/          which engine a request goes to, with the reasons
peers/              messages between kvpins, and their replay
admission.py        which requests wait for an engine, and who goes first
quotas.py           what one tenant may use
tenant_use.py       what tenants have used, by day
budget.py           memory that requests share
breaker.py          whether an engine that fails requests gets more
audit.py            predicted against reported cached tokens → trust
pins.py             what operators asked to keep
issued_keys.py      which keys the admin API has issued and removed, at any kvpin of a group
engine_book.py      what operators ordered about engines, at any kvpin of a group
retention.py        what clients asked to keep
first_byte.py       what the time to the first byte was spent on
misses.py           the reason that a prompt's KV was not reused, in one word
reasons.py          sentences about placements and misses
differences.py      where two requests differ
normalise.py        rules that change prompts, so that more of them is equal
prompt_values.py    paths, dates and the like in a prompt, and the references that stand for them
message_repair.py   messages in a shape that their chat template keeps
life/               the life of a request as a state machine: causes, states, events
"""

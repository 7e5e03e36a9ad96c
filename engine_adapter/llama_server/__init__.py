"""llama-server: slots leased one operation at a time, saved, restored, and followed token by token.

slots.py       what each slot holds, who uses it        plan.py      which slot, restore what, save first?
saved.py       the registry of saved prefixes           state_file.py  one saved file, verified
slot_io.py     save, restore, erase over HTTP           mirror_events.py  the mirror as KV events
answer.py      what an answer leaves in its slot        assemble.py  a stream as one JSON answer
discovery.py   what a server is, and what it lacks      tokens.py    token ids as the server has them
command.py     its command line, when kvpin starts it   adapter.py   all of it as an EngineAdapter
"""

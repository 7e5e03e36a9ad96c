"""llama-server: slots leased one operation at a time, saved, restored, and followed token by token.

adapter.py     all of it as an EngineAdapter            keeper.py     leases, and what requests leave behind
turns.py       whose turn it is                         slots.py      what each slot holds and what runs there
plan.py        which slot, restore what, save first?    rates.py      how fast this server is
contents.py    moves KV between slots and files         slot_io.py    save, restore, erase over HTTP
write_back.py  saves while nobody needs the slots       verbs.py      flush, offload, restore, pin
mirror_events.py  what is held, as KV events            answer.py     which tokens an answer left in its slot
answer_reader.py  watches an answer pass                assemble.py   a stream as one JSON answer
saved.py       the registry of saved prefixes           saved_entry.py  one of them, and which goes first
saved_files.py names, sidecars, checked moves           state_file.py the format of a saved file
discovery.py   what a server is, and what it lacks      fingerprint.py  which model made its KV
tokens.py      token ids as the server has them         responses.py  /v1/responses as a chat
command.py     its command line, when kvpin starts it   save_dir.py   where its files go by default
"""

"""llama-server: slots leased one operation at a time, saved, restored, and followed token by token.

adapter.py     all of it as an EngineAdapter            session.py    one server process and its keeper
keeper.py      leases slots                             turns.py      whose turn it is
own_tasks.py   work that no leaving client stops        settle.py     when a slot is quiet
slots.py       what each slot holds and runs            plan.py       which slot, restore what, save first?
contents.py    moves KV between slots and files         slot_io.py    save, restore, erase over HTTP
write_back.py  saves slots in idle time                 verbs.py      flush, offload, restore, pin
slot_owners.py whose KV each slot holds                 server_record.py  owners and pins on disk
server_lock.py keeps a second kvpin from its slots      rates.py       how fast this server is
answer.py      which tokens an answer left in its slot  answer_reader.py  reads an answer as it passes
assemble.py    a stream as one JSON answer              mirror_events.py  what is held, as KV events
saved.py       the registry of saved prefixes           saved_entry.py    one of them, and eviction order
saved_files.py names, sidecars, checked moves           state_file.py     the format of a saved file
discovery.py   what a server is                         fingerprint.py    which model made its KV
probe.py       what it does not tell                    findings.py       which flags it lacks
tokens.py      a request's token ids, by the server     save_dir.py       where its files go by default
command.py     its command line, when kvpin starts it   options.py        settings of this kind
routes.py      which routes it has, and what runs there
"""

"""The engines: what kvpin knows of each, and who changes it.

fleet.py           all engines and pools
pool.py            engines that serve one model, and their index
engine.py          one engine's state
lease.py           a request's hold on an engine
wait_queue.py      the requests of a pool that wait for an engine
destinations.py    which pool, or which engine, a request may go to
monitor.py         connects, checks health, drops and reconnects engines
ingest.py          the write path: KV events and audits into the index
lower_tiers.py     asks host and disk tiers that send no events; restores KV before the turn that needs it
tokenisation.py    loads and checks the tokenizer of each pool
managed_engine.py  engines that kvpin starts
discovery.py       engines found in files and Kubernetes; discovery_dns.py in DNS
saved_state.py     what outlives a restart of kvpin; knowledge of caches counts only after verification
state_files.py     issued keys, prompt tables, use by day: written whole or not at all, for this user alone
"""

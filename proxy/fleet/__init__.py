"""The engines: what kvpin knows of each, and who changes it.

fleet.py          all engines and pools
pool.py           engines that serve one model, and their index
engine.py         one engine's state
lease.py          a request's hold on an engine
wait_queue.py     the requests of a pool that wait for an engine
destinations.py   which pool, or which engine, a request may go to
monitor.py        connects, checks health, drops and reconnects engines
ingest.py         the write path: KV events and audits into the index
recall.py         keeps the knowledge of caches over a restart of kvpin
lower_tiers.py    asks host and disk tiers that send no events
restore_ahead.py  restores KV before the turn that needs it
tokenisation.py   loads and checks the tokenizer of each pool
salts.py          cache salts of each tenant, for flushing the tenant
discovery/        engines found in files, DNS, Kubernetes
process/          engines that kvpin starts
state_dir/        files that outlive a restart of kvpin
"""

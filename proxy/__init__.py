"""kvpin: an OpenAI-compatible reverse proxy that makes the KV caches of serving engines count.

A request's way down:
http/       connections, requests and answers, TLS
api/        routes: the data plane (/v1), the admin API, health, metrics, the page
flow.py     the read path: start here
steps/      its steps: preparation, one attempt on one engine, forwarding
fleet/      engines: pools, leases, health, KV events, discovery, processes, state that outlives a restart
request/    one request: call, tenant, session, record; request/translate/ serves other APIs as chats
prompt/     body → token ids and extra ids
core/       pure decisions: core/index/ knows what engines hold, core/placement/ chooses one

Beside it:
control/    what the admin API does: offload, restore, pin, warm, flush, explain
observe/    metrics, logs, request recordings
peers/      several kvpins that act as one
replay/     the simulator behind `kvpin replay`

Above and below:
cli/        the commands
server/     builds kvpin and runs it: server/workers/ on one port, server/tracing/
settings/   flags, environment and TOML
errors.py   the errors that kvpin answers with, and their statuses
headers.py  the headers that kvpin reads, sets and drops
runtime.py  background tasks, garbage collection, the loop's lag
"""

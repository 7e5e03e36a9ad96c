"""kvpin: an OpenAI-compatible reverse proxy that makes the KV caches of serving engines count.

A request's way down:
http/       connections, requests and answers, TLS
api/        routes: the data plane (/v1), the admin API, health, metrics, the page
flow.py     the read path: start here
steps/      its steps: preparation, one attempt on one engine, forwarding
fleet/      engines: pools, leases, health, KV events; discovery/, process/, state_dir/
request/    one request: call, tenant, session, record; translate/ serves other APIs as chats
prompt/     body → token ids and extra ids
core/       pure decisions: index/ knows what engines hold, placement/ chooses one, life/ says what comes next

Beside it:
control/    what the admin API does: offload, restore, pin, warm, flush, explain
observe/    metrics, logs, request recordings, reasons of placements
peers/      several kvpins that act as one
replay/     the simulator behind `kvpin replay`

Above and below:
cli/        the commands
server/     builds kvpin and runs it: workers/ on one port, tracing/
settings/   flags, environment and TOML
errors.py   the errors that kvpin answers with, and their statuses
headers.py  the headers that kvpin reads, sets and drops
runtime/    background tasks, garbage collection
"""

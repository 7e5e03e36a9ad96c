"""kvpin: an OpenAI-compatible reverse proxy that makes the KV caches of serving engines count.

flow.py    the read path: start here
ready.py   a request that can be placed: how it is read, what its engine gets of it
app.py     builds everything
server.py  runs it: the port, signals, an orderly stop
tasks.py   background tasks, ended at shutdown    errors.py  the errors kvpin answers with
error_codes.py  their codes and statuses
headers.py the headers that kvpin reads, sets and drops
runtime.py garbage collection and threads, so that a busy kvpin does not stall
workers/   several processes on one port, and the supervisor that runs them
api/       HTTP: the data plane (/v1), the admin API, health and metrics
request/   one request: the call, its tenant and session, its record, sending it on
prompt/    body → token ids and extra ids
core/      pure decisions: index/ knows what engines hold, placement/ chooses one
peers/     several kvpins that act as one
fleet/     the engines: their state, pools, leases, health and KV events
control/   what the admin API does: offload, restore, pin, warm, flush, explain
observe/   metrics, logs, request recordings, reasons of placements
process/   engines that kvpin starts itself
doctor/    `kvpin doctor`: what an engine is and which flag improves it
bench/     the load test of `kvpin bench`
replay/    the simulator behind `kvpin replay`
settings/  flags, environment and TOML        cli/  the commands
"""

"""Runs kvpin: builds it, checks what it needs, serves its port, stops it in order.

app.py           the composition root: builds all collaborators
run.py           opens the port, obeys signals, stops in order
checks.py        what the settings need of this machine
group_secret.py  what block hashes and tenants' salts begin with
workers/         several processes on one port, and their supervisor
tracing/         a span around each step, for those who turn traces on
"""

"""The command line. Importing it is quick: the server, torch and transformers load only when needed.

main.py            the commands
serve.py           kvpin serve, kvpin engine
doctor.py          kvpin doctor
replay.py          kvpin replay
replay_options.py  its options
replay_run.py      its work
advise.py          kvpin advise
init.py            kvpin init
config.py          kvpin config
top.py             kvpin top
top_view.py        what it shows
bench.py           kvpin bench
admin.py           clients of the admin API
target_options.py  options that name what to act on
options.py         options that commands share, declared once
client.py          one call of the admin API, and its errors in terms of flags
answer_tables.py   answers of the admin API as tables
decisions.py       placements and requests as tables
grid.py            a table that fits the terminal
help.py            how --help shows arguments
engine_check/      what `kvpin doctor` does
load_test.py       the load of `kvpin bench`, and its figures
"""

from proxy.cli.main import main

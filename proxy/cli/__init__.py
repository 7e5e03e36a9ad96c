"""The command line. Importing it is quick: the server, torch and transformers load only when needed.

main.py       the commands
serve.py      kvpin serve, kvpin engine
doctor.py     kvpin doctor
replay.py     kvpin replay                  replay_run.py  its work
init.py       kvpin init                    config.py  kvpin config
top.py        kvpin top                     top_view.py  what it shows
bench.py      kvpin bench
admin.py      clients of the admin API      targets.py  options that name what to act on
options.py    options that commands share, declared once
prompt_tables.py  kvpin tables              examples.py the example of each command's help
client.py     one call of the admin API, and its errors in terms of flags
tables.py     answers as tables             decisions.py  placements and requests as tables
examination.py  what kvpin doctor shows
grid.py       a table that fits the terminal
help.py       how --help shows arguments
"""

from proxy.cli.main import main

__all__ = ["main"]

"""The command line. Importing it is quick: the server, torch and transformers load only when needed.

main.py           the commands; kvpin serve, kvpin engine, kvpin config
admin.py          clients of the admin API
doctor.py         kvpin doctor, kvpin init
measure.py        kvpin bench, kvpin top, kvpin advise
replay.py         kvpin replay and its options
replay_run.py     its work
load_test.py      the load of `kvpin bench`, and its figures
engine_check.py   what `kvpin doctor` does: the report, and its text
engine_probe.py   two requests on kvpin's own path; compares cached tokens with the prediction
client.py         one call of the admin API, and its errors in terms of flags; options, declared once
arguments.py      options that name what to act on; how --help shows arguments
answer_tables.py  answers of the admin API as tables
decisions.py      placements and requests as tables; what `kvpin top` shows
grid.py           a table that fits the terminal
"""

import signal
import threading

# Ctrl-C while modules load ends Python without a traceback.
_waits = (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _waits:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from proxy.cli.main import main  # noqa: E402

if _waits:
    signal.signal(signal.SIGINT, signal.default_int_handler)

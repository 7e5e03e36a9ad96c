"""The command line. Importing it is quick: a server, torch and transformers load when they are run.

main.py      the commands             serve.py     kvpin serve, kvpin engine
admin.py     clients of the admin API targets.py   options that say what to act on
client.py    HTTP, errors, progress   tables.py    answers as tables
"""

from proxy.cli.main import main

__all__ = ["main"]

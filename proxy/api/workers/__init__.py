"""Several workers answer as one: the asked one asks the others and merges their answers.

merging_app.py     asks all workers, merges their answers and their streams of events
siblings.py        the other workers, asked over their sockets; the socket that serves them
"""

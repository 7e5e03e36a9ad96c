"""The needs of a long-running process: supervised background tasks, rare garbage collection.

interpreter.py  garbage collection and threads, so that a busy kvpin does not stall
tasks.py        background tasks, ended at shutdown
"""

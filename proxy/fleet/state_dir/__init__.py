"""Keeps state over a restart of kvpin, in the directory `state_dir`.

saved_state.py    saves state now and then and at the end; reads it at the start
files.py          issued keys, prompt tables, use by day: written whole or not at all, for this user alone
"""

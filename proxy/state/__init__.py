"""State that outlives a restart of kvpin, in the directory `state_dir`.

keeper.py     saves it now and then, and when kvpin stops; reads it when kvpin starts
snapshot.py   caches of engines and pins, as one file
tables.py     prompt tables, one file each
files.py      writes a file whole or not at all, for this user alone
"""

"""Keeps state over a restart of kvpin, in the directory `state_dir`.

saved_state.py    saves state now and then and at the end; reads it at the start
key_book_file.py  the keys that the admin API issued, written at once
table_files.py    prompt tables, one file each
use_file.py       what tenants have used, by day
private_files.py  writes a file whole or not at all, for this user alone
"""

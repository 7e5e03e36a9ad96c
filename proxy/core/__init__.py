"""The pure heart: no await, no I/O, no clock, no logging. Times come in, decisions go out as data.

blocks.py      prompt → chain of block hashes
index.py       which engine holds which block, on which tier
locations.py   where blocks lie                               segments.py  stretches of chains, held together
view.py        an engine's KV events, re-hashed into the index
runs.py        where an engine's blocks stand in our chain    slices.py  long events in parts
spread.py      dicts that grow in small steps
load.py        what each engine is busy with                  rates.py     how fast it is
demand.py      what comes back, and how busy that keeps them  residents.py what an engine would lose
placement.py   the choice of engine, with its reasons         placer.py    all that it knows of a pool
gather.py      whether a prompt waits for another's beginning
learned.py     what engines without events probably hold
audit.py       predicted against reported cached tokens → trust
pins.py        what operators asked to keep
"""

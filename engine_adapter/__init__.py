"""Engines, behind one facade. `proxy` imports from here and nothing below.

base.py        the contract        types.py   its words        errors.py  its errors
registry.py    kind → adapter      http.py    the transport seam of the data plane
extra_ids.py   identity of embeddings          chat.py    render + tokenise as transformers does
torch_engine/  the embedded engine and its adapter
"""

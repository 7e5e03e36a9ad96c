"""The index: which engine holds which block, on which tier.

blocks.py        prompt → chain of block hashes
prefix_index.py  chain → how many leading blocks each engine holds, or will once requests in flight end
match.py         what an engine holds of a chain       in_flight.py  what requests are about to leave
locations.py     where blocks lie                     segments.py  64 blocks of a chain, stored together
groups.py        how far a prompt can be reused where there are several KV cache groups
view.py          an engine's KV events, re-hashed into the index
runs.py          engine block names → our chain
learned.py       what engines without events probably hold
tree.py          known prompts as a prefix tree
spread.py        dicts that grow in small steps
"""

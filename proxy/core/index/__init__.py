"""The index: which engine holds which block, on which tier.

blocks.py        prompt → chain of block hashes
prefix_index.py  chain → how many leading blocks each engine holds, or will once requests in flight end
match.py         what an engine holds of a chain, and how much of it a prompt can reuse where there are
                 several KV cache groups
locations.py     where blocks lie
segments.py      64 blocks of a chain, stored together; dicts that grow in small steps
view.py          an engine's KV events, re-hashed into the index
runs.py          engine block names → our chain
expected.py      what requests are about to leave; what engines without events probably hold
tree.py          known prompts as a prefix tree
"""

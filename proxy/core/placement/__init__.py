"""Placement: the choice of an engine for a request.

decision.py       a placement in data: candidates, their costs, the choice
scores.py         the cost of each candidate; chooses the lowest
pairs.py          one engine computes the prompt, another one answers: before it, or with it as neither can
                  alone; how long moving KV between two engines takes
placer.py         all state of one pool that the choice uses
load.py           each engine's work in flight
rates.py          how fast each engine is
demand.py         how likely a prompt is requested again; amounts that fade with time; blocks held by running
                  requests, and prompts that an engine would evict
whole_answers.py  rates from answers that do not stream
tiering.py        what to restore ahead of the next turn
"""

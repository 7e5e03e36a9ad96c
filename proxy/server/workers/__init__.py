"""`kvpin serve --workers N`: several processes on one port, and the one that looks after them.

    kvpin serve (supervisor) ── opens the port, starts engines, watches ──┬→ worker 1: a whole kvpin
                                                                          └→ worker 2: …

All workers inherit one listening socket. Measured (Linux 6.18, 300 connections while a worker leaves): a
socket of each worker's own (SO_REUSEPORT) resets what waits in its queue, 15 of 300; the inherited one loses
none, also when a worker is killed. Its balance is worse: a worker takes 30% to 70% of 100 connections that
come at once, which `fairness.py` corrects.

supervisor.py      starts, watches, drains and reloads the workers; owns the engines that kvpin starts
fairness.py        shares the port's connections among them
"""

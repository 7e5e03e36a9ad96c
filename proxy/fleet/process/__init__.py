"""Engines that kvpin starts itself.

managed_engine.py  starts, watches, restarts and stops a process
cpu_time.py        whether a process computes
output.py          writes the process's output to the log
"""

"""Engines that kvpin starts itself.

managed.py          starts, watches, restarts and ends a process
output.py           the process's output, as log lines
end_with_parent.py  ends the process if kvpin dies
"""

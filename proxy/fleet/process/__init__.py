"""Engines that kvpin starts itself.

managed_engine.py  starts, watches, restarts and stops a process
"""

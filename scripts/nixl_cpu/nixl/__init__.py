"""NIXL for engines on CPUs: all memory is DRAM, and its thread sleeps between two looks."""

"""Peers' decision tables, run against the core. ``python -m tests.peer_cases FILE...``."""

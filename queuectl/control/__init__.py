"""The loops that join mirror, core, ledger and effects."""

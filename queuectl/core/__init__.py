"""The scheduler: pure functions from a snapshot to a plan."""

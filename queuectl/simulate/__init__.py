"""Cases over time, run in virtual time by the same core that drives clusters. No I/O."""

"""The demo: a window of a real trace, run and watched."""

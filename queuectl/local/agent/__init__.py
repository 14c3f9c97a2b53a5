"""A node agent that runs the containers of pods as processes of this machine."""

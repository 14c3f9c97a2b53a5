"""A control plane on this machine: real Kubernetes, simulated nodes."""

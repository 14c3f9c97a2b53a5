"""queuectl: batch queues and gang scheduling for GPU clusters on Kubernetes."""

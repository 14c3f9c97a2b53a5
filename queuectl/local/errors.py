"""The one error of the local control plane."""


class LocalError(Exception):
    """The local control plane can't do what was asked; the message says what failed and the remedy."""

"""What is used of kubernetes-asyncio: its reading of kubeconfigs, TLS and authentication.

The package's own ``__init__`` imports the generated API, some seven hundred models of which nothing is used here: two
thirds of the time that every command takes to start, and 60 MB. So these parts are imported past it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from types import ModuleType

_PACKAGES = ("kubernetes_asyncio", "kubernetes_asyncio.client")


@contextmanager
def _unexecuted() -> Iterator[ModuleType | None]:
    """Put modules in the packages' place that only tell where their parts are; None if the packages are there."""
    if any(name in sys.modules for name in _PACKAGES):
        yield None
        return
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.modules[name] = module_from_spec(spec)
    try:
        yield sys.modules[_PACKAGES[-1]]
    finally:
        for name in _PACKAGES:
            del sys.modules[name]  # whoever imports them gets all of them


with _unexecuted() as _client:
    from kubernetes_asyncio.client.configuration import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject

    if _client is not None:
        vars(_client).update(Configuration=Configuration, ApiClient=object)  # the other is for helpers unused here
    from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
    from kubernetes_asyncio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, list_kube_config_contexts

__all__ = [
    "KUBE_CONFIG_DEFAULT_LOCATION",
    "ConfigException",
    "Configuration",
    "RESTClientObject",
    "list_kube_config_contexts",
    "load_incluster_config",
    "load_kube_config",
]

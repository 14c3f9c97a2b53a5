"""Which namespace a kubeconfig means, read before anything is sent, so that a bad file is named as such."""

import os
from pathlib import Path

import yaml

from queuectl.kube.client import ApiUnreachableError
from queuectl.kube.library import KUBE_CONFIG_DEFAULT_LOCATION, ConfigException, list_kube_config_contexts

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def namespace_of(kubeconfig: str | None, context: str | None) -> str:
    """Return the namespace of a kubeconfig's context (the current one by default), else ``default``.

    Looks where KubeClient does. Raises ApiUnreachableError, naming file and remedy, when it can't be used.
    """
    if kubeconfig is None and "KUBECONFIG" not in os.environ and _POD_NAMESPACE.exists():
        return _POD_NAMESPACE.read_text(encoding="utf-8").strip() or "default"
    files = kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION
    paths = [Path(path).expanduser() for path in files.split(os.pathsep) if path]
    if not any(path.exists() for path in paths):
        raise ApiUnreachableError(f"kubeconfig {files} doesn't exist; name one with --kubeconfig or $KUBECONFIG")
    try:
        contexts, active = list_kube_config_contexts(config_file=files)
        names = [str(entry["name"]) for entry in contexts]
        chosen = active if context is None else next((c for c in contexts if c["name"] == context), None)
        namespace = str((chosen or {}).get("context", {}).get("namespace") or "default")
    except (ConfigException, yaml.YAMLError, OSError, LookupError, TypeError, AttributeError, ValueError) as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise ApiUnreachableError(
            f"kubeconfig {files} can't be used: {detail}; name another with --kubeconfig or $KUBECONFIG"
        ) from error
    if chosen is None:
        raise ApiUnreachableError(
            f'kubeconfig {files} has no context "{context}"; those in it are {", ".join(names) or "none"}'
        )
    return namespace

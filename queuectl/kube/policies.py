"""Admission policies: the rules about our objects that need the request, or cost more than a CRD may."""

from typing import Any

from queuectl.kube.crds import Phase
from queuectl.kube.fields import BELOW_ZERO, NOT_A_QUANTITY, NOT_A_RESOURCE, NOT_WHOLE, RESOURCE_PATTERN
from queuectl.kube.names import (
    API_VERSION,
    CHANGE_WHY,
    CHANGED_BY,
    DEFAULT_QUEUE,
    FINALIZER,
    GROUP,
    MOVE,
    MOVE_BY,
    RESTRICTED_LABEL,
    SUBMITTED_BY,
    VERSION,
)
from queuectl.model.resources import CARDS

_FIXED_FIELDS = ("queue", "priority", "priorityClassName", "roles", "gpu", "topology")


def policies() -> list[dict[str, Any]]:
    """Return every policy, each followed by its binding."""
    return [
        *_mutating(
            "queuectl-finalizer",
            resource="trainingjobs",
            operations=["CREATE"],
            mutation=f'Object{{metadata: Object.metadata{{finalizers: ["{FINALIZER}"]}}}}',
        ),
        *_mutating(
            "queuectl-changed-by",
            resource="queues",
            operations=["CREATE", "UPDATE"],
            mutation=f"variables.change_why == {_NEW_WHY} ? {_annotating(CHANGED_BY)} : {_annotating(CHANGED_BY, CHANGE_WHY)}",
            conditions=[{"name": "spec-or-annotations-changed", "expression": _SPEC_OR_ANNOTATIONS_CHANGED}],
            variables=[{"name": "changed_by", "expression": _AUTHOR}, {"name": "change_why", "expression": _WHY}],
        ),
        *_authored("queuectl-submitted-by", "trainingjobs", SUBMITTED_BY, "oldObject == null"),
        *_authored("queuectl-move-asked-by", "trainingjobs", MOVE_BY, _MOVE_ASKED),
        *_mutating(
            "queuectl-default-queue",
            resource="trainingjobs",
            operations=["CREATE"],
            mutation=f"{_DEFAULT} == '' ? Object{{}} : Object{{spec: Object.spec{{queue: {_DEFAULT}}}}}",
            conditions=[{"name": "names-no-queue", "expression": "!has(object.spec.queue)"}],
        ),
        *_mutating(
            "queuectl-restricted",
            resource="queues",
            operations=["CREATE", "UPDATE"],
            mutation=f'Object{{metadata: Object.metadata{{labels: {{"{RESTRICTED_LABEL}": "true"}}}}}}',
            conditions=[{"name": "restricted", "expression": f"({_RESTRICTED}) && {_MARK} != 'true'"}],
        ),
        *_mutating(
            "queuectl-unrestricted",
            resource="queues",
            operations=["CREATE", "UPDATE"],
            removed=f"/metadata/labels/{RESTRICTED_LABEL.replace('/', '~1')}",
            conditions=[{"name": "no-longer-restricted", "expression": f"!({_RESTRICTED}) && {_MARKED}"}],
        ),
        *_validating(
            "queuectl-may-use-queue",
            resource="trainingjobs",
            operations=["CREATE", "UPDATE"],
            conditions=[
                {
                    "name": "queue-chosen",
                    "expression": "oldObject == null || object.spec.?queue != oldObject.spec.?queue",
                },
                {"name": "this-queue", "expression": "object.spec.?queue.orValue('') == params.metadata.name"},
            ],
            variables=[
                {"name": "labels", "expression": "namespaceObject.metadata.?labels.orValue({})"},
                {"name": "needs", "expression": _NEEDS},
                {"name": "lacking", "expression": _LACKING},
            ],
            validations=[
                {
                    "expression": "variables.lacking.size() == 0",
                    "messageExpression": _text(
                        "spec.queue: queue ",
                        "params.metadata.name",
                        " takes only jobs of namespaces with ",
                        "variables.lacking[0]",
                        "; name another queue, or ask an admin for the label",
                    ),
                },
                {
                    "expression": "!has(params.spec.maxWaiting) || "
                    "params.?status.pending.orValue(0) < params.spec.maxWaiting",
                    "messageExpression": _text(
                        "spec.queue: in queue ",
                        "params.metadata.name",
                        " as many wait as may: ",
                        "string(params.?status.pending.orValue(0))",
                        ", and maxWaiting is ",
                        "string(params.spec.maxWaiting)",
                        "; submit it later, or name another queue",
                    ),
                },
            ],
            params=RESTRICTED_LABEL,
        ),
        *_validating(
            "queuectl-admitted-is-fixed",
            resource="trainingjobs",
            operations=["UPDATE"],
            conditions=[{"name": "admitted", "expression": _IS_ADMITTED}],
            variables=[{"name": "changed", "expression": _CHANGED}],
            validations=[
                {
                    "expression": "variables.changed.size() == 0",
                    "messageExpression": _text(
                        "spec.",
                        "variables.changed.join(', spec.')",
                        " can't be changed while the job is ",
                        "oldObject.status.phase",
                        ": delete it and submit it anew, or wait until it is back in the queue",
                    ),
                }
            ],
        ),
        *_validating(
            "queuectl-quantities-of-jobs",
            resource="trainingjobs",
            operations=["CREATE", "UPDATE"],
            conditions=[{"name": "spec-changed", "expression": _SPEC_CHANGED}],
            variables=[
                {"name": "wrong", "expression": _WRONG_REQUESTS},
                {"name": "memory", "expression": _WRONG_MEMORY},
            ],
            validations=[
                {"expression": f"variables.{name} == ''", "messageExpression": f"variables.{name}"}
                for name in ("wrong", "memory")
            ],
        ),
        # A warning: the API server can't tell whether other queues are below this one, and lend as well.
        *_validating(
            "queuectl-lending-limits",
            resource="queues",
            operations=["CREATE", "UPDATE"],
            action="Warn",
            conditions=[{"name": "spec-changed", "expression": _SPEC_CHANGED}],
            variables=[{"name": "idle", "expression": _IDLE_LIMITS}],
            validations=[{"expression": "variables.idle == ''", "messageExpression": "variables.idle"}],
        ),
        *_validating(
            "queuectl-quantities-of-queues",
            resource="queues",
            operations=["CREATE", "UPDATE"],
            conditions=[{"name": "spec-changed", "expression": _SPEC_CHANGED}],
            variables=[
                {"name": "wrong", "expression": _WRONG_QUOTAS},
                {"name": "weight", "expression": _WRONG_WEIGHT},
                {"name": "caps", "expression": _WRONG_CAPS},
            ],
            validations=[
                {"expression": f"variables.{name} == ''", "messageExpression": f"variables.{name}"}
                for name in ("wrong", "weight", "caps")
            ],
        ),
    ]


# Queues with rules about who may submit are marked, so that no job costs a look at all the others.
_MARK = f"object.metadata.?labels['{RESTRICTED_LABEL}'].orValue('')"
_MARKED = f"object.metadata.?labels['{RESTRICTED_LABEL}'].hasValue()"
_RESTRICTED = "has(object.spec.namespaceSelector) || has(object.spec.maxWaiting)"
_DEFAULT = f"namespaceObject.metadata.?annotations['{DEFAULT_QUEUE}'].orValue('')"

# What a namespace's labels lack of a queue's selector, in the words of queuectl.core.limits.
_SELECTOR = "params.spec.?namespaceSelector"
_NEEDS = (
    f"dyn({_SELECTOR}.?matchLabels.orValue({{}}))"
    ".map(k, dyn({'key': dyn(k), 'operator': dyn('In'),"
    " 'values': dyn([params.spec.namespaceSelector.matchLabels[k]])}))"
    f" + dyn({_SELECTOR}.?matchExpressions.orValue([]))"
)
_LACKING = (
    "variables.needs.filter(n, n.operator == 'Exists' ? !(n.key in variables.labels) : "
    "n.operator == 'DoesNotExist' ? n.key in variables.labels : "
    "(n.key in variables.labels && variables.labels[n.key] in n.?values.orValue([])) != (n.operator == 'In'))"
    ".map(n, (n.operator == 'Exists' ? 'a label ' + n.key : n.operator == 'DoesNotExist' ? 'no label ' + n.key : "
    "n.key + (n.operator == 'In' ? ' in (' : ' not in (') + n.?values.orValue([]).join(', ') + ')') + "
    "', and namespace ' + namespaceObject.metadata.name + ' has ' + "
    "(n.key in variables.labels ? n.key + '=' + variables.labels[n.key] : 'no label ' + n.key))"
)

# Who changed the spec, and why. A change of these annotations alone is undone, so that nobody can write another's
# name or reason; and a change of the spec that gives no reason of its own does not inherit the one before.
_SPEC_CHANGED = "oldObject == null || object.spec != oldObject.spec"


def _annotation(of: str, name: str) -> str:
    """Return CEL for the text of an annotation, empty when there is none."""
    text = f"string({of}.metadata.?annotations[?'{name}'].orValue(''))"
    return text if of == "object" else f"({of} == null ? '' : {text})"


def _annotating(*names: str) -> str:
    """Return CEL that sets these annotations to the variables of their names."""
    pairs = ", ".join(f'"{name}": variables.{name.partition("/")[2].replace("-", "_")}' for name in names)
    return f"Object{{metadata: Object.metadata{{annotations: {{{pairs}}}}}}}"


_SPEC_OR_ANNOTATIONS_CHANGED = " || ".join(
    [
        _SPEC_CHANGED,
        *(f"{_annotation('object', name)} != {_annotation('oldObject', name)}" for name in (CHANGED_BY, CHANGE_WHY)),
    ]
)
_OLD_AUTHOR, _OLD_WHY, _NEW_WHY = (
    _annotation("oldObject", CHANGED_BY), _annotation("oldObject", CHANGE_WHY), _annotation("object", CHANGE_WHY)
)  # fmt: skip
_AUTHOR = f"({_SPEC_CHANGED} || {_OLD_AUTHOR} == '') ? request.userInfo.username : {_OLD_AUTHOR}"
_WHY = f"!({_SPEC_CHANGED}) ? {_OLD_WHY} : ({_NEW_WHY} == {_OLD_WHY} ? '' : {_NEW_WHY})"

_MOVE_ASKED = f"{_annotation('object', MOVE)} != {_annotation('oldObject', MOVE)}"

_IS_ADMITTED = "oldObject.?status.phase.orValue('') in [{}]".format(
    ", ".join(f"'{phase}'" for phase in Phase if phase is not Phase.PENDING)
)
_CHANGED = "[{}].filter(name, name != '')".format(
    ", ".join(f"object.spec.?{name} == oldObject.spec.?{name} ? '' : '{name}'" for name in _FIXED_FIELDS)
)


def _wrong(path: str, value: str, resource: str = "''") -> str:
    """Return CEL that says what is wrong with a quantity, of a resource if one is given, or an empty string."""
    # What is_extended tells; of cards there are parts.
    device = f"{resource}.contains('/') && !{resource}.contains('kubernetes.io/') && {resource} != '{CARDS}'"
    number = f"quantity({value}).asApproximateFloat()"  # isInteger() is of the form: 8.0 is none to it
    return (  # to isQuantity a unit alone ("Gi") is one too
        f"!isQuantity({value}) || !{value}.matches('[0-9]') ? {path} + ': \"' + {value} + '\" {NOT_A_QUANTITY}' : "
        f"quantity({value}).isLessThan(quantity('0')) ? {path} + ': ' + {value} + ' {BELOW_ZERO}' : "
        f"{device} && {number} < 9e18 && double(int({number})) != {number} ? {path} + ': ' + {value} + ' {NOT_WHOLE}' : ''"
    )


def _wrong_of(path: str, value: str, resource: str) -> str:
    """Return CEL that says what is wrong with a resource or its quantity."""
    named = f"{path} + ': \"' + {resource} + '\" {NOT_A_RESOURCE}'"
    return f"!{resource}.matches('{RESOURCE_PATTERN}') ? {named} : {_wrong(path, value, resource)}"


def _all_wrong(items: str, name: str, inner: str) -> str:
    """Return CEL that joins what is wrong with each of the items."""
    return f"{items}.map({name}, {inner}).filter(text, text != '').join('; ')"


def _wrong_amount(name: str) -> str:
    path = f"'spec.quotas[' + q.flavor + ', ' + q.resource + '].{name}'"
    return f"has(q.{name}) ? ({_wrong(path, f'string(q.{name})', 'q.resource')}) : ''"


_WRONG_QUOTAS = _all_wrong(
    "object.spec.?quotas.orValue([])",
    "q",
    f"[{', '.join(map(_wrong_amount, ('nominal', 'borrowingLimit', 'lendingLimit')))}]"
    ".filter(text, text != '').join('; ')",
)
_IDLE_LIMITS = _all_wrong(
    "object.spec.?quotas.orValue([])",
    "q",
    "has(q.lendingLimit) && isQuantity(string(q.lendingLimit)) && isQuantity(string(q.nominal)) && "
    "quantity(string(q.lendingLimit)).isGreaterThan(quantity(string(q.nominal))) ? "
    "'spec.quotas[' + q.flavor + ', ' + q.resource + '].lendingLimit: ' + string(q.lendingLimit) + "
    "' is more than nominal, ' + string(q.nominal) + '; it limits nothing unless queues below own the rest' : ''",
)
_WRONG_WEIGHT = _wrong("'spec.weight'", "string(object.spec.?weight.orValue(1))")
_WRONG_CAPS = _all_wrong(
    "['perUser', 'perNamespace']",
    "cap",
    _all_wrong(
        "dyn(object.spec[?cap].?maxResources.orValue({}))",
        "resource",
        _wrong_of(
            "'spec.' + cap + '.maxResources[' + resource + ']'",
            "string(object.spec[cap].maxResources[resource])",
            "resource",
        ),
    ),
)
_PATH = "'spec.roles[' + r.name + '].template.spec.' + kind + '[' + c.name + '].resources.' + amounts + '[' + resource + ']'"
_WRONG_REQUESTS = _all_wrong(
    "object.spec.roles",
    "r",
    _all_wrong(
        "['containers', 'initContainers']",
        "kind",
        _all_wrong(
            "r.template.spec[?kind].orValue([])",
            "c",
            _all_wrong(
                "['requests', 'limits']",
                "amounts",
                _all_wrong(
                    "dyn(c.?resources[?amounts].orValue({}))",
                    "resource",
                    _wrong_of(_PATH, "string(c.resources[amounts][resource])", "resource"),
                ),
            ),
        ),
    ),
)

_WRONG_MEMORY = _all_wrong(
    "object.spec.roles.filter(r, has(r.gpu) && has(r.gpu.minMemory))",
    "r",
    _wrong("'spec.roles[' + r.name + '].gpu.minMemory'", "string(r.gpu.minMemory)"),
)


def _text(*parts: str) -> str:
    """Join literals and CEL expressions, in turn, starting with a literal."""
    return " + ".join(part if index % 2 else f'"{part}"' for index, part in enumerate(parts))


def _matching(resource: str, operations: list[str]) -> dict[str, Any]:
    return {
        "resourceRules": [
            {"apiGroups": [GROUP], "apiVersions": [VERSION], "operations": operations, "resources": [resource]}
        ]
    }


def _authored(name: str, resource: str, annotation: str, written: str) -> list[dict[str, Any]]:
    """Have an annotation name the user whenever ``written`` holds; any other change of it is undone."""
    key = f"'{annotation}'"
    there = f"oldObject != null && oldObject.metadata.?annotations[{key}].hasValue()"
    return _mutating(
        name,
        resource=resource,
        operations=["CREATE", "UPDATE"],
        mutation=f'Object{{metadata: Object.metadata{{annotations: {{"{annotation}": variables.author}}}}}}',
        conditions=[
            {
                "name": "author-due-or-changed",
                "expression": f"{written} || {_annotation('object', annotation)} != {_annotation('oldObject', annotation)}",
            }
        ],
        variables=[
            {
                "name": "author",
                "expression": f"({written} || !({there})) ? request.userInfo.username : "
                f"string(oldObject.metadata.annotations[{key}])",
            }
        ],
    )


def _mutating(
    name: str,
    *,
    resource: str,
    operations: list[str],
    mutation: str = "",
    removed: str = "",
    **spec: list[dict[str, str]],
) -> list[dict[str, Any]]:
    # ApplyConfiguration can't remove; JSONPatch with a list as value makes kube-apiserver 1.36.3 panic.
    if removed:
        patch = f'[JSONPatch{{op: "remove", path: "{removed}"}}]'
        step = {"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}
    else:
        step = {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": mutation}}
    return _policy(
        "Mutating",
        name,
        _matching(resource, operations),
        {},
        reinvocationPolicy="IfNeeded",
        mutations=[step],
        **spec,
    )


def _validating(
    name: str,
    *,
    resource: str,
    operations: list[str],
    validations: list[dict[str, str]],
    params: str = "",
    action: str = "Deny",
    **spec: Any,
) -> list[dict[str, Any]]:
    """``params``: the label of Queues against each of which a request is held.

    The API server may need half a minute to learn of a new kind of parameters. Such a policy lets pass what it can't
    judge, since the core judges again.
    """
    binding: dict[str, Any] = {"validationActions": [action]}
    if params:
        spec |= {"paramKind": {"apiVersion": API_VERSION, "kind": "Queue"}, "failurePolicy": "Ignore"}
        binding["paramRef"] = {"selector": {"matchLabels": {params: "true"}}, "parameterNotFoundAction": "Allow"}
    return _policy(
        "Validating",
        name,
        _matching(resource, operations),
        binding,
        validations=validations,
        **spec,
    )


def _policy(
    kind: str,
    name: str,
    matching: dict[str, Any],
    binding: dict[str, Any],
    *,
    conditions: list[dict[str, str]] | None = None,
    **spec: Any,
) -> list[dict[str, Any]]:
    api = "admissionregistration.k8s.io/v1"
    head: dict[str, Any] = {"failurePolicy": "Fail", "matchConstraints": matching}
    if conditions:
        head["matchConditions"] = conditions
    return [
        {
            "apiVersion": api,
            "kind": f"{kind}AdmissionPolicy",
            "metadata": {"name": name},
            "spec": {**head, **spec},
        },
        {
            "apiVersion": api,
            "kind": f"{kind}AdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, **binding},
        },
    ]

"""What is told of a request that the API server refused."""

import json

import pytest

from queuectl.kube.client import ApiError, raise_for_status

POLICY = (
    "trainingjobs.queuectl.dev \"a\" is forbidden: ValidatingAdmissionPolicy '{0}' with binding '{0}' denied request: "
)
OTHERS = POLICY.format("company-rule") + "no."


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (POLICY.format("queuectl-may-use-queue") + "spec.queue: queue q takes", "spec.queue: queue q takes"),
        (
            'TrainingJob.queuectl.dev "a" is invalid: spec: Invalid value: "object": queue is missing',
            "spec: queue is missing",
        ),
        ('Pod "a" is invalid: spec.x: Invalid value: 1: no', 'Pod "a" is invalid: spec.x: Invalid value: 1: no'),
        (OTHERS, OTHERS),
    ],
)
def test_only_the_sentence_that_matters_is_told(message: str, told: str) -> None:
    with pytest.raises(ApiError) as error:
        raise_for_status(422, json.dumps({"message": message}).encode())
    assert str(error.value) == told

"""Quantities, and what kube-scheduler reserves for a pod: checked against the rules of Kubernetes 1.36."""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.model.resources import (
    CARD,
    CARDS,
    MAX_AMOUNT,
    format_quantity,
    is_extended,
    is_gpu,
    parse_quantity,
    pod_requests,
    times,
    total,
)
from tests.support.builders import GI, GPU

QUANTITIES = {
    "0": 0, "8": 8, "+8": 8, "-8": -8, "5.": 5, ".5": 1, "007": 7,
    "1n": 1, "1u": 1, "1m": 1, "1000m": 1, "1001m": 2,
    "1k": 10**3, "1M": 10**6, "1G": 10**9, "1T": 10**12, "1P": 10**15, "1E": 10**18,
    "1Ki": 2**10, "1Mi": 2**20, "1Gi": 2**30, "1Ti": 2**40, "1Pi": 2**50, "1Ei": 2**60,
    "1.5Gi": 3 * 2**29, "0.1Ki": 103, "1e3": 1000, "1E3": 1000, "1e+3": 1000, "12e-1": 2, "1e-400": 1,
    "-1.5": -1,  # towards the larger amount
    "9223372036854775807": MAX_AMOUNT, "9223372036854775808": MAX_AMOUNT, "8Ei": MAX_AMOUNT, "9e999": MAX_AMOUNT,
    "-9e999": -MAX_AMOUNT, "1." + 60 * "0" + "1": 2,
}  # fmt: skip


@pytest.mark.parametrize(("text", "want"), QUANTITIES.items())
def test_a_quantity_is_an_amount(text: str, want: int) -> None:
    assert parse_quantity("memory", text) == want


@pytest.mark.parametrize(
    ("text", "want"), {"1": 1000, "100m": 100, "0.1m": 1, "1e16": MAX_AMOUNT, "1.0001": 1001}.items()
)
def test_cpu_counts_thousandths(text: str, want: int) -> None:
    assert parse_quantity("cpu", text) == want


@pytest.mark.parametrize(
    ("text", "want"),
    {"1": CARD, "0.5": CARD // 2, "143m": 143 * CARD // 1000, "0.00000001": 1, "1e15": MAX_AMOUNT}.items(),
)
def test_cards_count_parts_that_thousandths_are(text: str, want: int) -> None:
    assert parse_quantity(CARDS, text) == want


def test_all_parts_of_cards_down_to_sixteenths_are_whole_numbers() -> None:
    assert [parts for parts in (*range(1, 17), 20, 24, 32, 48, 64, 1000) if CARD % parts] == []


@pytest.mark.parametrize(("value", "want"), [(8, 8), (0.5, 1), (1e-07, 1)])
def test_a_yaml_number_is_a_quantity_too(value: float, want: int) -> None:
    assert parse_quantity("memory", value) == want


@pytest.mark.parametrize(
    "text",
    ["", " ", "8 GPUs", "8gb", "1 Gi", "8\n", " 8", "e3", "1e", "1e1234", "--1", "1.2.3", ".", "1mi", "1K", "٨", "nan"],
)
def test_nonsense_is_refused_by_its_value(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity; write a number") as refusal:
        parse_quantity("memory", text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(("resource", "parts"), [("cpu", True), (CARDS, True), (GPU, False)])
def test_a_part_is_proposed_only_of_what_has_parts(resource: str, *, parts: bool) -> None:
    with pytest.raises(ValueError, match="is not a quantity; write a ") as refusal:
        parse_quantity(resource, "eight")
    assert ("500m" in str(refusal.value)) is parts
    assert ("write a whole number, such as 8" in str(refusal.value)) is not parts


@given(
    st.decimals(min_value=-(10**30), max_value=10**30, allow_nan=False),
    st.sampled_from([("m", Fraction(1, 1000)), ("", Fraction(1)), ("Ki", Fraction(1024)), ("E", Fraction(10**18))]),
    st.sampled_from([("cpu", 1000), ("memory", 1)]),
)
def test_no_amount_is_smaller_than_its_quantity(
    number: Decimal, unit: tuple[str, Fraction], resource: tuple[str, int]
) -> None:
    exact = Fraction(number) * unit[1] * resource[1]
    amount = parse_quantity(resource[0], f"{number:f}{unit[0]}")
    assert amount == max(-MAX_AMOUNT, min(MAX_AMOUNT, -((-exact.numerator) // exact.denominator)))


@given(st.sampled_from(["cpu", "memory", "hugepages-2Mi", "pods", GPU]), st.integers(-MAX_AMOUNT, MAX_AMOUNT))
def test_formatting_loses_nothing(resource: str, amount: int) -> None:
    assert parse_quantity(resource, format_quantity(resource, amount)) == amount


@pytest.mark.parametrize(
    ("resource", "amount", "want"),
    [
        ("cpu", 0, "0"), ("cpu", 4000, "4"), ("cpu", 1500, "1500m"), ("memory", 0, "0"), ("memory", 64 * GI, "64Gi"),
        ("memory", 3 * 2**29, "1536Mi"), ("memory", 1000, "1000"), ("ephemeral-storage", 2**40, "1Ti"),
        ("hugepages-1Gi", GI, "1Gi"), ("memory", 80 * 10**9, "80G"), (CARDS, 8 * CARD, "8"), (CARDS, CARD * 3 // 5, "0.6"),
        (CARDS, CARD // 7, "0.143"), (CARDS, 1, "0.001"), (CARDS, 0, "0"), (GPU, 1024, "1024"), ("pods", 2**20, "1048576"),
    ],
)  # fmt: skip
def test_amounts_read_as_people_write_them(resource: str, amount: int, want: str) -> None:
    assert format_quantity(resource, amount) == want


@pytest.mark.parametrize(
    ("resource", "extended", "gpu"),
    [
        ("cpu", False, False), ("pods", False, False), ("hugepages-2Mi", False, False),
        ("kubernetes.io/batch-cpu", False, False), ("x.kubernetes.io/gpu", False, True),
        (GPU, True, True), ("nvidia.com/mig-1g.10gb", True, True), ("amd.com/gpu", True, True),
        ("gpu.intel.com/i915", True, True), ("gpu.intel.com/i915_monitoring", True, False),
        ("huawei.com/Ascend910", True, True), ("amd.com/cpx_nps4", True, True), ("nvidia.com/gpu.shared", True, True),
        # Parts of a GPU beside it, or in a unit that only a flavor can tell.
        ("aliyun.com/gpu-mem", True, False), ("nvidia.com/gpumem", True, False), ("huawei.com/Ascend910B4-memory", True, False), ("rdma/hca", True, False), ("gpu", False, False),
    ],
)  # fmt: skip
def test_kinds_of_resources(resource: str, extended: bool, gpu: bool) -> None:  # noqa: FBT001
    assert (is_extended(resource), is_gpu(resource)) == (extended, gpu)


def test_sums_and_products() -> None:
    assert total([{"a": 1, "b": 2}, {"a": 3}, {}]) == {"a": 4, "b": 2}
    assert times({"a": 2, "b": 0}, 3) == {"a": 6, "b": 0}


def asks(requests: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    resources = {"requests": requests, "limits": limits}
    return {"resources": {key: value for key, value in resources.items() if value is not None}, **more}


def sidecar(**requests: Any) -> dict[str, Any]:
    return asks(requests, restartPolicy="Always")


@dataclass(frozen=True)
class Case:
    spec: dict[str, Any]
    want: dict[str, int]  # without pods: 1


CASES = {
    "nothing at all": Case({}, {}),
    "containers add up": Case({"containers": [asks({"cpu": "1", GPU: 2}), asks({"cpu": "500m"}), {}]}, {"cpu": 1500, GPU: 2}),
    "empty fields are as absent ones": Case({"containers": [{"resources": None}, asks({}, {})], "initContainers": None, "overhead": None, "resources": None}, {}),
    "a zero request is none": Case({"containers": [asks({"cpu": 0, GPU: "0"})]}, {}),
    "a limit without a request is the request": Case({"containers": [asks({"cpu": 1}, {"cpu": 4, GPU: 8})]}, {"cpu": 1000, GPU: 8}),
    "limits of init containers too": Case({"initContainers": [asks(None, {"cpu": 4})]}, {"cpu": 4000}),
    "init containers run one by one": Case(
        {"containers": [asks({"cpu": 2, "memory": "1Gi"})], "initContainers": [asks({"cpu": 3}), asks({"memory": "2Gi"})]},
        {"cpu": 3000, "memory": 2 * GI},
    ),
    "a sidecar runs beside the containers": Case({"containers": [asks({"cpu": 2})], "initContainers": [sidecar(cpu=1)]}, {"cpu": 3000}),
    "a sidecar runs beside the init containers after it": Case(
        {"containers": [asks({"cpu": 1})], "initContainers": [sidecar(cpu=1), asks({"cpu": 5}), sidecar(cpu=1)]}, {"cpu": 6000},
    ),
    "not beside those before it": Case(
        {"containers": [asks({"cpu": 1})], "initContainers": [asks({"cpu": 5}), sidecar(cpu=1), sidecar(cpu=2)]}, {"cpu": 5000},
    ),
    "overhead comes on top of the larger phase": Case(
        {"containers": [asks({"cpu": 1})], "initContainers": [asks({"cpu": 2})], "overhead": {"cpu": "250m", "memory": "1Gi"}},
        {"cpu": 2250, "memory": GI},
    ),
    "pod-level requests replace the sum": Case(
        {"containers": [asks({"cpu": 1, GPU: 1})], "resources": {"requests": {"cpu": 4}}, "overhead": {"cpu": 1}}, {"cpu": 5000, GPU: 1},
    ),
    "a pod-level request may be smaller than the sum": Case(
        {"containers": [asks({"cpu": 8})], "resources": {"requests": {"cpu": 4}}}, {"cpu": 4000},
    ),
    "a pod-level limit leaves what containers request": Case(
        {"containers": [asks({"cpu": 1})], "resources": {"limits": {"cpu": 4}}}, {"cpu": 1000},
    ),
    "a pod-level limit is the request where no container has one": Case(
        {"containers": [asks({"cpu": 1})], "resources": {"limits": {"memory": "4Gi"}}}, {"cpu": 1000, "memory": 4 * GI},
    ),
    "a pod-level limit of huge pages is the request": Case(
        {"containers": [asks({"hugepages-2Mi": "2Mi"})], "resources": {"limits": {"hugepages-2Mi": "4Mi"}}}, {"hugepages-2Mi": 2**22},
    ),
    "pod-level devices are not heeded": Case({"containers": [asks({GPU: 1})], "resources": {"requests": {GPU: 4}}}, {GPU: 1}),
    "sums saturate": Case({"containers": [asks({"memory": "8Ei"}), asks({"memory": "8Ei"})]}, {"memory": MAX_AMOUNT}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_kube_scheduler_reserves_for_a_pod(case: Case) -> None:
    assert pod_requests(case.spec) == case.want | {"pods": 1}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"containers": [asks({"cpu": "8 CPUs"})]}, "'8 CPUs' is not a quantity"),
        ({"containers": [asks({GPU: -1})]}, "nvidia.com/gpu of -1 is below zero; write 0 or more"),
        ({"overhead": {"cpu": "-1m"}}, "cpu of -1m is below zero"),
        ({"resources": {"limits": {"memory": "much"}}}, "'much' is not a quantity"),
    ],
)
def test_nonsense_in_a_pod_is_named(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pod_requests(spec)

"""What GPUs count as in quotas and limits, whole, sliced or shared; and what who can't get them is told."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.cards import cards
from queuectl.core.cycle import plan
from queuectl.core.elastic import last
from queuectl.core.limits import Held
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Flavor, Gang, GpuNeed, Node, Queue
from queuectl.model.plan import Plan, Portion, held
from queuectl.model.policy import Cap, Quota
from queuectl.model.reasons import Reason
from queuectl.model.resources import CARD, CARDS, format_quantity, parse_quantity
from tests.support.builders import GPU, flavor, gang, node, queue, role, snapshot

ONE_G, THREE_G = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
FIFTH = flavor(gpus={GPU: CARD // 5})
SHARED = GpuNeed(shared=True)
AGREES: Any = {"need": SHARED}


def asks(amounts: dict[str, int]) -> dict[str, Any]:
    """Return resources as arguments."""
    return amounts


def owning(cards: str, **given: Any) -> Queue:
    """Return a queue with a quota of cards in flavor "any"."""
    return replace(queue(any={CARDS: parse_quantity(CARDS, cards)}), **given)


def decided(*waiting: Gang, nodes: list[Node], queues: Queue, flavors: list[Flavor] | None = None) -> Plan:
    return plan(snapshot(waiting, nodes=nodes, queues=[queues], flavors=flavors), 0.0)


def short_of(found: Plan, uid: str) -> tuple[object, ...]:
    """Return what is missing of which resource, and what of the quota is in use."""
    wait = found.waits[uid]
    assert wait.reason is Reason.WAITING_FOR_QUOTA
    return tuple(wait.facts[name] for name in ("missing", "resource", "used", "nominal"))


def started(found: Plan) -> list[str]:
    return [admission.uid for admission in found.admissions]


@pytest.mark.parametrize(
    ("requested", "known", "cards_"),
    [
        ({GPU: 8}, flavor(), "8"),
        ({ONE_G: 7}, flavor(), "1"),
        ({ONE_G: 1, THREE_G: 2}, flavor(), "1"),
        ({"nvidia.com/mig-1g.6gb": 2}, flavor(gpus={"nvidia.com/mig-1g.6gb": CARD // 4}), "0.5"),
        ({GPU: 3}, FIFTH, "0.6"),
        ({"example.com/a100": 2}, flavor(gpus={"example.com/a100": CARD}), "2"),
        ({"example.com/a100": 2, "rdma/hca": 8}, flavor(), "0"),
    ],
)
def test_what_pods_count_as(requested: dict[str, int], known: Flavor, cards_: str) -> None:
    assert format_quantity(CARDS, cards(requested.items(), known)) == cards_


@given(st.integers(0, 10**9))
def test_quotas_in_thousandths_of_a_card_are_exact(milli: int) -> None:
    text = f"{milli // 1000}.{milli % 1000:03}"
    amount = parse_quantity(CARDS, text)
    assert amount * 1000 == milli * CARD
    assert parse_quantity(CARDS, format_quantity(CARDS, amount)) == amount


def test_seven_slices_are_a_card_and_an_eighth_is_too_much() -> None:
    there = [node("n", gpu=0, **asks({ONE_G: 14}))]
    found = decided(*(gang(f"g{i}", role(**asks({ONE_G: 1}))) for i in range(8)), nodes=there, queues=owning("1"))
    assert started(found) == [f"g{i}" for i in range(7)]
    assert all(admission.quota == {("any", CARDS): CARD // 7} for admission in found.admissions)
    assert short_of(found, "g7") == ("0.143", CARDS, "1", "1")


def test_whole_and_sliced_gpus_draw_on_one_quota() -> None:
    there = [node("n", gpu=4, **asks({THREE_G: 4}))]
    waiting = [gang("a", role(gpu=1)), gang("b", role(**asks({THREE_G: 1}))), gang("c", role(gpu=1))]
    found = decided(*waiting, nodes=there, queues=owning("2"))
    assert started(found) == ["a", "b"]
    assert short_of(found, "c") == ("0.429", CARDS, "1.429", "2")


def test_parts_of_several_devices_add_up() -> None:
    """kai-scheduler/KAI-Scheduler#1369: two devices, 0.6 of each, and a quota of 1.0."""
    waiting = gang("g", role(pods=2, gpu=3, **AGREES))
    found = decided(waiting, nodes=[node("n", gpu=10)], queues=owning("1"), flavors=[FIFTH])
    assert started(found) == []
    assert str(found.waits["g"]) == ("Can never fit: it asks for 1.2 queuectl.dev/gpu and queue q has 1 in flavor any.")
    assert started(decided(waiting, nodes=[node("n", gpu=10)], queues=owning("1.2"), flavors=[FIFTH])) == ["g"]


def test_both_quotas_count_where_both_are_given() -> None:
    both = queue(any={GPU: 2, CARDS: 8 * CARD})
    found = decided(gang("a", role(gpu=2)), gang("b", role(gpu=1)), nodes=[node("n")], queues=both)
    assert [admission.quota for admission in found.admissions] == [{("any", GPU): 2, ("any", CARDS): 2 * CARD}]
    assert short_of(found, "b") == ("1", GPU, "2", "2")


def test_the_flavor_that_is_taken_says_what_they_count_as() -> None:
    slow, fast = flavor("slow", labels={"kind": "slow"}, gpus={GPU: CARD // 2}), flavor("fast", labels={"kind": "fast"})
    there = [node("s", labels={"kind": "slow"}), node("f", labels={"kind": "fast"})]
    queues = queue(slow={CARDS: CARD}, fast={CARDS: 4 * CARD})
    waiting = [gang("two", role(gpu=2, **AGREES)), gang("four", role(gpu=4, **AGREES))]
    found = decided(*waiting, nodes=there, queues=queues, flavors=[slow, fast])
    assert {a.uid: a.quota for a in found.admissions} == {
        "two": {("slow", CARDS): CARD}, "four": {("fast", CARDS): 4 * CARD},
    }  # fmt: skip


def test_a_name_that_a_flavor_knows_is_a_gpu() -> None:
    known = flavor(gpus={"example.com/a100": CARD}, model="A100")
    four: dict[str, Any] = {"example.com/a100": 4}
    waiting = [gang("fits", role(**four), gpu_models=("A100",)), gang("other", role(**four), gpu_models=("H100",))]
    found = decided(*waiting, nodes=[node("n", gpu=0, **four)], queues=owning("4"), flavors=[known])
    assert started(found) == ["fits"]
    assert str(found.waits["other"]) == "Queue q has no flavor for role worker: none is of GPU model H100."


def test_pods_that_are_given_up_take_their_cards_along() -> None:
    elastic = gang("g", role(pods=4, least=1, **asks({ONE_G: 1})), role("big", 2, **asks({THREE_G: 1})))
    [admission] = decided(
        elastic, nodes=[node("n", gpu=0, **asks({ONE_G: 7, THREE_G: 7}))], queues=owning("2")
    ).admissions
    whole = Portion(admission.placements, admission.quota)
    assert whole.quota == {("any", CARDS): 10 * CARD // 7}
    part = last(whole, {"worker": 2, "big": 1})
    assert part.quota == {("any", CARDS): 5 * CARD // 7}
    assert whole.without(part).quota == {("any", CARDS): 5 * CARD // 7}


@pytest.mark.parametrize(
    ("pods", "sentence"),
    [
        (8, "Can never start: it asks for 1.143 queuectl.dev/gpu, and queue q lets jobs of user ann hold 1 (perUser.maxResources)."),
        (5, "Queue q lets jobs of user ann hold 1 queuectl.dev/gpu at a time (perUser.maxResources): they hold 0.429, and it asks for 0.715."),
        (4, ""),
    ],
)  # fmt: skip
def test_a_limit_may_count_cards(pods: int, sentence: str) -> None:
    queues = owning("8", per_user=Cap(max_resources=((CARDS, CARD),)))
    holding = Held()
    holding.add(queues, "team", "ann", {CARDS: 3 * CARD // 7})
    waiting = [gang("g", role(pods=pods, **asks({ONE_G: 1})), user="ann")]
    view: Snapshot = snapshot(waiting, nodes=[node("n", gpu=0, **asks({ONE_G: 20}))], queues=[queues])
    found = plan(replace(view, held=holding), 0.0)
    assert started(found) == ([] if sentence else ["g"])
    assert str(found.waits.get("g", "")) == sentence


def test_a_limit_that_one_flavor_would_exceed_leads_to_the_next() -> None:
    whole, part = flavor("whole", labels={"kind": "w"}), flavor("part", labels={"kind": "p"}, gpus={GPU: CARD // 4})
    there = [node("w", labels={"kind": "w"}), node("p", labels={"kind": "p"})]
    queues = replace(
        queue(whole={CARDS: 8 * CARD}, part={CARDS: 8 * CARD}), per_user=Cap(max_resources=((CARDS, CARD),))
    )
    waiting = [gang(name, role(gpu=2, **AGREES), user="ann") for name in "abc"]
    found = decided(*waiting, nodes=there, queues=queues, flavors=[whole, part])
    assert {a.uid: set(a.quota) for a in found.admissions} == {"a": {("part", CARDS)}, "b": {("part", CARDS)}}
    assert "they hold 1, and it asks for 0.5" in str(found.waits["c"])


def test_lent_cards_come_back() -> None:
    lender = Queue("lender", "top", quotas={("any", CARDS): Quota(2 * CARD)})
    borrower = Queue("borrower", "top", quotas={("any", CARDS): Quota(0)})
    waiting = [
        gang("g", role(pods=14, **asks({ONE_G: 1})), queue="borrower"),
        gang("h", role(**asks({ONE_G: 1})), queue="lender"),
    ]
    view = snapshot(waiting, nodes=[node("n", gpu=0, **asks({ONE_G: 20}))], queues=[Queue("top"), lender, borrower])
    found = plan(view, 0.0)
    assert started(found) == ["h"]
    assert short_of(found, "g") == ("0.143", CARDS, "0", "0")


A100 = {"nvidia.com/gpu.product": "A100-SXM4-40GB", "nvidia.com/gpu.memory": "40960"}
NODES = [
    node("whole", labels=A100),
    node("shared", labels={"nvidia.com/gpu.product": "A100-SXM4-40GB-SHARED", "nvidia.com/gpu.replicas": "4"}),
    node("sliced", labels={"nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb", "nvidia.com/gpu.memory": "4864"}),
    node("unknown", labels={"nvidia.com/gpu.product": "A100-SXM4-40GB"}),
]


@pytest.mark.parametrize(
    ("need", "nodes", "short"),
    [
        (GpuNeed(), 2, "2 places with 8 nvidia.com/gpu; 1 more node has GPUs that pods share, and gpu.shared of the role is not true; 1 more node has slices for GPUs, see gpu.slice of the role"),
        (GpuNeed(min_memory=40 * 2**30), 1, "3 places with 8 nvidia.com/gpu; 1 more node has GPUs of whose memory no label tells, and its gpu.minMemory is 40Gi"),
        (GpuNeed(min_memory=80 * 2**30), 0, "4 places with 8 nvidia.com/gpu; 1 more node has GPUs of less memory than its gpu.minMemory, 80Gi; 1 more node has GPUs of whose memory no label tells, and its gpu.minMemory is 80Gi"),
        (GpuNeed(slice="1g.5gb"), 1, "3 places with 8 nvidia.com/gpu; 2 more nodes have slices other than 1g.5gb, or whole GPUs, see gpu.slice of the role"),
    ],
)  # fmt: skip
def test_how_many_nodes_are_left_out_and_why(need: GpuNeed, nodes: int, short: str) -> None:
    waiting = gang("g", role(pods=4, gpu=8, need=need))
    told = decided(waiting, nodes=NODES, queues=queue()).waits["g"]
    assert (told.reason, told.facts["nodes"], told.facts["short"]) == (Reason.EXCEEDS_CLUSTER, nodes, short)


def test_models_are_never_mixed_nor_are_kinds() -> None:
    there = [*NODES, node("other", labels={"nvidia.com/gpu.product": "H100"})]
    found = decided(gang("g", role(pods=3, gpu=8, **AGREES)), nodes=there, queues=queue())
    assert "one GPU model with room for all of them; the roomiest, A100-SXM4-40GB, has room for 2" in str(
        found.waits["g"]
    )
    [admission] = decided(gang("g", role(pods=2, gpu=8, **AGREES)), nodes=there, queues=queue()).admissions
    assert {p.node for p in admission.placements} == {"whole", "unknown"}


def test_who_asks_for_a_name_that_no_node_offers_is_told_which_they_have() -> None:
    there = [node("n", gpu=0, **asks({ONE_G: 7, "amd.com/gpu": 8}))]
    found = decided(gang("g", role(gpu=1, need=GpuNeed())), nodes=there, queues=owning("8"))
    assert str(found.waits["g"]).endswith(
        "short of 1 place with 1 nvidia.com/gpu; none of flavor any offers nvidia.com/gpu, their GPUs are amd.com/gpu,"
        " nvidia.com/mig-1g.10gb."
    )


def test_who_asks_for_a_name_without_a_quota_is_told_which_have_one() -> None:
    found = decided(gang("g", role(**asks({"amd.com/gpu": 1}))), nodes=[node("n")], queues=queue())
    assert str(found.waits["g"]) == (
        "Queue q has no flavor for role worker: none has a quota for amd.com/gpu; for GPUs there is nvidia.com/gpu."
    )


_pods = st.builds(
    lambda name, kinds, pods, spare: gang(
        name, *(role(f"r{i}", pods, least=max(1, pods - spare), **asks({kind: n})) for i, (kind, n) in enumerate(kinds))
    ),
    st.uuids().map(str),
    st.lists(st.tuples(st.sampled_from([GPU, ONE_G, THREE_G, "example.com/a100"]), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 3),
)  # fmt: skip


@given(st.lists(_pods, max_size=6), st.integers(0, 60), st.integers(1, 50))
def test_what_is_charged_is_what_is_placed_and_never_more_than_the_quota(
    waiting: list[Gang], sevenths: int, parts: int
) -> None:
    known = flavor(gpus={"example.com/a100": -(-CARD // parts)})
    there = [node(f"n{i}", **asks({GPU: 4, ONE_G: 7, THREE_G: 4, "example.com/a100": 8})) for i in range(3)]
    quota = sevenths * CARD // 7
    found = decided(*waiting, nodes=there, queues=queue(any={CARDS: quota}), flavors=[known])
    for admission in found.admissions:
        assert admission.quota == {("any", CARDS): held(admission.placements)[CARDS]}
        whole = Portion(admission.placements, admission.quota)
        part = last(whole, dict.fromkeys(admission.pods, 1))
        assert part.quota == {("any", CARDS): held(part.placements)[CARDS]}
        assert whole.has(part)
    assert sum(admission.quota["any", CARDS] for admission in found.admissions) <= quota


@pytest.mark.parametrize(("parts", "quota", "fit"), [(16, "1", 16), (32, "0.5", 16), (17, "1", 16), (17, "1.001", 17)])
def test_parts_are_exact_down_to_sixteenths_and_others_never_counted_too_small(
    parts: int, quota: str, fit: int
) -> None:
    """As the admin's page says."""
    known = flavor(gpus={GPU: -(-CARD // parts)})
    waiting = [gang(f"g{i:02}", role(gpu=1, **AGREES)) for i in range(18)]
    found = decided(*waiting, nodes=[node("n", gpu=32)], queues=owning(quota), flavors=[known])
    assert len(started(found)) == fit

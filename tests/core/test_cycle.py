"""One admission cycle: who starts, in which order, and what the others are told."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from queuectl.core import cycle
from queuectl.core.backlog import Backlog, pending_key
from queuectl.core.cycle import plan
from queuectl.core.fleet import Base
from queuectl.core.nominate import nominate
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Flavor, Gang, Node, Queue
from queuectl.model.plan import Admission
from queuectl.model.policy import Quota
from queuectl.model.reasons import Reason, Why
from tests.support.builders import GPU, HCA, flavor, gang, node, queue, role, snapshot, spread

NOW = 1_000_000_000.0  # 2001-09-09 01:46:40 UTC
H100, A100 = flavor("h100", labels={"gpu": "h100"}, model="H100"), flavor("a100", labels={"gpu": "a100"}, model="A100")
BOTH = [H100, A100]
AMD: dict[str, Any] = {"amd.com/gpu": 1}


def whole(name: str, pods: int = 1, **given: object) -> Gang:
    """Return a gang of whole-node pods."""
    return gang(name, role(pods=pods, gpu=8), **given)


def nodes(count: int) -> list[Node]:
    return [node(f"n{i}") for i in range(count)]


@dataclass(frozen=True)
class Case:
    snapshot: Snapshot
    admitted: list[str] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)  # uid → sentence


TWO = [node("n0"), node("n1")]
CASES = {
    "nothing waits": Case(snapshot([], nodes=TWO)),
    "everything fits": Case(snapshot([whole("a"), whole("b")], nodes=TWO), ["a", "b"]),
    "two gangs for the place of one": Case(
        snapshot([whole("a", 2), whole("b", 2)], nodes=TWO), ["a"],
        {"b": "Only 0 of 2 pods of role worker fit on the 2 nodes of flavor any that they may use: short of 2 places with 8 nvidia.com/gpu."},
    ),
    "a higher priority goes first": Case(snapshot([whole("a", 2), whole("b", 2, priority=5)], nodes=TWO), ["b"], {"a": "…"}),
    "then who came first": Case(snapshot([whole("a", 2, submitted_at=2), whole("b", 2, submitted_at=1)], nodes=TWO), ["b"], {"a": "…"}),
    "then by arrival": Case(snapshot([whole("a", 2, seq=2), whole("b", 2, seq=1)], nodes=TWO), ["b"], {"a": "…"}),
    "then by uid": Case(snapshot([whole("b", 2), whole("a", 2)], nodes=TWO), ["a"], {"b": "…"}),
    "a small gang passes a large one": Case(snapshot([whole("a", 3), whole("b", 1)], nodes=TWO), ["b"], {"a": "…"}),
    "held": Case(snapshot([whole("a", hold=True), whole("b")], nodes=TWO), ["b"], {"a": "Held by its user; 'queuectl release a' lets it start."}),
    "backing off": Case(
        snapshot([whole("a", not_before=NOW + 1, last_end="Node n7 is gone."), whole("b", not_before=NOW)], nodes=TWO), ["b"],
        {"a": "Backing off until 01:46:41 UTC after: Node n7 is gone."},
    ),
    "no such queue": Case(snapshot([whole("a", queue="nowhere")], nodes=TWO), [], {"a": "Queue nowhere does not exist."}),
    "a broken queue": Case(
        snapshot([whole("a")], nodes=TWO, broken={"q": "parent p does not exist; create it"}), [],
        {"a": "queue q: parent p does not exist; create it"},
    ),
    "a queue without quotas": Case(
        snapshot([whole("a")], nodes=TWO, queues=[replace(queue(), quotas={})]), [],
        {"a": "Queue q has no flavor for role worker: it has no quota; add spec.quotas."},
    ),
    "a queue without quotas, and a gang without GPUs": Case(
        snapshot([gang("a", role(cpu=1))], nodes=TWO, queues=[replace(queue(), quotas={})]), [],
        {"a": "Queue q has no flavor for role worker: it has no quota; add spec.quotas."},
    ),
    "a flavor that is missing": Case(
        snapshot([whole("a")], nodes=TWO, flavors=[]), [],
        {"a": "Queue q has no flavor for role worker: ResourceFlavor any does not exist."},
    ),
    "a resource without quota": Case(
        snapshot([gang("a", role(gpu=8, **HCA))], nodes=TWO), [],
        {"a": "Queue q has no flavor for role worker: none has a quota for rdma/hca."},
    ),
    "quotas in different flavors": Case(
        snapshot(
            [gang("a", role(gpu=8, **HCA))], nodes=TWO, flavors=BOTH, queues=[queue(h100={GPU: 8}, a100={"rdma/hca": 8})]
        ), [],
        {"a": "Queue q has no flavor for role worker: none has quotas for all of nvidia.com/gpu, rdma/hca."},
    ),
    "roles with GPUs of kinds that no flavor has together": Case(
        snapshot(
            [gang("a", role("w", gpu=8), role("v", **AMD))], nodes=TWO, flavors=BOTH,
            queues=[queue(h100={GPU: 8}, a100={"amd.com/gpu": 8})],
        ), [],
        {"a": "Queue q has no flavor for role w, v: none has quotas for all of amd.com/gpu, nvidia.com/gpu."},
    ),
    "GPUs would do, the other role has no flavor": Case(
        snapshot([gang("a", role("w", gpu=8), role("io", **HCA))], nodes=TWO), [],
        {"a": "Queue q has no flavor for role io: none has a quota for rdma/hca."},
    ),
    "a GPU model that the queue does not have": Case(
        snapshot([whole("a", gpu_models=("B200", "GB300"))], nodes=TWO, flavors=BOTH, queues=[queue(h100={GPU: 8}, a100={GPU: 8})]), [],
        {"a": "Queue q has no flavor for role worker: none is of GPU model B200 or GB300."},
    ),
    "larger than the quota": Case(
        snapshot([whole("a", 2), whole("b")], nodes=TWO, queues=[queue(any={GPU: 8})]), ["b"],
        {"a": "Can never fit: it asks for 16 nvidia.com/gpu and queue q has 8 in flavor any."},
    ),
    "quota in use": Case(
        snapshot([whole("a"), whole("b")], nodes=TWO, queues=[queue(any={GPU: 12})]), ["a"],
        {"b": "It asks for 8 nvidia.com/gpu in flavor any, and queue q is short of 4: it owns 12 and uses 8."},
    ),
    "one GPU of quota is missing": Case(
        snapshot([whole("a")], nodes=TWO, queues=[queue(any={GPU: 16})], usage={("q", "any", GPU): 9}), [],
        {"a": "It asks for 8 nvidia.com/gpu in flavor any, and queue q is short of 1: it owns 16 and uses 9."},
    ),
    "the last GPU of quota is enough": Case(snapshot([whole("a")], nodes=TWO, queues=[queue(any={GPU: 16})], usage={("q", "any", GPU): 8}), ["a"]),
    "quota cut below what is in use": Case(
        snapshot([whole("a")], nodes=TWO, queues=[queue(any={GPU: 12})], usage={("q", "any", GPU): 16}), [],
        {"a": "It asks for 8 nvidia.com/gpu in flavor any, and queue q is short of 12: it owns 12 and uses 16."},
    ),
    "in want of quota now, of nodes for ever": Case(
        snapshot([whole("a", 3)], nodes=TWO, queues=[queue(any={GPU: 24})], usage={("q", "any", GPU): 8}), [],
        {"a": "Can never fit on today's nodes: of 3 pods of role worker, 2 would fit on the 2 nodes of flavor any that they may use if nothing else were there; short of 1 place with 8 nvidia.com/gpu."},
    ),
    "quota of cpu": Case(
        snapshot([gang("a", role(pods=3, gpu=1, cpu="1500m"))], nodes=TWO, queues=[queue(any={GPU: 8, "cpu": 4000})]), [],
        {"a": "Can never fit: it asks for 4500m cpu and queue q has 4 in flavor any."},
    ),
    "cpu without quota is free": Case(snapshot([gang("a", role(gpu=1, cpu=90))], nodes=TWO, queues=[queue(any={GPU: 1})]), ["a"]),
    "a quota of pods": Case(
        snapshot([gang("a", role(pods=3, cpu=1))], nodes=TWO, queues=[queue(any={"pods": 2})]), [],
        {"a": "Can never fit: it asks for 3 pods and queue q has 2 in flavor any."},
    ),
    "queues don't share quota": Case(
        snapshot([whole("a"), whole("b", queue="r")], nodes=TWO, queues=[queue(any={GPU: 8}), queue("r", any={GPU: 8})]), ["a", "b"],
    ),
    "the head of a StrictFIFO queue goes first, whatever fits": Case(
        snapshot([whole("a", 2), whole("b", 2), whole("c")], nodes=[*TWO, node("n2")], queues=[queue(strict=True)]), ["a"],
        {"b": "…", "c": "Queue q is StrictFIFO and team/b is first."},
    ),
    "and when it waits for quota": Case(
        snapshot([whole("a", 2), whole("b")], nodes=TWO, queues=[queue(strict=True, any={GPU: 16})], usage={("q", "any", GPU): 8}), [],
        {"a": "It asks for 16 nvidia.com/gpu in flavor any, and queue q is short of 8: it owns 16 and uses 8.", "b": "Queue q is StrictFIFO and team/a is first."},
    ),
    "and when today's nodes are too few": Case(
        snapshot([whole("a", 3), whole("b")], nodes=TWO, queues=[queue(strict=True)]), [],
        {"a": "…", "b": "Queue q is StrictFIFO and team/a is first."},
    ),
    "it holds up its own queue only": Case(
        snapshot([whole("a", 3), whole("b", queue="r")], nodes=TWO, queues=[queue(strict=True), queue("r", strict=True)]), ["b"], {"a": "…"},
    ),
    "who can never fit, is held or backs off holds up nobody": Case(
        snapshot(
            [whole("a", 2), whole("b", gpu_models=("X",)), whole("c", hold=True), whole("d", not_before=NOW + 9), whole("e")],
            nodes=TWO, queues=[queue(strict=True, any={GPU: 8})],
        ), ["e"], {"a": "…", "b": "…", "c": "…", "d": "…"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_cycle(case: Case) -> None:
    decided = plan(case.snapshot, NOW)
    assert [admission.uid for admission in decided.admissions] == case.admitted
    assert decided.waits.keys() == case.waits.keys()
    told = {uid: "…" if case.waits[uid] == "…" else str(why) for uid, why in decided.waits.items()}
    assert told == case.waits


@dataclass(frozen=True)
class FlavorCase:
    gang: Gang
    want: dict[str, dict[str, int]] | Reason
    quotas: dict[str, dict[str, int]] = field(default_factory=lambda: {"h100": {GPU: 64}, "a100": {GPU: 64}})
    flavors: list[Flavor] = field(default_factory=lambda: BOTH)
    usage: dict[tuple[str, str, str], int] = field(default_factory=dict)

    @property
    def queue(self) -> Queue:
        nominal = {
            (kind, resource): amount for kind, parts in self.quotas.items() for resource, amount in parts.items()
        }
        return Queue("q", quotas={cell: Quota(amount) for cell, amount in nominal.items()})


CPUS = flavor("cpus", labels={"gpu": "none"})
FLAVORS = {
    "the first flavor that the queue lists": FlavorCase(whole("a"), {"worker": {"h1": 1}}),
    "another order, another flavor": FlavorCase(whole("a"), {"worker": {"a1": 1}}, {"a100": {GPU: 64}, "h100": {GPU: 64}}),
    "the next one when the first is too small": FlavorCase(whole("a", 3), {"worker": {"a1": 1, "a2": 1, "a3": 1}}),
    "the next one when the quota of the first is in use": FlavorCase(whole("a"), {"worker": {"a1": 1}}, usage={("q", "h100", GPU): 60}),
    "the next one when the first has no quota for it": FlavorCase(
        gang("a", role(gpu=8, **HCA)), {"worker": {"a1": 1}}, {"h100": {GPU: 64}, "a100": {GPU: 64, "rdma/hca": 8}}
    ),
    "only the model that is asked for": FlavorCase(whole("a", gpu_models=("B200", "A100")), {"worker": {"a1": 1}}),
    "a gang never mixes models": FlavorCase(whole("a", 5), Reason.EXCEEDS_CLUSTER),
    "nor do its roles": FlavorCase(
        gang("a", role("w", 2, gpu=8), role("v", 1, gpu=8)), {"w": {"a2": 1, "a3": 1}, "v": {"a1": 1}}
    ),
    "a role without GPUs goes along": FlavorCase(gang("a", role("w", 1, gpu=8), role("ps", 1, cpu=4)), {"w": {"h1": 1}, "ps": {"h1": 1}}),
    "one that nothing is counted of to any that has room": FlavorCase(
        gang("a", role("ps", 3, cpu=90)), {"ps": {"a1": 1, "a2": 1, "a3": 1}}
    ),
    "or to a flavor of its own": FlavorCase(
        gang("a", role("w", 2, gpu=8, cpu=96), role("ps", 1, cpu=8)), {"w": {"h1": 1, "h2": 1}, "ps": {"c1": 1}},
        {"h100": {GPU: 64}, "cpus": {"cpu": 64_000}}, [H100, CPUS],
    ),
    "the reason that came furthest is told": FlavorCase(whole("a", 2), Reason.WAITING_FOR_QUOTA, {"h100": {GPU: 8}, "a100": {GPU: 16}}, usage={("q", "a100", GPU): 8}),
    "an unknown flavor is passed over": FlavorCase(whole("a"), {"worker": {"h1": 1}}, {"gone": {GPU: 64}, "h100": {GPU: 64}}),
}  # fmt: skip


def admit(view: Snapshot, job: Gang) -> Admission | Why:
    """Return what the gang alone would get."""
    entry = nominate(view, frozenset(), job, 0.0)
    return entry.wait or entry.admission()


@pytest.mark.parametrize("case", FLAVORS.values(), ids=FLAVORS.keys())
def test_which_flavor_a_gang_gets(case: FlavorCase) -> None:
    servers = [
        *(node(name, labels={"gpu": "h100"}, **HCA) for name in ("h1", "h2")),
        *(node(name, labels={"gpu": "a100"}, **HCA) for name in ("a1", "a2", "a3")),
        node("c1", gpu=0, labels={"gpu": "none"}),
    ]
    view = snapshot([case.gang], nodes=servers, flavors=case.flavors, queues=[case.queue], usage=case.usage)
    result = admit(view, case.gang)
    if isinstance(case.want, Reason):
        assert not isinstance(result, Admission)
        assert result.reason is case.want
    else:
        assert isinstance(result, Admission), str(result)
        assert spread(result.placements) == case.want


def test_what_is_charged() -> None:
    job = gang("a", role("w", 2, gpu=4, cpu=8, memory="1Gi"), role("v", 1, gpu=1, cpu=1))
    result = admit(snapshot([job], nodes=TWO, queues=[queue(any={GPU: 64, "cpu": 64_000})]), job)
    assert isinstance(result, Admission)
    assert result.quota == {("any", GPU): 9, ("any", "cpu"): 17_000}


def test_places_in_the_queue_are_counted_per_queue() -> None:
    waiting = [
        whole("a", 2),
        whole("b", queue="r"),
        whole("c", hold=True),
        whole("d", priority=1),
        whole("e", queue="gone"),
    ]
    decided = plan(snapshot(waiting, queues=[queue(), queue("r")]), NOW)
    assert decided.positions == {"d": 1, "a": 2, "c": 3, "b": 1, "e": 1}


def test_the_next_cycle_is_due_when_the_first_back_off_ends() -> None:
    waiting = [
        whole("a", not_before=NOW + 30),
        whole("b", not_before=NOW + 7),
        whole("c", not_before=NOW - 7),
        whole("d"),
    ]
    assert plan(snapshot(waiting), NOW).wake_at == NOW + 7
    assert plan(snapshot([whole("d")]), NOW).wake_at is None


def test_the_order_is_total() -> None:
    one = whole("a", priority=1, submitted_at=1, seq=1)
    keys = [
        pending_key(g)
        for g in (
            one,
            replace(one, priority=0),
            replace(one, submitted_at=2),
            replace(one, seq=2),
            replace(one, uid="b"),
        )
    ]
    assert keys[0] == min(keys)
    assert len(set(keys)) == len(keys)


def test_a_cycle_admits_as_many_gangs_as_a_transaction_takes() -> None:
    waiting = [gang(f"g{i:03}", role(gpu=1)) for i in range(510)] + [whole("z", 9)]
    decided = plan(snapshot(waiting, nodes=nodes(100)), NOW)
    assert [admission.uid for admission in decided.admissions] == [f"g{i:03}" for i in range(cycle.MAX_ADMISSIONS)]
    assert {why.reason for why in decided.waits.values()} == {Reason.PENDING}
    assert decided.positions["z"] == 11


@pytest.mark.parametrize(
    ("limit", "admitted"), [(1, ["a"]), (2, ["a"]), (3, ["a"]), (4, ["a", "b"]), (5, ["a", "b", "c"])]
)
def test_a_cycle_reserves_as_many_places_as_a_transaction_takes(
    limit: int, admitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycle, "MAX_PLACEMENTS", limit)
    decided = plan(snapshot([whole("a", 2), whole("b", 2), whole("c")], nodes=nodes(9)), NOW)
    assert [admission.uid for admission in decided.admissions] == admitted
    assert {why.reason for why in decided.waits.values()} <= {Reason.PENDING}


def test_a_full_cycle_lets_nobody_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycle, "MAX_PLACEMENTS", 3)
    decided = plan(snapshot([whole("a", 2), whole("b", 2), whole("c", 1)], nodes=nodes(9)), NOW)
    assert list(decided.waits) == ["b", "c"]


def test_a_shape_that_failed_is_not_tried_again() -> None:
    decided = plan(snapshot([whole("a", 3), whole("b", 3)], nodes=TWO), NOW)
    assert decided.waits["a"] is decided.waits["b"]


def test_the_snapshot_is_not_used_up() -> None:
    view = snapshot([whole("a", 2), whole("b", 1)], nodes=TWO)
    first = plan(view, NOW)
    assert not any(node.usage for node in view.tree.nodes.values())
    assert view.fleet
    assert view.fleet.matrix(Base.FREE)[:, 0].sum() == 16
    assert plan(view, NOW) == first


def test_who_has_to_borrow_after_what_was_settled_before_it_comes_after_those_who_do_not() -> None:
    """The one of priority 5 loses its own flavor's node to the one of priority 9, and could borrow the other's."""

    heads = [whole("z", queue="z", priority=9), whole("b", queue="b", priority=5), whole("own", queue="own")]
    view = snapshot(
        heads,
        nodes=[node("n0", labels={"gpu": "h100"}), node("n1", labels={"gpu": "a100"})],
        queues=[
            Queue("top"),
            queue("z", h100={GPU: 8}),
            replace(queue("b", h100={GPU: 8}, a100={GPU: 0}), parent="top"),
            replace(queue("own", a100={GPU: 8}), parent="top"),
        ],
        flavors=BOTH,
    )
    assert [admission.uid for admission in plan(view, NOW).admissions] == ["z", "own"]
    alone = replace(view, waiting=Backlog(heads[:2]))
    assert [admission.uid for admission in plan(alone, NOW).admissions] == ["z", "b"]


def test_two_queues_do_not_book_one_node_in_one_cycle() -> None:
    """Kueue's issues 14570 and 14647: a big gang would have the node as its last, another queue's job as its only one."""
    big, small = whole("big", 2), replace(whole("small"), queue="p")
    decided = plan(snapshot([big, small], nodes=TWO, queues=[queue(), queue("p")]), NOW)
    booked = [place.node for admission in decided.admissions for place in admission.placements]
    assert len(booked) == len(set(booked))
    assert len(decided.admissions) == len(decided.waits) == 1

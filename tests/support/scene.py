"""What holds room just before a preemption, and who should have given way by all that is known then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from queuectl.core.backlog import Backlog
from queuectl.core.preemption import Running
from queuectl.core.snapshot import Policy, Snapshot
from queuectl.core.tree import Tree
from queuectl.model.objects import Flavor, Queue
from queuectl.model.plan import Placement
from queuectl.model.policy import Preemption, Quota, Reclaim, VictimChoice, Within
from queuectl.model.work import Work
from tests.support import ledger
from tests.support.builders import GPU, fleet, gang, node, requests, role
from tests.support.stage import Stage
from tests.support.victims import CELL, NOW, Case, total

MOST = 4  # victims of a set that is tried instead

_HELD = """
SELECT w.uid, w.name, w.priority, w.submitted_at, w.preemptions, w.first_admitted_at, w.saved,
       a.number, a.state, a.running_at, a.claimed_by_uid,
       (SELECT json_agg(json_build_array(r.node, r.pods, r.requests)) FROM reservation r
        WHERE r.workload_uid = w.uid AND r.attempt = a.number AND r.freed_at IS NULL) AS places
FROM workload w JOIN attempt a ON a.workload_uid = w.uid
WHERE w.namespace = :namespace AND a.state <> 'Ended'
"""


@dataclass(frozen=True)
class Scene:
    """Nodes that take pods, and who holds room there."""

    gpus: Mapping[str, int]  # by node
    held: Mapping[str, Running]  # by workload uid
    states: Mapping[str, str]
    claimed_by: Mapping[str, str]  # uid of the victim → of who has its room next

    @classmethod
    async def look(cls, stage: Stage) -> "Scene":
        found = (await stage.client.request("GET", "/api/v1/nodes"))["items"]
        gpus = {
            item["metadata"]["name"]: int(item["status"].get("allocatable", {}).get(GPU, 0))
            for item in found
            if not item["spec"].get("unschedulable") and not item["spec"].get("taints")
            and any(c["type"] == "Ready" and c["status"] == "True" for c in item["status"].get("conditions") or ())
        }  # fmt: skip
        rows = await ledger.rows(stage, _HELD, namespace=stage.namespace)
        return cls(
            gpus,
            {row["uid"]: _running(row) for row in rows},
            {row["uid"]: f"{row['number']} {row['state']}" for row in rows},
            {row["uid"]: row["claimed_by_uid"] for row in rows if row["claimed_by_uid"]},
        )

    def is_calm(self, after: "Scene", preemptor: str) -> bool:
        """Tell whether nothing else has happened until `after`, and nothing was on its way."""
        mine = {uid for uid, by in after.claimed_by.items() if by == preemptor}
        others = {uid: state for uid, state in after.states.items() if uid not in {*mine, preemptor}}
        return (
            bool(mine)
            and self.gpus == after.gpus
            and all(state.endswith("Running") for state in self.states.values())
            and {uid: state for uid, state in self.states.items() if uid not in mine} == others
        )


@dataclass(frozen=True)
class Claim:
    """Where a preemptor is to be, and where its victims were."""

    name: str
    nodes: frozenset[str]
    left: Sequence[frozenset[str]]

    @classmethod
    def of(cls, name: str, uid: str, before: Scene, after: Scene) -> "Claim":
        """Return the claim of a workload that was made between two looks; without victims if it is over already."""
        victims = {victim for victim, by in after.claimed_by.items() if by == uid} & before.held.keys()
        mine = after.held.get(uid)
        return cls(name, _nodes(mine) if mine else frozenset(), [_nodes(before.held[one]) for one in victims if mine])

    def judge(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """See that each victim left what the preemptor needs, and that its pods are there."""
        for left in self.left:
            assert left & self.nodes, f"{self.name} is to be on {set(self.nodes)}, and a victim was on {set(left)}"
        for pod in pods if self.nodes else ():
            node = pod["spec"].get("nodeName")
            assert node is None or node in self.nodes, f"{self.name} is on {node}, not on {set(self.nodes)}"


@dataclass(frozen=True)
class Choice:
    """A preemption, with all that may have counted. `before`, `after`: it was decided in between, `at` (Unix seconds)."""

    name: str
    uid: str
    pods: int
    gpus: int  # of each
    at: float
    quota: int
    before: Scene
    after: Scene

    def judge(self) -> str:
        """See that the victims were the cheapest of those allowed; say what that was.

        Where gangs have given way before, the core's search may miss the best set; then it is to choose the same here.
        """
        uids = {uid for uid, by in self.after.claimed_by.items() if by == self.uid}
        # A checkpoint that became known between the looks may have counted, or not.
        dear, cheap = self._case(self.before), self._case(self.after)
        victims = [one for one in dear.snapshot.running["q"] if one.uid in uids]
        assert len(victims) == len(uids), f"{self.name}: {uids} did not all run before"
        assert dear.makes_room(victims, at_home=False), f"{self.name}: no room by {uids}"
        for spared in victims:
            rest = [one for one in victims if one is not spared]
            assert not dear.makes_room(rest, at_home=False), f"{self.name}: {spared.uid} need not have gone"
        victims = [one for one in cheap.snapshot.running["q"] if one.uid in uids]
        lost, peers = _lost(victims), _lost(dear.victims(VictimChoice.LOWEST_PRIORITY))
        price, best = _price(victims), _best(dear, peers, _price(victims))
        says = (
            f"{self.name}: {len(uids)} of {len(self.before.held)} give way and lose {lost}, in the peers' order {peers};"
            f" they count for {price}, the cheapest for {best}"
        )
        assert lost <= peers, says
        again = [{one.uid for one in case.victims(VictimChoice.LEAST_WORK_LOST)} for case in (dear, cheap)]
        assert price <= best or (uids in again and any(one.preemptions for one in self.before.held.values())), says
        return says

    def _case(self, scene: Scene) -> Case:
        """Return the scene before the preemption, with the checkpoints that were known at another one."""
        saved, shift = {uid: one.saved_at for uid, one in scene.held.items()}, NOW - self.at
        nodes = fleet(node(name, gpu=gpus) for name, gpus in self.before.gpus.items())
        running = []
        for one in self.before.held.values():
            saved_at = saved.get(one.uid, one.saved_at)
            running.append(
                replace(
                    one,
                    admitted_at=one.admitted_at + shift,
                    ready_at=one.ready_at + shift if one.ready_at else None,
                    saved_at=saved_at + shift if saved_at else None,
                )
            )
            for place in one.placements:
                if place.node in self.before.gpus:
                    nodes.reserve(place.node, place.requests, place.pods)
        rules = Preemption(Within.LOWER_PRIORITY, Reclaim.NEVER)
        queue = Queue("q", quotas={CELL: Quota(self.quota)}, preemption=rules)
        tree = Tree.of([queue])
        for one in running:
            tree.add("q", one.usage)
        newcomer = gang("newcomer", role(pods=self.pods, gpu=self.gpus), queue="q", priority=5)
        snapshot = Snapshot(
            queues={"q": queue}, flavors={"any": Flavor("any")}, waiting=Backlog(), fleet=nodes, tree=tree,
            later=tree.copy(), running={"q": running}, policy=Policy(),
        )  # fmt: skip
        return Case(snapshot, newcomer)


def _nodes(one: Running) -> frozenset[str]:
    return frozenset(place.node for place in one.placements)


def _best(case: Case, lost: Work, price: Work) -> Work:
    """Return what those count for who cost least of all that make room and lose no more than so much, or that price."""
    best = price
    for count in range(1, MOST + 1):
        for some in map(list, combinations(case.snapshot.running["q"], count)):
            if _price(some) < best and _lost(some) <= lost and case.makes_room(some, at_home=False):
                best = _price(some)
    return best


def _lost(some: Sequence[Running]) -> Work:
    return total(one.lost(NOW) for one in some)


def _price(some: Sequence[Running]) -> Work:
    return total(one.price(NOW) for one in some)


def _running(row: Mapping[str, Any]) -> Running:
    places = tuple(
        Placement("worker", "any", name, pods, requests(gpu=dict(map(tuple, asked))[GPU]))
        for name, pods, asked in row["places"] or ()
    )
    gpus = sum(place.pods * dict(place.requests)[GPU] for place in places)
    saved = row["saved"]
    return Running(
        uid=row["uid"], queue="q", priority=row["priority"], submitted_at=row["submitted_at"].timestamp(),
        admitted_at=row["first_admitted_at"].timestamp() if row["first_admitted_at"] else 0.0, usage={CELL: gpus},
        placements=places, gpus=gpus, pods=sum(place.pods for place in places),
        ready_at=row["running_at"].timestamp() if row["running_at"] else None,
        saved_at=saved["at"] if saved and saved["attempt"] == row["number"] else None,
        preemptions=row["preemptions"],
    )  # fmt: skip

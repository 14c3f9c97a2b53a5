"""What one admission cycle writes, on both drivers."""

from uuid import uuid4

import pytest
from sqlalchemy.exc import IntegrityError

from queuectl.model.lifecycle import AttemptState, End, Outcome, Step, Workload, WorkloadState
from queuectl.model.plan import Admission, Placement
from queuectl.model.policy import Quota
from queuectl.model.reasons import Reason, why
from queuectl.model.resources import CARD, MAX_AMOUNT, device_name
from queuectl.store import reserve, tables
from queuectl.store.engine import Fenced
from tests.store.scene import GPU, Scene, admission, workload


async def test_admission_reserves_nodes_and_quota_and_opens_the_first_step(scene: Scene) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8, n2=8)
    await scene.quota(nominal=16)

    result = await scene.admit(admission("w1", n1=8, n2=4))

    assert [a.uid for a in result.admitted] == ["w1"]
    assert result.refused == []
    loaded = await scene.ledger.load()
    assert loaded.attempts == result.admitted
    assert loaded.attempts[0].generation == 7
    assert loaded.attempts[0].quota == {("a100", GPU): 12}
    assert loaded.attempts[0].admitted_at == 1000.0
    assert loaded.workloads == [
        Workload(
            "w1", "ns", "job-w1", "q", 0, 100.5, 1, state=WorkloadState.ACTIVE, attempt=1, first_admitted_at=1000.0
        )
    ]
    assert await scene.steps() == {"w1": Step.CREATE}
    assert (await scene.room(tables.node_room))["n1", GPU] == (8, 8, 0)
    assert (await scene.room(tables.quota_room))["q", "a100", GPU] == (16, 12, 0)
    assert [e["kind"] for e in await scene.ledger.history("w1")] == ["Admitted"]
    assert await scene.ledger.audit() == []


async def test_gangs_that_no_longer_fit_are_refused_and_the_rest_commits(scene: Scene) -> None:
    await scene.submit("first", "too-big", "unknown-node", "second", "no-quota")
    await scene.submit("elsewhere", queue="other")
    await scene.nodes(n1=8, n2=8)
    await scene.quota(nominal=12)

    result = await scene.admit(
        admission("first", n1=4),
        admission("too-big", n1=8),
        admission("unknown-node", n9=1),
        admission("never-submitted", n2=1),
        admission("elsewhere", n2=1),
        admission("second", n2=8),
        admission("no-quota", n1=1),
        admission("first", n1=1),
    )

    assert [a.uid for a in result.admitted] == ["first", "second"]
    assert result.refused == ["too-big", "unknown-node", "never-submitted", "elsewhere", "no-quota", "first"]
    assert await scene.ledger.audit() == []


async def test_a_device_has_one_holder(scene: Scene) -> None:
    first, second = device_name("gpu.example.com", "", "gpu-0"), device_name("gpu.example.com", "", "gpu-1")
    await scene.submit("w1", "w2", "w3")
    await scene.cycle(nodes={"n1": {GPU: 2, "pods": 110, first: 1, second: 1}})
    await scene.quota()

    result = await scene.admit(named("w1", first), named("w2", first), named("w3", second))

    assert [a.uid for a in result.admitted] == ["w1", "w3"]
    assert result.refused == ["w2"]
    await scene.move("w1", AttemptState.ENDING)
    assert (await scene.admit(named("w2", first))).refused == ["w2"]  # its pods may still be there
    await scene.move("w1", AttemptState.ENDED)
    assert [a.uid for a in (await scene.admit(named("w2", first))).admitted] == ["w2"]
    assert await scene.ledger.audit() == []


async def test_pods_of_a_role_on_one_node_keep_their_own_devices(scene: Scene) -> None:
    names = [device_name("gpu.example.com", "", f"gpu-{number}") for number in range(2)]
    await scene.submit("w1")
    await scene.cycle(nodes={"n1": {GPU: 2, "pods": 110, **dict.fromkeys(names, 1)}})
    await scene.quota()
    pods = [named("w1", name, first)[0].placements[0] for first, name in enumerate(names)]

    await scene.admit((Admission("w1", tuple(pods), {("a100", GPU): 2}), 7))

    assert (await scene.attempt("w1")).placements == tuple(pods)


def named(uid: str, device: str, first: int = 0) -> tuple[Admission, int]:
    """Ask for one pod with one device of n1."""
    place = Placement("worker", "a100", "n1", 1, ((device, 1), (GPU, 1), ("pods", 1)), CARD, first)
    return Admission(uid, (place,), {("a100", GPU): 1}), 7


async def test_submission_and_admission_in_one_transaction(scene: Scene) -> None:
    await scene.quota(queue="late")
    result = await scene.cycle(
        submissions=[workload("w1", queue="late")],
        nodes={"n1": {GPU: 8, "pods": 110}},
        admissions=[admission("w1", n1=8)],
    )
    assert [a.uid for a in result.admitted] == ["w1"]


async def test_a_waiting_workload_moves_to_another_queue_and_an_active_one_does_not(scene: Scene) -> None:
    await scene.submit("waiting", "active")
    await scene.nodes(n1=8)
    await scene.quota()
    await scene.admit(admission("active", n1=1))

    await scene.cycle(submissions=[workload(uid, queue="r", priority=9) for uid in ("waiting", "active")])

    assert ((w := await scene.workload("waiting")).queue, w.priority) == ("r", 9)
    assert ((w := await scene.workload("active")).queue, w.priority) == ("q", 0)


async def test_a_shrunken_node_is_in_deficit_and_takes_nothing_until_it_is_repaired(scene: Scene) -> None:
    await scene.submit("w1", "w2")
    await scene.nodes(n1=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=6))

    await scene.nodes(n1=4)
    assert (await scene.room(tables.node_room))["n1", GPU] == (4, 6, 2)
    # The GPU row is what is in deficit; a gang that asks for no GPU there may still come.
    assert (await scene.admit(admission("w2", n1=1))).refused == ["w2"]
    await scene.nodes(n1=-3)
    assert (await scene.room(tables.node_room))["n1", GPU] == (0, 6, 6)
    await scene.nodes(n1=7)
    assert (await scene.room(tables.node_room))["n1", GPU] == (7, 6, 0)
    assert (await scene.admit(admission("w2", n1=1))).refused == []
    assert await scene.ledger.audit() == []


async def test_a_cut_quota_is_in_deficit(scene: Scene) -> None:
    await scene.submit("w1", "w2")
    await scene.nodes(n1=8)
    await scene.quota(nominal=8)
    await scene.admit(admission("w1", n1=6))
    await scene.quota(nominal=4)
    assert (await scene.room(tables.quota_room))["q", "a100", GPU] == (4, 6, 2)
    assert (await scene.admit(admission("w2", n1=1))).refused == ["w2"]


async def test_rows_of_a_gone_node_stay_until_their_room_is_free(scene: Scene) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8, n2=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=8))

    await scene.cycle(nodes_gone=["n1", "n2"], queues_gone=["q"])

    assert await scene.room(tables.node_room) == {("n1", GPU): (0, 8, 8), ("n1", "pods"): (0, 1, 1)}
    assert await scene.room(tables.quota_room) == {("q", "a100", GPU): (0, 8, 8)}
    await scene.move("w1", AttemptState.ENDING, AttemptState.ENDED)
    assert await scene.room(tables.node_room) == {}
    assert await scene.room(tables.quota_room) == {}
    assert await scene.ledger.audit() == []


async def test_a_resource_that_vanishes_from_a_node_and_comes_back(scene: Scene) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=8))
    await scene.cycle(nodes={"n1": {"pods": 110}})
    assert (await scene.room(tables.node_room))["n1", GPU] == (0, 8, 8)
    await scene.nodes(n1=8)
    assert (await scene.room(tables.node_room))["n1", GPU] == (8, 8, 0)
    await scene.move("w1", AttemptState.ENDING, AttemptState.ENDED)
    assert (await scene.room(tables.node_room))["n1", GPU] == (8, 0, 0)


async def test_quota_versions_say_who_when_from_and_to(scene: Scene) -> None:
    await scene.quota(nominal=8, changed_by={"q": "alice"}, change_why={"q": "new servers"}, now=10.0)
    await scene.quota(nominal=8, changed_by={"q": "nobody"}, change_why={"q": "no reason"}, now=20.0)
    await scene.quota(nominal=4, changed_by={"q": "bob"}, now=30.0)
    await scene.cycle(queues_gone=["q"], changed_by={"q": "carol"}, now=40.0)
    await scene.cycle(queues_gone=["q"], changed_by={"q": "carol"}, now=50.0)

    versions = await scene.rows(
        "SELECT from_nominal, to_nominal, changed_by, extract(epoch FROM changed_at)::int, why FROM quota_version"
        " ORDER BY id"
    )
    assert versions == [
        (None, 8, "alice", 10, "new servers"),
        (8, 4, "bob", 30, ""),
        (4, None, "carol", 40, ""),
    ]
    events = await scene.rows("SELECT message FROM event WHERE kind = 'QuotaChanged' ORDER BY id")
    assert events[0] == ("Quota of queue q in flavor a100: nvidia.com/gpu from nothing to 8 by alice: new servers",)
    assert events[1] == ("Quota of queue q in flavor a100: nvidia.com/gpu from 8 to 4 by bob.",)


async def test_a_limit_that_changes_is_a_version_too(scene: Scene) -> None:
    cell = ("a100", GPU)
    for at, quota in enumerate([Quota(8), Quota(8, 4), Quota(8, 4, 0), Quota(8, None, 0), Quota(8, None, 0)]):
        await scene.cycle(quotas={"q": {cell: quota}}, now=float(at))
    newest_first = await scene.ledger.quota_history("q")
    limits = [
        (row["changed_at"], *(row[f"{way}_{part}"] for part in ("borrowing_limit", "lending_limit") for way in ("from", "to")))
        for row in newest_first
    ]  # fmt: skip
    assert limits == [
        (3.0, 4, None, 0, 0),
        (2.0, 4, 4, None, 0),
        (1.0, None, 4, None, None),
        (0.0, None, None, None, None),
    ]
    assert await scene.ledger.quota_history("q", limit=1) == newest_first[:1]
    assert await scene.ledger.quota_history("other") == []
    [event] = await scene.rows("SELECT message FROM event WHERE kind = 'QuotaChanged' ORDER BY id DESC LIMIT 1")
    assert event == (
        "Quota of queue q in flavor a100: nvidia.com/gpu borrowing limit from 4 to none by somebody unknown.",
    )


async def test_amounts_saturate(scene: Scene) -> None:
    await scene.submit("w1", "w2")
    await scene.nodes(n1=MAX_AMOUNT * 2)
    await scene.quota(nominal=MAX_AMOUNT)
    assert (await scene.admit(admission("w1", n1=MAX_AMOUNT))).refused == []
    assert (await scene.admit(admission("w2", n1=MAX_AMOUNT))).refused == ["w2"]
    await scene.nodes(n1=0)
    assert (await scene.room(tables.node_room))["n1", GPU] == (0, MAX_AMOUNT, MAX_AMOUNT)
    await scene.move("w1", AttemptState.ENDING, AttemptState.ENDED)
    assert await scene.ledger.audit() == []


async def test_placements_of_one_role_on_one_node_are_one_reservation(scene: Scene) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8)
    await scene.quota()
    twice = (Placement("worker", "a100", "n1", 1, ((GPU, 2),)), Placement("worker", "a100", "n1", 2, ((GPU, 2),)))
    result = await scene.admit((Admission("w1", twice, {}), 1))
    assert result.admitted[0].placements == (Placement("worker", "a100", "n1", 3, ((GPU, 2),)),)
    assert (await scene.room(tables.node_room))["n1", GPU] == (8, 6, 0)


async def test_a_transaction_takes_a_bounded_number_of_gangs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.submit("w1", "w2", "w3", "w4")
    await scene.nodes(n1=8, n2=8)
    await scene.quota()
    monkeypatch.setattr(reserve, "MAX_GANGS", 3)
    monkeypatch.setattr(reserve, "MAX_RESERVATIONS", 3)
    every = [admission("w1", n1=1), admission("w2", n1=1, n2=1), admission("w3", n1=1), admission("w4", n1=1)]
    result = await scene.admit(*every)
    assert ([a.uid for a in result.admitted], result.refused) == (["w1", "w2"], ["w3", "w4"])


async def test_nothing_to_do_needs_no_database(scene: Scene) -> None:
    result = await scene.ledger.cycle(999, plan_id=uuid4(), now=1.0)
    assert (result.admitted, result.refused) == ([], [])


async def test_a_stale_epoch_writes_nothing(scene: Scene) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8)
    await scene.quota()
    stale = scene.epoch
    successor = await Scene.open(scene.engine)
    assert successor.epoch == stale + 1

    with pytest.raises(Fenced, match=f"epoch {stale} is over"):
        await scene.admit(admission("w1", n1=8))
    with pytest.raises(Fenced):
        await scene.move("w1", AttemptState.CREATED)

    assert (await scene.room(tables.node_room))["n1", GPU] == (8, 0, 0)
    assert len((await successor.admit(admission("w1", n1=8))).admitted) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE node_room SET reserved = room + 1",
        "UPDATE node_room SET reserved = 9223372036854775807",
        "UPDATE quota_room SET reserved = room + 1",
        "UPDATE node_room SET room = room - 1 WHERE reserved = room",
        "UPDATE node_room SET reserved = reserved + 1",
        "UPDATE node_room SET reserved = -1",
        "UPDATE node_room SET room = -1",
        "UPDATE quota_room SET deficit = -1",
        "INSERT INTO attempt SELECT (jsonb_populate_record(a, '{\"number\": 2}')).* FROM attempt a",
        "INSERT INTO step (workload_uid, attempt, step, created_at, epoch) VALUES ('w1', 1, 'Create', now(), 1)",
    ],
)
async def test_postgres_itself_refuses(scene: Scene, statement: str) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=8))
    with pytest.raises(IntegrityError):
        await scene.rows(statement)


async def test_texts_that_postgres_would_refuse_are_cleaned(scene: Scene) -> None:
    await scene.submit("w1")
    await scene.nodes(n1=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=8))
    refused = why(Reason.PODS_REFUSED, pod="p", problem="NUL \0 and half \ud800")
    await scene.move("w1", AttemptState.ENDING, end=End(refused, Outcome.REQUEUE))
    told = (await scene.ledger.history("w1"))[-1]
    assert told["message"] == "The API server refused pod p: NUL  and half ?"


async def test_what_is_done_is_dropped_after_a_day_and_what_happened_stays(scene: Scene) -> None:
    await scene.submit("w1", "w2")
    await scene.nodes(n1=8)
    await scene.quota()
    await scene.admit(admission("w1", n1=1), admission("w2", n1=1))
    await scene.move("w1", AttemptState.CREATED)
    before = await scene.ledger.history("w1")
    await scene.quota(nominal=11, now=2000.0 + 23 * 3600)
    assert len(await scene.rows("SELECT id FROM step")) == 3
    await scene.quota(nominal=12, now=2000.0 + 10 * 365 * 86_400)
    assert await scene.steps() == {"w1": Step.UNGATE, "w2": Step.CREATE}
    assert len(await scene.rows("SELECT id FROM step")) == 2
    assert [e["kind"] for e in await scene.ledger.history("w1")] == [e["kind"] for e in before]
    assert await scene.ledger.audit() == []

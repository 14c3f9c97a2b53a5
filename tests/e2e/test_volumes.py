"""Gangs go where their volumes can be reached, and kube-scheduler agrees."""

from tests.support.claims import Claims
from tests.support.stage import Stage

ZONE = "topology.kubernetes.io/zone"


async def test_a_gang_goes_to_the_zone_of_its_volume_waits_for_it_and_is_bound(live: Stage, claims: Claims) -> None:
    await live.nodes(2, labels={ZONE: "a"})
    [home] = await live.nodes(1, first=2, labels={ZONE: "b"})
    await live.queue(32)
    pod = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
    await live.submit("first", 2, 4, pod=pod)
    told = await live.until_reason("first", "VolumeNotReady")
    assert "uses claim data, and it does not exist" in told["status"]["message"]

    await claims.bound("data", reach={ZONE: "b"})
    running = await live.until_phase("first", "Running")
    assert {p["spec"]["nodeName"] for p in await live.pods("first")} == {home}
    assert not [one for one in running["status"]["conditions"] if one["type"] == "PlaceUncertain"]

    await live.submit("second", 1, 8, pod=pod)
    told = await live.until_reason("second", "WaitingForNodes")
    assert "its volumes can't be reached from 2 other nodes" in told["status"]["message"]
    await live.delete_job("first")
    second = await live.until_phase("second", "Running")
    assert second["status"]["attempt"] == 1
    assert [p["spec"]["nodeName"] for p in await live.pods("second")] == [home]


async def test_claims_that_pods_make_are_bound_where_their_class_allows(live: Stage, claims: Claims) -> None:
    await live.nodes(2, labels={ZONE: "a"})
    there = await live.nodes(2, first=2, labels={ZONE: "b"})
    await live.queue(32)
    kind = await claims.storage_class(allowed={ZONE: "b"})
    for number in range(2):
        await claims.volume(f"scratch-{number}", reach={ZONE: "b"}, storage_class=kind)
    wanted = {"accessModes": ["ReadWriteOnce"], "storageClassName": kind, "resources": {"requests": {"storage": "1Gi"}}}
    volume = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": wanted}}}
    await live.submit("llm", 2, 8, pod={"volumes": [volume]})
    running = await live.until_phase("llm", "Running")
    assert {p["spec"]["nodeName"] for p in await live.pods("llm")} == set(there)
    [told] = [one["message"] for one in running["status"]["conditions"] if one["type"] == "PlaceUncertain"]
    assert "spec.roles[worker].template.spec.volumes[scratch]" in told
    assert "has only volumes that were made beforehand" in told

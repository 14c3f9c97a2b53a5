"""No livelock: after the last event a cluster comes to rest soon, and then nobody is evicted any more."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queuectl.simulate.clockwork import run
from queuectl.simulate.form import GPU, read
from queuectl.simulate.verdict import differences
from tests.core.test_invariants import Watched
from tests.support.virtual import QUEUES, clusters, jobs

LAST_EVENT = 30
REST = 300  # seconds, and so cycles, after the last event: many times the grace of all jobs


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Return a scenario: jobs come, some end, quotas and nodes change."""
    scenario = draw(clusters())
    names = [f"j{i}" for i in range(draw(st.integers(2, 10)))]
    time = st.integers(0, LAST_EVENT)
    scenario["jobs"] = [{**draw(jobs(name)), "at": draw(time)} for name in names]
    nodes = [node["name"] for node in scenario["nodes"]]
    flavor_of = {queue["name"]: queue["quotas"][0]["flavor"] for queue in scenario["queues"] if queue["quotas"]}
    event = st.one_of(
        st.fixed_dictionaries({"finish": st.sampled_from(names)}),
        st.fixed_dictionaries({"delete": st.sampled_from(names)}),
        st.fixed_dictionaries({"nodeDown": st.sampled_from(nodes)}),
        st.fixed_dictionaries({"cordon": st.sampled_from(nodes)}),
        st.just({"controllerRestart": True}),
        st.builds(
            lambda queue, nominal: {
                "setQuota": {"queue": queue, "flavor": flavor_of[queue], "resource": GPU, "nominal": nominal}
            },
            st.sampled_from(QUEUES),
            st.integers(0, 4),
        ),
        st.builds(
            lambda queue, policy: {"setStopPolicy": {"queue": queue, "stopPolicy": policy}},
            st.sampled_from(QUEUES),
            st.sampled_from(["None", "Hold", "HoldAndDrain"]),
        ),
    )
    scenario["events"] = [{**draw(event), "at": draw(time)} for _ in range(draw(st.integers(0, 6)))]
    scenario["want"] = [{"restAfter": LAST_EVENT + REST, "cycles": 100}]
    return scenario


@st.composite
def rushes(draw: st.DrawFn) -> dict[str, Any]:
    """Return a scenario in which ever more urgent jobs come while those stop who gave way to the ones before."""
    scenario = draw(clusters())
    for queue in scenario["queues"]:
        if queue["name"] in QUEUES:
            queue["preemption"] = {"withinQueue": "LowerPriority", "reclaimFromCohort": "LowerPriority"}
    favourites = draw(st.lists(st.sampled_from(QUEUES), min_size=1, max_size=2))
    scenario["jobs"] = [
        {**draw(jobs(f"j{i}")), "queue": draw(st.sampled_from(favourites)), "at": i, "priority": i // 2, "grace": 12}
        for i in range(draw(st.integers(6, 14)))
    ]
    restart = [{"at": draw(st.integers(3, 20)), "controllerRestart": True}]
    scenario["events"] = draw(st.sampled_from([[], restart]))
    scenario["want"] = [{"restAfter": LAST_EVENT + REST, "cycles": 20}]
    return scenario


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rushes())
def test_claims_are_taken_over_and_it_comes_to_rest(rush: dict[str, Any]) -> None:
    scenario = read(rush)
    result = Watched(scenario).run()
    assert differences(scenario, result) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_it_comes_to_rest_and_stays_there(history: dict[str, Any]) -> None:
    scenario = read(history)
    result = run(scenario)
    assert differences(scenario, result) == []
    # Reasons are those of the last cycle, each as of the moment when its job was looked at.
    late = [entry for entry in result.timeline if entry.at > LAST_EVENT + REST and entry.what != "Waiting"]
    assert late == []

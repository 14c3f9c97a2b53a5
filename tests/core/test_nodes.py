"""Which nodes a pod may use, against kube-scheduler's rules."""

from dataclasses import dataclass
from typing import Any

import pytest

from queuectl.core.nodes import eligible
from queuectl.model.objects import Constraints, Flavor, GpuNeed, Node, NodeTerm, Requirement, Taint, Toleration
from queuectl.model.resources import CARD
from tests.support.builders import GPU, flavor, needs, node

A100 = node("n1", labels={"gpu": "a100", "zone": "z1", "rank": "7"})
SPOT = Taint("spot", "yes", "NoSchedule")
PLAIN = Constraints()
ANY = flavor()
YES, NO = True, False


def tainted(*taints: Taint) -> Node:
    return node("n1", taints=taints)


def tolerating(*tolerations: Toleration) -> Constraints:
    return Constraints(tolerations=tolerations)


def labelled(*requirements: Requirement) -> Constraints:
    return Constraints(terms=(NodeTerm(labels=requirements),))


def named(*requirements: Requirement) -> Constraints:
    return Constraints(terms=(NodeTerm(fields=requirements),))


@dataclass(frozen=True)
class Case:
    want: bool
    node: Node = A100
    constraints: Constraints = PLAIN
    flavor: Flavor = ANY


CASES = {
    "no wishes": Case(YES),
    "a node that is not ready": Case(NO, node("n1", ready=False)),
    "a cordoned node": Case(NO, node("n1", unschedulable=True)),
    "a cordoned node, even for who tolerates everything": Case(NO, node("n1", unschedulable=True), tolerating(Toleration(operator="Exists"))),
    "labels of the flavor": Case(YES, flavor=flavor(labels={"gpu": "a100", "zone": "z1"})),
    "one label of the flavor is another": Case(NO, flavor=flavor(labels={"gpu": "h100", "zone": "z1"})),
    "a label of the flavor is absent": Case(NO, flavor=flavor(labels={"rack": "r1"})),
    "node selector": Case(YES, constraints=Constraints(selector=(("gpu", "a100"),))),
    "another value than selected": Case(NO, constraints=Constraints(selector=(("gpu", "h100"),))),
    "a selected label is absent": Case(NO, constraints=Constraints(selector=(("rack", "r1"),))),
    "In": Case(YES, constraints=labelled(needs("gpu", "In", "h100", "a100"))),
    "In, none of the values": Case(NO, constraints=labelled(needs("gpu", "In", "h100"))),
    "In, label absent": Case(NO, constraints=labelled(needs("rack", "In", "r1"))),
    "NotIn": Case(YES, constraints=labelled(needs("gpu", "NotIn", "h100"))),
    "NotIn, one of the values": Case(NO, constraints=labelled(needs("gpu", "NotIn", "h100", "a100"))),
    "NotIn, label absent": Case(YES, constraints=labelled(needs("rack", "NotIn", "r1"))),
    "Exists": Case(YES, constraints=labelled(needs("gpu", "Exists"))),
    "Exists, label absent": Case(NO, constraints=labelled(needs("rack", "Exists"))),
    "DoesNotExist": Case(YES, constraints=labelled(needs("rack", "DoesNotExist"))),
    "DoesNotExist, label present": Case(NO, constraints=labelled(needs("gpu", "DoesNotExist"))),
    "Gt": Case(YES, constraints=labelled(needs("rank", "Gt", "6"))),
    "Gt, equal": Case(NO, constraints=labelled(needs("rank", "Gt", "7"))),
    "Lt": Case(YES, constraints=labelled(needs("rank", "Lt", "+08"))),
    "Lt, equal": Case(NO, constraints=labelled(needs("rank", "Lt", "7"))),
    "Gt, label absent": Case(NO, constraints=labelled(needs("rack", "Gt", "0"))),
    "Gt, label not a number": Case(NO, constraints=labelled(needs("gpu", "Gt", "0"))),
    "Gt, bound not a number": Case(NO, constraints=labelled(needs("rank", "Gt", "six"))),
    "Gt without a bound": Case(NO, constraints=labelled(needs("rank", "Gt"))),
    "Gt with two bounds": Case(NO, constraints=labelled(needs("rank", "Gt", "1", "2"))),
    "Gt, a number as only Python writes it": Case(NO, node("n1", labels={"rank": "1_0"}), labelled(needs("rank", "Gt", "1"))),
    "Gt, label beyond 64 bits": Case(NO, node("n1", labels={"rank": str(2**63)}), labelled(needs("rank", "Gt", "1"))),
    "an operator that does not exist": Case(NO, constraints=labelled(needs("gpu", "Near", "a100"))),
    "expressions of a term must all hold": Case(NO, constraints=labelled(needs("gpu", "Exists"), needs("rack", "Exists"))),
    "terms are alternatives": Case(YES, constraints=Constraints(terms=(NodeTerm((needs("rack", "Exists"),)), NodeTerm((needs("gpu", "Exists"),))))),
    "an empty term matches nothing": Case(NO, constraints=Constraints(terms=(NodeTerm(),))),
    "an empty term beside another": Case(YES, constraints=Constraints(terms=(NodeTerm(), NodeTerm((needs("gpu", "Exists"),))))),
    "matchFields In": Case(YES, constraints=named(needs("metadata.name", "In", "n1"))),
    "matchFields In, another node": Case(NO, constraints=named(needs("metadata.name", "In", "n2"))),
    "matchFields NotIn": Case(NO, constraints=named(needs("metadata.name", "NotIn", "n1"))),
    "matchFields of a field that no node has": Case(NO, constraints=named(needs("metadata.uid", "In", "n1"))),
    "matchFields and matchExpressions must both hold": Case(NO, constraints=Constraints(terms=(NodeTerm((needs("rack", "Exists"),), (needs("metadata.name", "In", "n1"),)),))),
    "selector and affinity must both hold": Case(NO, constraints=Constraints((("gpu", "h100"),), (NodeTerm((needs("gpu", "Exists"),)),))),
    "NoSchedule": Case(NO, tainted(SPOT)),
    "NoExecute": Case(NO, tainted(Taint("spot", "yes", "NoExecute"))),
    "PreferNoSchedule": Case(YES, tainted(Taint("spot", "yes", "PreferNoSchedule"))),
    "tolerated by key and value": Case(YES, tainted(SPOT), tolerating(Toleration("spot", "Equal", "yes", "NoSchedule"))),
    "tolerated with any effect": Case(YES, tainted(SPOT), tolerating(Toleration("spot", "Equal", "yes"))),
    "another effect tolerated": Case(NO, tainted(SPOT), tolerating(Toleration("spot", "Equal", "yes", "NoExecute"))),
    "another value tolerated": Case(NO, tainted(SPOT), tolerating(Toleration("spot", "Equal", "no"))),
    "another key tolerated": Case(NO, tainted(SPOT), tolerating(Toleration("gpu", "Exists"))),
    "an empty value is a value": Case(YES, tainted(Taint("spot", "", "NoSchedule")), tolerating(Toleration("spot"))),
    "tolerated by key": Case(YES, tainted(SPOT), tolerating(Toleration("spot", "Exists"))),
    "everything tolerated": Case(YES, tainted(SPOT, Taint("gpu", "", "NoExecute")), tolerating(Toleration(operator="Exists"))),
    "everything of one effect tolerated": Case(NO, tainted(SPOT, Taint("gpu", "", "NoExecute")), tolerating(Toleration(operator="Exists", effect="NoSchedule"))),
    "tolerated for good": Case(YES, tainted(Taint("spot", "", "NoExecute")), tolerating(Toleration("spot", "Exists"))),
    "tolerated until it is evicted": Case(NO, tainted(Taint("spot", "", "NoExecute")), tolerating(Toleration("spot", "Exists", seconds=60))),
    "seconds are of no matter where nobody is evicted": Case(YES, tainted(SPOT), tolerating(Toleration("spot", "Exists", seconds=60))),
    "a numeric toleration matches nothing": Case(NO, tainted(Taint("sla", "5", "NoSchedule")), tolerating(Toleration("sla", "Gt", "5"))),
    "each taint needs a toleration": Case(NO, tainted(SPOT, Taint("gpu", "", "NoSchedule")), tolerating(Toleration("spot", "Exists"))),
    "the flavor tolerates for its pods": Case(YES, tainted(SPOT), flavor=flavor(tolerations=[Toleration("spot", "Exists")])),
    "flavor and pod tolerate together": Case(YES, tainted(SPOT, Taint("gpu", "", "NoSchedule")), tolerating(Toleration("gpu", "Exists")), flavor(tolerations=[Toleration("spot", "Exists")])),
}  # fmt: skip

WHOLE, SHARED_GPU, ONE_G, MIXED = (
    node("n1", labels=labels)
    for labels in (
        {"nvidia.com/gpu.product": "A100-SXM4-40GB", "nvidia.com/gpu.memory": "40960", "nvidia.com/gpu.replicas": "1"},
        {"nvidia.com/gpu.product": "A100-SXM4-40GB-SHARED", "nvidia.com/gpu.memory": "40960", "nvidia.com/gpu.replicas": "4"},
        {"nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb", "nvidia.com/gpu.memory": "4864", "nvidia.com/mig.strategy": "single"},
        {
            "nvidia.com/gpu.product": "A100-SXM4-40GB", "nvidia.com/gpu.memory": "40960", "nvidia.com/mig.strategy": "mixed",
            "nvidia.com/mig-3g.20gb.product": "A100-SXM4-40GB-MIG-3g.20gb", "nvidia.com/mig-3g.20gb.memory": "19968",
            "nvidia.com/mig-1g.5gb.product": "A100-SXM4-40GB-MIG-1g.5gb-SHARED", "nvidia.com/mig-1g.5gb.replicas": "2",
        },
    )
)  # fmt: skip
CPX = node("n1", labels={"amd.com/gpu.product-name": "MI300X", "amd.com/gpu.compute-memory-partition": "cpx_nps4"})
BARE = node("n1", labels={"nvidia.com/gpu.product": "A100-SXM4-40GB"})


def gpus(*resources: str, **given: Any) -> Constraints:
    return Constraints(gpu=GpuNeed(resources or (GPU,), **given))


GPUS = {
    "whole GPUs for who says nothing": Case(YES, WHOLE, gpus()),
    "shared GPUs only for who takes them": Case(NO, SHARED_GPU, gpus()),
    "shared GPUs for who takes them": Case(YES, SHARED_GPU, gpus(shared=True)),
    "who takes shared GPUs takes whole ones": Case(YES, WHOLE, gpus(shared=True)),
    "slices are no whole GPUs": Case(NO, ONE_G, gpus()),
    "nor are they shared": Case(NO, ONE_G, gpus(shared=True)),
    "slices for who asks for these": Case(YES, ONE_G, gpus(slice="1g.5gb")),
    "other slices": Case(NO, ONE_G, gpus(slice="2g.10gb")),
    "whole GPUs are no slices": Case(NO, WHOLE, gpus(slice="1g.5gb")),
    "whole GPUs beside slices": Case(YES, MIXED, gpus()),
    "slices that are a resource of their own": Case(YES, MIXED, gpus("nvidia.com/mig-3g.20gb")),
    "slices of their own that are shared": Case(NO, MIXED, gpus("nvidia.com/mig-1g.5gb")),
    "and who takes that": Case(YES, MIXED, gpus("nvidia.com/mig-1g.5gb", shared=True)),
    "a name that tells of sharing": Case(YES, SHARED_GPU, gpus("nvidia.com/gpu.shared")),
    "AMD's partitions that are a resource of their own": Case(YES, CPX, gpus("amd.com/cpx_nps4")),
    "AMD's partitions called GPUs": Case(NO, CPX, gpus("amd.com/gpu")),
    "and who asks for these": Case(YES, CPX, gpus("amd.com/gpu", slice="cpx_nps4")),
    "memory enough": Case(YES, WHOLE, gpus(min_memory=40 * 2**30)),
    "too little memory": Case(NO, WHOLE, gpus(min_memory=40 * 2**30 + 1)),
    "memory of a slice": Case(NO, MIXED, gpus("nvidia.com/mig-3g.20gb", min_memory=20 * 2**30)),
    "memory that no label tells": Case(NO, BARE, gpus(min_memory=1)),
    "and that nobody asks for": Case(YES, BARE, gpus()),
    "what is no GPU needs nothing": Case(YES, SHARED_GPU, gpus("rdma/hca", min_memory=1)),
    "a name that the flavor knows": Case(NO, WHOLE, gpus("example.com/a100", min_memory=41 * 2**30), flavor(gpus={"example.com/a100": CARD})),
    "less than a card by the flavor's word": Case(NO, BARE, gpus(), flavor(gpus={GPU: CARD // 4})),
    "and who takes shared ones": Case(YES, BARE, gpus(shared=True), flavor(gpus={GPU: CARD // 4})),
    "slices that the flavor weighs": Case(YES, ONE_G, gpus(slice="1g.5gb"), flavor(gpus={GPU: CARD // 7})),
}  # fmt: skip


@pytest.mark.parametrize("case", GPUS.values(), ids=GPUS.keys())
def test_whose_gpus_a_pod_may_use(case: Case) -> None:
    assert eligible(case.node, case.flavor, case.constraints) is case.want


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_who_may_use_a_node(case: Case) -> None:
    assert eligible(case.node, case.flavor, case.constraints) is case.want

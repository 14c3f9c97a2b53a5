"""Devices that claims can name: which ones nodes have, and whose they are beside the attempts that hold them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import structlog

from queuectl.core.elastic import keys
from queuectl.core.fleet import Fleet
from queuectl.model.devices import DeviceClaim, Inventory, Slice, inventory
from queuectl.model.lifecycle import Attempt, AttemptKey, AttemptState, active
from queuectl.model.objects import Flavor, Node
from queuectl.model.plan import PodKey
from queuectl.model.resources import is_device, total

MAX_NAMES = 1024  # of devices, over all nodes; like nodes have the same. Each is a column of the fleet.

log = structlog.get_logger()

Pool = tuple[str, str]  # driver, name
Key = TypeVar("Key")
_Used = list[tuple[str, tuple[tuple[str, int], ...]]]  # node, requests


class Devices:
    """What ResourceSlices and ResourceClaims say, joined with nodes and flavors in a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        """Start with none."""
        self._fleet = fleet
        self._nodes: dict[str, Node] = {}
        self._flavors: dict[str, Flavor] = {}  # those with devices
        self._slices: dict[str, dict[str, Slice]] = {}  # by node and name
        self._homes: dict[Pool, dict[str, str]] = {}  # by name of each slice, the node that it is of
        self._found: dict[str, Inventory] = {}  # by node
        self._names: set[str] = set()  # of devices that there have been
        self._claims: dict[str, DeviceClaim] = {}  # by uid
        self._in_pool: dict[Pool, set[str]] = {}  # claims that have devices of it
        self._of: dict[AttemptKey, set[str]] = {}  # claims of ours
        self._held: dict[AttemptKey, frozenset[tuple[str, str]]] = {}  # node, device that an attempt holds
        self._counted: dict[str, _Used] = {}  # by claim, what is counted as others'

    def on_node(self, name: str, node: Node | None) -> None:
        """Take in a changed node, or one that is gone."""
        if node is None:
            self._nodes.pop(name, None)
            self._found.pop(name, None)
            self._fleet.remove_node(name)
            return
        self._nodes[name] = node
        self._fleet.set_node(self._joined(node))
        self._recount_on(name)

    def on_slice(self, old: Slice | None, new: Slice | None) -> set[str]:
        """Take in a changed ResourceSlice; return the nodes that changed with it."""
        if old is not None:
            self._slices.get(old.node, {}).pop(old.name, None)
            self._homes.get((old.driver, old.pool), {}).pop(old.name, None)
        if new is not None:
            self._slices.setdefault(new.node, {})[new.name] = new
            self._homes.setdefault((new.driver, new.pool), {})[new.name] = new.node
        both = [one for one in (old, new) if one is not None]
        return self._refit({one.node for one in both}, {(one.driver, one.pool) for one in both})

    def on_flavor(self, old: Flavor | None, new: Flavor | None) -> set[str]:
        """Take in a changed flavor; return the nodes that changed with it."""
        if old is not None:
            self._flavors.pop(old.name, None)
        if new is not None and new.devices is not None:
            self._flavors[new.name] = new
        concerned = any(flavor is not None and flavor.devices is not None for flavor in (old, new))
        return self._refit(self._nodes) if concerned else set()

    def on_claim(self, old: DeviceClaim | None, new: DeviceClaim | None) -> set[str]:
        """Take in a changed ResourceClaim; return the nodes whose room changed with it."""
        if old is not None:
            self._claims.pop(old.uid, None)
            _discard(self._of, (old.workload, old.attempt), old.uid)
            for device in old.devices:
                _discard(self._in_pool, (device.driver, device.pool), old.uid)
        if new is not None:
            self._claims[new.uid] = new
            for device in new.devices:
                self._in_pool.setdefault((device.driver, device.pool), set()).add(new.uid)
            if new.workload:
                self._of.setdefault((new.workload, new.attempt), set()).add(new.uid)
        return self._recount({one.uid for one in (old, new) if one is not None})

    def hold(self, attempt: Attempt, *, ended: bool = False) -> set[str]:
        """Take in what devices an attempt holds now; return the nodes whose room changed with it."""
        key, placements = attempt.key, () if ended else attempt.held
        held = frozenset((p.node, name) for p in placements for name, _ in p.requests if is_device(name))
        if held == self._held.get(key, frozenset()):
            return set()
        self._held[key] = held
        if not held:
            del self._held[key]
        return self._recount(self._of.get(key, set()))

    def identities(self, node: str) -> Mapping[str, tuple[str, str]]:
        """Return by name what selects each device of a node: an attribute and its value."""
        return self._found.get(node, Inventory()).identities

    def allocated(self, attempt: Attempt, besides: Collection[PodKey] = ()) -> bool:
        """Tell whether claims of pods that an attempt gives up still have devices, ``besides`` those pods."""
        mine = [self._claims[uid] for uid in self._of.get(attempt.key, ())]
        return any(claim.devices for claim in _given_up(attempt, mine) if (claim.role, claim.index) not in besides)

    def orphans(self, attempts: Mapping[str, Attempt]) -> list[DeviceClaim]:
        """Return claims of ours that nobody needs any more. ``attempts``: the active ones, by workload."""
        found: list[DeviceClaim] = []
        for key, claims in self._of.items():
            attempt = active(attempts, key)
            mine = [claim for one in claims if not (claim := self._claims[one]).deleting]
            found += _given_up(attempt, mine) if attempt is not None else mine
        return found

    def _joined(self, node: Node) -> Node:
        """Return the node with the devices that flavors are about; what a kubelet says of these does not count."""
        mine = [f for f in self._flavors.values() if all(node.labels.get(key) == value for key, value in f.node_labels)]
        if not mine:
            self._found.pop(node.name, None)
            return node
        found = inventory(node.name, [*self._slices.get(node.name, {}).values()], mine)
        if len(self._names | found.identities.keys()) > MAX_NAMES:
            log.warning("devices not used: there are too many names", node=node.name, most=MAX_NAMES)
            found = Inventory()
        self._names |= found.identities.keys()
        self._found[node.name] = found
        none = {flavor.devices.resource: 0 for flavor in mine if flavor.devices}
        amounts = total([none, *({device.name: 1, device.resource: 1} for device in found.devices)])
        gpus = node.gpus if node.gpus.model else found.gpus
        return replace(node, allocatable={**node.allocatable, **amounts}, devices=found.devices, gpus=gpus)

    def _refit(self, names: Iterable[str], pools: Iterable[Pool] = ()) -> set[str]:
        """Look at nodes anew, and at claims in pools of which they have devices, or had."""
        changed = {name for name in names if name in self._nodes}
        for name in changed:
            self._fleet.set_node(self._joined(self._nodes[name]))
            self._recount_on(name)
        self._recount({uid for pool in pools for uid in self._in_pool.get(pool, ())})
        return changed

    def _recount_on(self, node: str) -> None:
        pools = {(one.driver, one.pool) for one in self._slices.get(node, {}).values()}
        self._recount({uid for pool in pools for uid in self._in_pool.get(pool, ())})

    def _recount(self, uids: Iterable[str]) -> set[str]:
        """Count claims as others' but for what the attempt of each holds anyway; return the nodes concerned."""
        changed: set[str] = set()
        for uid in uids:
            before, now = self._counted.get(uid, []), self._of_others(self._claims.get(uid))
            if before == now:
                continue
            for sign, used in ((-1, before), (+1, now)):
                for node, requests in used:
                    self._fleet.use(node, requests, sign)
                    changed.add(node)
            self._counted[uid] = now
            if not now:
                del self._counted[uid]
        return changed

    def _of_others(self, claim: DeviceClaim | None) -> _Used:
        if claim is None:
            return []
        held = self._held.get((claim.workload, claim.attempt), frozenset())
        nodes: dict[str, list[dict[str, int]]] = {}
        for allocated in claim.devices:
            for node in set(self._homes.get((allocated.driver, allocated.pool), {}).values()):
                device = self._found.get(node, Inventory()).names.get(allocated)
                if device is not None and (node, device.name) not in held:
                    nodes.setdefault(node, []).append(
                        {device.name: 1} | ({} if claim.implied else {device.resource: 1})
                    )
        return [(node, tuple(sorted(total(parts).items()))) for node, parts in sorted(nodes.items())]


def _discard(sets: dict[Key, set[str]], key: Key, uid: str) -> None:
    sets.get(key, set()).discard(uid)
    if not sets.get(key):
        sets.pop(key, None)


def _given_up(attempt: Attempt, claims: Iterable[DeviceClaim]) -> list[DeviceClaim]:
    if not claims:
        return []
    stay = set() if attempt.state is AttemptState.ENDING else set(keys(attempt.placements, attempt.done))
    if attempt.state is AttemptState.REPAIRING:  # those of the pods in their stead have the same names
        stay -= attempt.coming
    return [claim for claim in claims if (claim.role, claim.index) not in stay]

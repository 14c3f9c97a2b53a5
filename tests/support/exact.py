"""An exact answer to whether a gang fits, by integer programming, and a check of every promise of a placement."""

from collections.abc import Callable, Sequence
from itertools import groupby, product

import highspy

from queuectl.core.nodes import eligible
from queuectl.model.objects import Flavor, Node, Role, Together
from queuectl.model.plan import Placement
from queuectl.model.resources import ALONE, is_alone, is_gpu, total

Domain = tuple[str, ...] | None
Key = Callable[[Node], Domain]
Used = Sequence[tuple[str, tuple[tuple[str, int], ...], int]]  # node, requests, pods


class _Program:
    """Pods of each role on each node as integers."""

    def __init__(self, nodes: Sequence[Node], roles: Sequence[Role], flavor: Flavor, used: Used) -> None:
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.silent()
        self._nodes = nodes
        self._pods = {
            (r.name, n.name): self._solver.addIntegral(lb=0, ub=r.pods if eligible(n, flavor, r.constraints) else 0)
            for r, n in product(roles, nodes)
        }
        for role in roles:
            self._solver.addConstr(sum(self._pods[role.name, node.name] for node in nodes) == role.pods)
        for node in nodes:
            for resource in {resource for role in roles for resource, _ in role.requests}:
                asked = sum(self._pods[role.name, node.name] * dict(role.requests).get(resource, 0) for role in roles)
                self._solver.addConstr(asked <= _free(node, resource, used))

    def one_domain(self, roles: Sequence[Role], key: Key) -> None:
        """Ask for all pods of the roles in one domain."""
        homes = {domain: self._solver.addBinary() for domain in {key(node) for node in self._nodes} - {None}}
        self._solver.addConstr(sum(homes.values()) + self._solver.addIntegral(lb=0, ub=0) == 1)
        for role, node in product(roles, self._nodes):
            home = homes.get(key(node))
            pods = self._pods[role.name, node.name]
            self._solver.addConstr(pods <= (0 if home is None else home * role.pods))

    def whole_slices(self, role: Role, key: Key) -> None:
        """Ask for each slice of the role in one domain."""
        for domain in {key(node) for node in self._nodes}:
            inside = sum(self._pods[role.name, node.name] for node in self._nodes if key(node) == domain)
            most = 0 if domain is None else role.pods
            self._solver.addConstr(inside == self._solver.addIntegral(lb=0, ub=most) * role.topology.slice_size)

    def solvable(self) -> bool:
        """Tell whether there is a solution."""
        self._solver.run()
        return bool(self._solver.getModelStatus() == highspy.HighsModelStatus.kOptimal)


def _free(node: Node, resource: str, used: Used) -> int:
    there = ALONE if is_alone(resource) else node.allocatable.get(resource, 0)
    return there - sum(dict(asked).get(resource, 0) * pods for name, asked, pods in used if name == node.name)


def fits(nodes: Sequence[Node], roles: Sequence[Role], flavor: Flavor, together: Together, used: Used = ()) -> bool:
    """Tell whether all pods have a place on these nodes beside what is used of them."""
    program = _Program(nodes, roles, flavor, used)
    for role in roles:
        if role.topology.required:
            program.one_domain([role], _level(flavor, role.topology.required))
        if role.topology.slice_level:
            program.whole_slices(role, _level(flavor, role.topology.slice_level))
    if together.required:
        program.one_domain(_with_gpus(roles) or roles, _level(flavor, together.required))
    for key in _alike(together):
        program.one_domain(_with_gpus(roles), key)
    return program.solvable()


def broken(
    nodes: Sequence[Node],
    roles: Sequence[Role],
    flavor: Flavor,
    together: Together,
    placed: Sequence[Placement],
    *,
    used: Used = (),
) -> list[str]:
    """Return what a placement promises and does not keep."""
    by_name = {node.name: node for node in nodes}
    where = {role.name: {p.node: p.pods for p in placed if p.role == role.name} for role in roles}
    problems = [f"{role.name} has {sum(where[role.name].values())} pods" for role in roles
                if sum(where[role.name].values()) != role.pods]  # fmt: skip
    for name, there in groupby(sorted(placed, key=lambda p: p.node), key=lambda p: p.node):
        asked = total({resource: n * p.pods for resource, n in p.requests} for p in there)
        problems += [f"{name} is over" for r, n in asked.items() if n > _free(by_name[name], r, used)]
    needs = {role.name: role.constraints for role in roles}
    problems += [f"{p.role} on {p.node}" for p in placed if not eligible(by_name[p.node], flavor, needs[p.role])]

    def homes(of: Sequence[Role], key: Key) -> dict[Domain, int]:
        return total({key(by_name[node]): count} for role in of for node, count in where[role.name].items())

    for role in roles:
        topology = role.topology
        if topology.required:
            seen = homes([role], _level(flavor, topology.required))
            problems += [f"{role.name} is in {list(seen)}"] if len(seen) != 1 or None in seen else []
        if topology.slice_level:
            seen = homes([role], _level(flavor, topology.slice_level))
            cut = None in seen or any(count % topology.slice_size for count in seen.values())
            problems += [f"slices of {role.name} are cut: {seen}"] if cut else []
    if together.required:
        seen = homes(_with_gpus(roles) or roles, _level(flavor, together.required))
        problems += [f"the gang is in {list(seen)}"] if len(seen) != 1 or None in seen else []
    problems += ["GPUs differ" for key in _alike(together) if len(homes(_with_gpus(roles), key)) > 1]
    return problems


def _level(flavor: Flavor, level: str) -> Key:
    """Return what tells the domain of a node; None if it has no label for the level."""
    names = [one.name for one in flavor.levels]

    def key(node: Node) -> Domain:
        if level not in names:
            return (node.name,)
        values = [node.labels.get(one.label) for one in flavor.levels[: names.index(level) + 1]]
        # A node without the label of a wider level is in a domain of its own there.
        return None if values[-1] is None else tuple(value or f"only {node.name}" for value in values)

    return key


def _alike(together: Together) -> list[Key]:
    keys: list[tuple[bool, Key]] = [
        (together.same_model, lambda node: (node.gpus.model,)),
        (together.same_driver, lambda node: (node.gpus.driver,)),
    ]
    return [key for asked, key in keys if asked]


def _with_gpus(roles: Sequence[Role]) -> list[Role]:
    return [role for role in roles if any(is_gpu(resource) for resource, _ in role.requests)]

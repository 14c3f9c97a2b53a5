"""Quotas over a tree of queues: what is kept of it is as if it were worked out anew."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.tree import Tree
from queuectl.model.objects import Queue
from queuectl.model.policy import Quota

CELL = ("any", "gpu")
NAMES = ["top", "mid", "a", "b", "c", "other"]
amounts = st.integers(1, 5)
usages = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "other"]), amounts, st.booleans()), max_size=12)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    def queue(name: str, parent: str = "") -> Queue:
        lends = draw(st.sampled_from([None, 0, 2]))
        quota = Quota(draw(st.integers(0, 6)), lending_limit=lends if parent else None)
        return Queue(name, parent, quotas={CELL: quota}, weight=Fraction(draw(st.integers(0, 3))))

    parents = {"mid": "top", "a": "mid", "b": "mid", "c": "top"}
    return Tree.of(queue(name, parents.get(name, "")) for name in NAMES)


def use(tree: Tree, usage: list[tuple[str, int, bool]]) -> None:
    """Count some amounts, and stop counting those that do not last."""
    for name, amount, _ in usage:
        tree.add(name, {CELL: amount})
        assert all(node.share() == node.share_of(node.usage) for node in tree.nodes.values())
    for name, amount, lasts in reversed(usage):
        if not lasts:
            tree.remove(name, {CELL: amount})
            assert all(node.share() == node.share_of(node.usage) for node in tree.nodes.values())


@given(trees(), usages, usages, st.sampled_from(NAMES))
def test_a_view_has_what_is_used_and_keeps_its_own_to_itself(
    tree: Tree, usage: list[tuple[str, int, bool]], more: list[tuple[str, int, bool]], first: str
) -> None:
    use(tree, usage)
    for other in (tree.view(), tree.copy()):
        used = {name: dict(node.usage) for name, node in tree.nodes.items()}
        assert other.nodes[first].root is other.nodes[other.tops[first]]
        assert {name: node.usage for name, node in other.nodes.items()} == used
        use(other, more)
        assert {name: node.usage for name, node in tree.nodes.items()} == used
        assert all(node is other.nodes[name] for name, node in other.nodes.items())
        assert all(child.parent is node for node in other.nodes.values() for child in node.children)

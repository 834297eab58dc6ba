"""The prefix cache as a radix tree: an edge is a run of tokens, a node knows the pages they lie in.

Edges begin and end at any token, also inside a page. Two branches that part inside a page have a
page each for it: the second one's request copied the common rows before it went its own way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from stepscope.engine.kv import PagePool
from stepscope.engine.prefix import MISS, Hit, Prefixed


class Node:
    """Tokens start..end of a sequence. pages: those that hold them, the first maybe from before
    `start` on, the last maybe not full; a neighbour on the same path may keep the same page."""

    __slots__ = ("children", "pages", "parent", "start", "tokens")

    def __init__(
        self, parent: Node | None, start: int, tokens: list[int], pages: list[int]
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.pages = pages
        self.children: dict[int, Node] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class RadixTree:
    """Nodes in the order of their last use; a node always comes before its parent."""

    def __init__(self, pool: PagePool) -> None:
        self.version = 0
        self._pool = pool
        self._root = Node(None, 0, [], [])
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def look(self, request: Prefixed) -> Hit:
        size = self._pool.page_size
        pages: list[int] = []
        tokens = 0
        for node, count in self._walk(request.tokens, len(request.tokens) - 1):
            tokens = node.start + count
            first = node.start // size
            # A child's page holds the rows of the parent's last one too, and more.
            pages[first:] = node.pages[: -(-tokens // size) - first]
        rows = tokens % size
        if not tokens:
            return MISS
        return Hit(tokens, pages[: tokens // size], pages[-1] if rows else None, rows)

    def use(self, request: Prefixed) -> Hit:
        """Splits at the end of the hit and at that of its last full page, so that what was used
        and what requests hold is exactly a row of nodes."""
        hit = self.look(request)
        if hit.tokens:
            last = self._cut(request.tokens, hit.tokens)
            self._cut(request.tokens, hit.tokens - hit.rows)
            self._touch(last)
        return hit

    def store(self, request: Prefixed, computed: int, pages: Sequence[int]) -> None:
        node, known = self._root, 0
        for node, count in self._walk(request.tokens, computed):
            known = node.start + count
        if known < computed:
            node = self._cut(request.tokens, known)
            node = self._append(node, request.tokens[known:computed], pages)
            self.version += 1
        self._touch(node)

    def in_use(self, hit: Hit) -> int:
        return sum(self._pool.refs[page] > 0 for page in hit.pages)

    def evict(self, count: int) -> int:
        """Nodes in use stay in the tree as long as others can give way."""
        before, looked = self._pool.free, 0
        spare_used = True
        while self._pool.free - before < count and self._order and self._pool.idle:
            node = next(iter(self._order))
            if spare_used and any(self._pool.refs[page] for page in node.pages):
                self._touch(node)  # in use is recently used
                looked += 1
                spare_used = looked <= len(self._order)
                continue
            self._shorten(node, count - (self._pool.free - before))
        return self._pool.free - before

    def clear(self) -> None:
        while self._order:
            leaf = next(iter(self._order))
            self._shorten(leaf, len(leaf.pages))

    def _walk(self, tokens: list[int], most: int) -> Iterator[tuple[Node, int]]:
        """Nodes along the first `most` tokens, and how many of each one's tokens are met."""
        node, depth = self._root, 0
        while depth < most:
            child = node.children.get(tokens[depth])
            if child is None:
                return
            count = common(child.tokens, tokens, depth, most)
            yield child, count
            if count < len(child.tokens):
                return
            node, depth = child, depth + count

    def _cut(self, tokens: list[int], depth: int) -> Node:
        """The node that ends after `depth` of these tokens, all of which are in the tree."""
        node = self._root
        for node, count in self._walk(tokens, depth):
            if count < len(node.tokens):
                return self._split(node, count)
        return node

    def _split(self, lower: Node, count: int) -> Node:
        """A new parent takes the first tokens. Both keep the page in which they part."""
        size, parent = self._pool.page_size, lower.parent
        first, middle = lower.start // size, lower.start + count
        kept = lower.pages[: -(-middle // size) - first]
        upper = Node(parent, lower.start, lower.tokens[:count], kept)
        if middle % size:
            self._pool.keep(kept[-1])
        lower.pages = lower.pages[middle // size - first :]
        lower.tokens = lower.tokens[count:]
        lower.start, lower.parent = middle, upper
        upper.children[lower.tokens[0]] = lower
        assert parent is not None
        parent.children[upper.tokens[0]] = upper
        self._order[upper] = None
        self._touch(upper)
        return upper

    def _append(self, node: Node, tokens: list[int], pages: Sequence[int]) -> Node:
        """Tokens after the node's: in the node itself where it only grew, else in a new child."""
        size, start = self._pool.page_size, node.end
        first, last = start // size, -(-(start + len(tokens)) // size)
        new = list(pages[first:last])
        grows = node.parent is not None and not node.children
        if grows and start % size and node.pages[-1] != new[0]:
            grows = False
        if grows:
            new = new[1:] if start % size else new
            node.tokens += tokens
            node.pages += new
        else:
            child = Node(node, start, tokens, new)
            node.children[tokens[0]] = child
            self._order[child] = None
            node = child
        for page in new:
            self._pool.keep(page)
        return node

    def _touch(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            self._order.move_to_end(node)
            node = node.parent

    def _shorten(self, leaf: Node, pages: int) -> None:
        """Drop its last `pages` pages and what lies in them, the whole leaf if nothing is left."""
        assert leaf.parent is not None and not leaf.children
        size, left = self._pool.page_size, max(len(leaf.pages) - pages, 0)
        end = (leaf.start // size + left) * size
        if end <= leaf.start:
            left = 0
            del leaf.parent.children[leaf.tokens[0]]
            del self._order[leaf]
        for page in leaf.pages[left:]:
            self._pool.drop(page)
        del leaf.pages[left:]
        del leaf.tokens[max(end - leaf.start, 0) :]
        self.version += 1


def common(edge: list[int], tokens: list[int], depth: int, most: int) -> int:
    """How many of the edge's tokens are tokens[depth:most] too. Compares in slices, which is C."""
    low, high = 0, min(len(edge), most - depth)
    if edge[:high] == tokens[depth : depth + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[depth + low : depth + middle]:
            low = middle
        else:
            high = middle
    return low

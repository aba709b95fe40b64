"""Chooses the values to keep for the backward pass, by a minimum cut.

A value is either kept, at the cost of its bytes, or recomputed from values that are kept or
recomputed, too. The cheapest choice is a minimum cut between the inputs and the operands of the
derivatives. The cut recomputes the values that a person would choose (the normalized values of a
LayerNorm, the chain of a GELU, a softmax from its scores) without a rule for any of them.

An *opaque* step is never recomputed. The *level* of a value is the number of contractions and
opaque steps before it; see `graph.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .graph import Graph, Role, Step, StepKind, Value

# scipy computes flows in 32-bit integers, so costs are scaled until the bytes of all values fit.
_INFINITE = 2**28
_TOTAL = 2**26

# A reduction to an eighth of its operand or less is always kept, such as the statistics of a norm
# or the sums of a softmax. Its recomputation costs a pass over the operand and saves few bytes.
_SMALL = 8

# The number of bisection steps over the price of recomputation. Each step solves one flow, and ten
# steps find the price to a thousandth of its range.
_SEARCH = 10


@dataclasses.dataclass(frozen=True)
class Cut:
    """The values that are kept, and the values that are recomputed.

    Args:
        kept: The kept values, also parameters and inputs, which are in memory anyway.
        recomputed: The values that the backward pass computes again.
        wanted: The values that derivatives read.
    """

    kept: frozenset[Value]
    recomputed: frozenset[Value]
    wanted: frozenset[Value]

    @property
    def nbytes(self) -> int:
        """The bytes of the kept values that are not in memory anyway."""
        return _fresh(self.kept)

    @property
    def declared_nbytes(self) -> int:
        """The bytes of all values that derivatives read, which JAX keeps without a cut."""
        return _fresh(self.wanted)


def _fresh(values: frozenset[Value]) -> int:
    return sum(v.nbytes for v in values if v.role is Role.FRESH)


def cut_of(graph: Graph, share: float = 0.0) -> Cut:
    """Returns the cut of a graph.

    Args:
        graph: The graph.
        share: The share of `Cut.declared_nbytes` that may be kept; the cut then recomputes as few
            bytes as possible. At 0, it keeps as few bytes as possible.
    """
    networks = [_Network(graph, strict) for strict in (True, False)]
    cuts = [network.cut(0.0) for network in networks]
    least, network = min(zip(cuts, networks, strict=True), key=lambda pair: pair[0].nbytes)
    budget = share * least.declared_nbytes
    if least.nbytes >= budget:
        return least
    # Bisects a price on each recomputed byte: a higher price keeps more. At a price of 1 nothing is
    # recomputed, because to keep a value then costs no more than to recompute it.
    low, high, best = 0.0, 1.0, least
    for _ in range(_SEARCH):
        price = (low + high) / 2
        found = network.cut(price)
        if found.nbytes <= budget:
            low, best = price, found
        else:
            high = price
    return best


class _Network:
    """The flow network of a graph: two nodes for each value, joined by an edge of the value's cost.

    A value with consumers before and after a contraction, such as the residual stream, must not be
    recomputed after the contraction: the chain of sums to recompute would grow with each layer. The
    exact condition (kept for all consumers, or recomputed before the contraction and unread after
    it) is a constraint over three nodes, which a cut cannot express. There are two approximations.
    A strict network always keeps such a value; the other network counts its bytes twice. Neither is
    better for all programs: at level ``"o1"`` the strict network keeps 26.6 MB of a GPT and the
    other 26.8 MB; of a ResNet they keep 8.9 and 7.9 MB.

    Args:
        graph: The graph.
        strict: Whether values with consumers after a contraction are always kept.
    """

    def __init__(self, graph: Graph, strict: bool) -> None:
        self.number = {v: i for i, v in enumerate(graph.values)}
        self.source, self.sink = 2 * len(self.number), 2 * len(self.number) + 1
        self.behind: dict[Value, int] = {}
        self.unit = max(1.0, sum(v.nbytes for v in self.number) / _TOTAL)
        self.wanted = {v: None for step in graph.steps for v in step.reads}
        # JAX keeps the operands that the derivative of an opaque step reads. Steps in the user's
        # `keep_scopes` are opaque, too.
        self.forced = {v: None for s in graph.steps if s.kind is StepKind.OPAQUE for v in s.reads}
        self.fixed = _fixed(graph, strict)
        self.edges = self._edges(graph.steps)

    def _edges(self, steps: Sequence[Step]) -> list[tuple[int, int, int]]:
        edges = []
        for v, i in self.number.items():
            edges.append((2 * i, 2 * i + 1, self._cost(v)))
            if v in self.fixed or v in self.forced:
                edges.append((self.source, 2 * i, _INFINITE))
        edges += [(2 * self.number[v] + 1, self.sink, _INFINITE) for v in self.wanted]
        for step in steps:
            made = [self.number[v] for v in step.results if v not in self.fixed]
            given = {self._given(x, step) for x in step.values}
            edges += [(i, 2 * k, _INFINITE) for k in made for i in given]
        edges += [(self.source, i, self._cost(v)) for v, i in self.behind.items()]
        return edges

    def _cost(self, v: Value) -> int:
        # A value that is in memory anyway costs 1 and not 0, so that of two cuts with equal bytes
        # the one with fewer arrays is cheaper.
        if v.role is Role.PARAM or (v.producer is None and v.is_stored):
            return 1
        return max(2, round(v.nbytes / self.unit))

    def _given(self, v: Value, step: Step) -> int:
        """Returns the node from which an edge leads from an operand to the results of a step."""
        if step.level == v.level or v in self.fixed or v.is_stored:
            return 2 * self.number[v] + 1
        # A step on a later level can read the value only if it is kept, not if it is recomputed. So
        # the value has a second node for such steps, with its own cost.
        return self.behind.setdefault(v, self.sink + 1 + len(self.behind))

    def cut(self, price: float) -> Cut:
        """Returns the minimum cut at a cost of ``price`` kept bytes for each recomputed byte."""
        # Imported here, because the import is slow and most programs plan no residuals.
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        edges = list(self.edges)
        if price:
            edges += [
                (self.source, 2 * i, round(price * v.nbytes / self.unit) + 1)
                for v, i in self.number.items()
                if v not in self.fixed and v not in self.forced
            ]
        # Without arrays there are no edges.
        rows, columns, costs = np.array(edges, np.int64).reshape(-1, 3).T
        shape = (self.sink + 1 + len(self.behind),) * 2
        capacity = csr_matrix((costs, (rows, columns)), shape=shape)  # adds up parallel edges
        capacity.data = np.minimum(capacity.data, _INFINITE).astype(np.int32)
        flow = maximum_flow(capacity, self.source, self.sink).flow
        # `needed` holds the nodes that reach the sink by edges with capacity left. Of all minimum
        # cuts, this cut is the nearest to the consumers and recomputes least.
        residual = (capacity - flow).T.tocsr()
        residual.eliminate_zeros()
        needed = set(breadth_first_order(residual, self.sink, return_predecessors=False).tolist())
        kept = [v for v, i in self.number.items() if 2 * i + 1 in needed and 2 * i not in needed]
        again = [v for v, i in self.number.items() if 2 * i in needed]
        behind = {v for v, i in self.behind.items() if i in needed}
        kept = behind.union(kept, self.forced)
        return Cut(frozenset(kept), frozenset(again) - kept, frozenset(self.wanted))


def _fixed(graph: Graph, strict: bool) -> set[Value]:
    """Returns the values that are never recomputed: they are kept if a derivative needs them."""
    fixed = {v for v in graph.values if not _is_run_again(v.producer)}
    for step in graph.steps:
        # Even a network that is not strict keeps a value if a derivative on a later level reads it.
        read = step.values if strict else step.reads
        fixed |= {v for v in read if step.level > v.level and not v.is_stored}
    return fixed


def _is_run_again(step: Step | None) -> bool:
    """Returns whether a step is cheap and not a reduction to a small result, see `_SMALL`."""
    if step is None or step.kind not in (StepKind.CHEAP, StepKind.FLOATING):
        return False
    largest = max((v.nbytes for v in step.values), default=0)
    return "reduces" not in step.words or step.results[0].nbytes * _SMALL > largest

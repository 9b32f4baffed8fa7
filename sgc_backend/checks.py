"""Checks of sizes that Dynamo writes into a graph, of which those that can't fail are taken out.

Of a dimension that was marked as unbacked Dynamo knows nothing, so it has the graph check that it is not negative: no
tensor's is. Checks are the host's work, at each call, and would be cuts.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from .facts import example
from .forms import expression


def drop_checks_that_hold(gm: fx.GraphModule) -> None:
    """Take the checks out of ``gm`` that a dimension of an input is not negative.

    What torch knows of the sizes says nothing of whether a check holds: it learned it from that check.
    """
    inputs = [example(node) for node in gm.graph.find_nodes(op="placeholder")]
    sizes = {expression(n) for t in inputs if isinstance(t, torch.Tensor) for n in t.shape}
    certain = {sympy.Ge(size, 0) for size in sizes if isinstance(size, sympy.Symbol)}
    checks = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    found = [n for n in checks if isinstance(n.args[0], fx.Node) and expression(example(n.args[0])) in certain]
    for node in found:
        gm.graph.erase_node(node)
    if found:
        gm.recompile()

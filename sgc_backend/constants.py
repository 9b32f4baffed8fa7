"""Tensors that a graph makes of Python numbers, made once when it is compiled.

``torch.tensor([1, 2], device="cuda")`` copies from host memory, which a recording can't. What it makes is always the
same, so the graph gets a copy of a tensor that is made beforehand; a copy, because it may write to it.
"""

from __future__ import annotations

import torch
from torch import fx

from .facts import example


def lift_constants(gm: fx.GraphModule, device_type: str) -> None:
    """Replace what makes tensors on ``device_type`` of numbers alone by copies of attributes of ``gm``."""
    found = [node for node in gm.graph.nodes if _makes_constant(node, device_type)]
    for number, node in enumerate(found):
        like, name = example(node), f"_sgc_constant_{number}"
        data = node.args[1] if node.op == "call_method" else node.args[0]
        with torch.inference_mode(False), torch.no_grad():
            gm.register_buffer(name, torch.tensor(data, dtype=like.dtype, device=like.device), persistent=False)
        with gm.graph.inserting_before(node):
            made = gm.graph.get_attr(name)
            copy = gm.graph.call_method("clone", (made,))
        made.meta = {"example_value": like}
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        gm.graph.erase_node(node)
    if found:
        gm.recompile()


def _makes_constant(node: fx.Node, device_type: str) -> bool:
    maker = (
        node.target in (torch.tensor, torch.as_tensor) if node.op == "call_function" else node.target == "new_tensor"
    )
    if node.op not in ("call_function", "call_method") or not maker:
        return False
    data = node.args[int(node.op == "call_method") :]
    like = example(node)
    of_nodes: list[fx.Node] = []
    fx.node.map_arg(data, of_nodes.append)
    return (
        len(data) == 1
        and not of_nodes
        and type(like) is not torch.nn.Parameter
        and isinstance(like, torch.Tensor)
        and like.device.type == device_type
        and not like.requires_grad
    )

import operator

import pytest
import torch
from torch import fx

from sgc_backend.sole_call import sole_call


def graph_of(build, inputs=2):
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"x{k}") for k in range(inputs)]
    graph.output(build(graph, *placeholders))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_an_op_alone_is_called_with_what_its_placeholders_are_bound_to():
    gm = graph_of(lambda g, a, b: (g.call_function(torch.sub, (b, a), {"alpha": 2}),))
    a, b = torch.tensor([1.0]), torch.tensor([5.0])
    call = sole_call(gm, [a, b])
    assert call() == gm(a, b)[0] == torch.tensor([3.0])
    b.fill_(7)
    assert call() == torch.tensor([5.0])


def test_a_keyword_may_be_a_placeholder():
    gm = graph_of(lambda g, a, b: (g.call_function(torch.add, (a, 1), {"out": b}),))
    out = torch.zeros(1)
    assert sole_call(gm, [torch.ones(1), out])() is out
    assert out.item() == 2


def test_an_op_whose_result_nobody_wants_is_called_too():
    def build(graph, a, b):
        graph.call_function(torch.Tensor.copy_, (a, b))
        return ()

    a = torch.zeros(1)
    sole_call(graph_of(build), [a, torch.ones(1)])()
    assert a.item() == 1


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g, a, b: (g.call_function(torch.neg, (g.call_function(torch.add, (a, b)),)),), id="two ops"
        ),
        pytest.param(lambda g, a, b: (g.call_function(torch.cat, ([a, b],)),), id="a list of arguments"),
        pytest.param(lambda g, a, b: (g.call_function(operator.getitem, (a, slice(0, 1))),), id="a slice"),
        pytest.param(lambda g, a, b: (a, g.call_function(torch.add, (a, b))), id="an argument returned as well"),
        pytest.param(lambda g, a, b: (g.call_method("add", (a, b)),), id="a method"),
    ],
)
def test_any_other_graph_is_left_to_itself(build):
    assert sole_call(graph_of(build), [torch.ones(1), torch.ones(1)]) is None

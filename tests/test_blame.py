import logging

import pytest
import torch
from torch import Tensor

from sgc_backend import emulated, sgc_piecewise
from sgc_backend.blame import blamed


@torch.library.custom_op("sgc_blame::reads", mutates_args=())
def reads(x: Tensor) -> Tensor:
    return x * float(x.sum().item())


@torch.library.custom_op("sgc_blame::harmless", mutates_args=())
def harmless(x: Tensor) -> Tensor:
    return x + 1


@torch.library.custom_op("sgc_blame::breaks", mutates_args=())
def breaks(x: Tensor) -> Tensor:
    if BROKEN:
        raise ZeroDivisionError
    return x + 1


BROKEN = []
for op in (reads, harmless, breaks):
    op.register_fake(torch.empty_like)


def model(x):
    return torch.ops.sgc_blame.reads(torch.ops.sgc_blame.harmless(x * 2)) - 1


@torch.no_grad()
def test_a_custom_op_that_breaks_a_capture_is_named_and_the_advice_helps(caplog):
    x = torch.randn(4)
    options = {"inner": "eager", "device_module": emulated}
    call = torch.compile(model, backend=sgc_piecewise, options=options)
    with caplog.at_level(logging.WARNING, "sgc_backend"):
        for _ in range(3):
            assert torch.equal(call(x), model(x))
    (said,) = [record.getMessage() for record in caplog.records if "can't be captured" in record.getMessage()]
    assert "that was in sgc_blame::reads: with cut_ops=['sgc_blame::reads'] it runs eagerly" in said
    torch._dynamo.reset()
    caplog.clear()
    advised = {**options, "cut_ops": ["sgc_blame::reads"], "strict": True}
    call = torch.compile(model, backend=sgc_piecewise, options=advised)
    for _ in range(4):
        assert torch.equal(call(x), model(x))
    assert not [record for record in caplog.records if record.name.startswith("sgc_backend")]


def made(compiler):
    """What a compiler makes of a graph with two custom ops, and the graph."""
    found = []

    def backend(gm, example_inputs):
        found.append(gm)
        return torch._dynamo.lookup_backend(compiler)(gm, example_inputs) if compiler else gm.forward

    def two(x):
        return torch.ops.sgc_blame.breaks(torch.ops.sgc_blame.harmless(x))

    return torch.compile(two, backend=backend), found


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@torch.no_grad()
def test_the_op_is_found_in_code_that_a_compiler_wrote(compiler):
    call, found = made(compiler)
    x = torch.randn(4)
    call(x)
    BROKEN.append(True)
    try:
        with pytest.raises(ZeroDivisionError) as raised:
            call(x)
    finally:
        BROKEN.clear()
    assert blamed(raised.value, found[0]) == "sgc_blame::breaks"


@torch.no_grad()
def test_nothing_is_named_where_no_custom_op_was_called():
    call, found = made(None)
    call(torch.randn(4))
    assert blamed(ValueError(), found[0]) is None
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) + torch.ones(3)
    assert blamed(raised.value, found[0]) is None

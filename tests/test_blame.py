import logging

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.wrap import wrap

from sgc_backend import FullCudaGraphBackend, TcPiecewiseCudaGraphBackend, emulated, explain, sgc_piecewise
from sgc_backend.blame import blamed
from sgc_backend.errors import StrictError
from sgc_backend.recorders import recorders

RAN, BROKEN = [], []


def custom_op(name):
    def register(body):
        op = torch.library.custom_op(f"sgc_blame::{name}", body, mutates_args=())
        op.register_fake(torch.empty_like)
        return op

    return register


@custom_op("reads")
def reads(x: Tensor) -> Tensor:
    RAN.append("reads")
    return x * float(x.sum().item())


@custom_op("asks")
def asks(x: Tensor) -> Tensor:
    if emulated.is_current_stream_capturing():
        raise NotImplementedError("not while capturing")
    return x + 2


@custom_op("harmless")
def harmless(x: Tensor) -> Tensor:
    return x + 1


@custom_op("short_of_memory")
def short_of_memory(x: Tensor) -> Tensor:
    if emulated.is_current_stream_capturing():
        raise torch.OutOfMemoryError("none left")
    return x + 1


@custom_op("breaks")
def breaks(x: Tensor) -> Tensor:
    if BROKEN:
        raise ZeroDivisionError
    return x + 1


@custom_op("reads_when_small")
def reads_when_small(x: Tensor) -> Tensor:
    return x * (float(x.sum().item()) if x.shape[0] <= 4 else 2.0)


FAULTS, REPLAYED = [], []


@custom_op("fails")
def fails(x: Tensor) -> Tensor:
    if emulated.is_current_stream_capturing():
        FAULTS[0]()
    return x + 1


@custom_op("replays")
def replays(x: Tensor) -> Tensor:
    wrapper, buffer, reads = REPLAYED
    if reads:
        x.sum().item()
    buffer.copy_(x)
    return wrapper.replay(4).clone()


OPS = torch.ops.sgc_blame


def one(x):
    return OPS.reads(OPS.harmless(x * 2)) - 1


def two(x):
    return OPS.asks(one(x) * 3) - OPS.harmless(x)


def compiled(fn, **more):
    options = {"inner": "eager", "device_module": emulated, **more}
    return torch.compile(fn, backend=sgc_piecewise, options=options)


@pytest.fixture(autouse=True)
def earlier():
    return set(recorders())


def graphs(earlier):
    """Those that the test made, in order."""
    made = (r for r in set(recorders()) - earlier if r.kind == "compiled")
    return sorted(made, key=lambda r: int(r.name.split()[1]))


def reasons(graph):
    return [cut.reason.rule for group in graph.split.cuts for cut in group.cuts]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("fn", [one, two])
@torch.no_grad()
def test_an_op_that_a_capture_fails_in_is_cut_from_then_on(fn, inner, caplog, earlier):
    call = compiled(fn, inner=inner)
    for k in range(12):
        x = torch.randn(4)
        RAN.clear()
        with caplog.at_level(logging.WARNING, "sgc_backend"):
            assert torch.equal(call(x), fn(x))
        # each call runs it once, and a recording that fails in it begins it once more
        assert len(RAN) in ((2, 3) if k < 6 else (2,)), k
    last = graphs(earlier)[-1]
    assert sum(last.counters.replayed.values()) >= 4
    if inner == "eager":  # compiled pieces can't be looked into on the emulated device
        failed = {"one": 1, "two": 2}[fn.__name__]
        assert reasons(last) == ["capture_failed"] * failed
        said = [r.getMessage() for r in caplog.records if "takes the calls to come" in r.getMessage()]
        assert len(said) == failed
        assert "a capture failed in sgc_blame::reads" in "".join(said)
        assert "a capture failed in sgc_blame.reads" in str(explain(call, torch.randn(4)))


@pytest.mark.gpu
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@torch.no_grad()
def test_on_a_gpu_too_an_op_that_a_capture_fails_in_is_cut_from_then_on(inner, earlier):
    options = {"inner": inner, "device_module": torch.cuda}
    call = torch.compile(one, backend=sgc_piecewise, options=options)
    for _ in range(8):
        x = torch.randn(64, device="cuda")
        torch.testing.assert_close(call(x), one(x))
    first, last = graphs(earlier)
    assert not first.counters.replayed
    assert sum(last.counters.replayed.values()) >= 4
    assert reasons(last) == ["capture_failed"]
    torch.randn(4, device="cuda")  # the generator is as it was


@torch.no_grad()
def test_a_replay_by_key_is_recorded_with_the_op_cut():
    x = torch.randn(5, 4)
    wrapper = TcPiecewiseCudaGraphBackend(two, capture_sizes=(4, 2), options={"inner": "eager"}, device_module=emulated)
    with wrapper.capture_session():
        for n in (4, 2):
            held = x[:n]
            wrapper.capture_one(n, lambda held=held: wrapper.compiled(held))
    for n in (2, 4, 2):
        x.normal_()
        assert torch.equal(wrapper.replay(n), two(x[:n]))
    wrapper.cleanup()


@pytest.mark.parametrize("ops", [["sgc_blame::reads"], ["sgc_blame::reads.default"]])
@torch.no_grad()
def test_an_op_that_the_user_wants_captured_is_not_cut(ops, earlier):
    call = compiled(one, capturable_ops=ops)
    for _ in range(8):
        x = torch.randn(4)
        assert torch.equal(call(x), one(x))
    (graph,) = graphs(earlier)
    assert not graph.counters.replayed
    assert graph.counters.failures


@torch.no_grad()
def test_strict_raises_and_cuts_nothing(earlier):
    call = compiled(one, strict=True)
    call(torch.randn(4))
    for _ in range(2):
        with pytest.raises((StrictError, RuntimeError), match="capture"):
            call(torch.randn(4))
    assert len(graphs(earlier)) == 1


@torch.no_grad()
def test_want_of_memory_is_no_ops_fault(earlier):
    def model(x):
        return OPS.short_of_memory(x * 2) - 1

    call = compiled(model)
    for _ in range(4):
        x = torch.randn(4)
        assert torch.equal(call(x), model(x))
    assert len(graphs(earlier)) == 1


def runs_short():
    raise MemoryError


def runs_short_behind():
    try:
        raise torch.OutOfMemoryError("none left")
    except torch.OutOfMemoryError as error:
        raise RuntimeError("the kernel failed") from error


def runs_short_meanwhile():
    try:
        raise torch.OutOfMemoryError("none left")
    except torch.OutOfMemoryError:
        raise RuntimeError("the kernel failed")  # noqa: B904  # as an op may raise it


@pytest.mark.parametrize("fault", [runs_short, runs_short_behind, runs_short_meanwhile])
@torch.no_grad()
def test_want_of_memory_that_an_op_reports_in_its_own_words_is_not_its_fault(fault, earlier):
    def model(x):
        return OPS.fails(x * 2) - 1

    FAULTS[:] = [fault]
    call = compiled(model)
    for _ in range(4):
        x = torch.randn(4)
        assert torch.equal(call(x), model(x))
    assert len(graphs(earlier)) == 1


@pytest.mark.parametrize("lane", [None, "its own"])
@pytest.mark.parametrize("reads", [False, True])
@torch.no_grad()
def test_an_op_that_replays_recordings_itself_goes_on_running(reads, lane, earlier):
    buffer = torch.zeros(4)
    wrapper = FullCudaGraphBackend(device_module=emulated, lane=lane)
    with wrapper.capture_session():
        wrapper.capture_one(4, lambda: buffer * 3)
    REPLAYED[:] = [wrapper, buffer, reads]

    def model(x):
        return OPS.replays(x * 2) - 1

    call = compiled(model)
    for _ in range(6):
        x = torch.randn(4)
        assert torch.equal(call(x), model(x))
    # Cut, it replays within the replay of what is around it, which one pool can't.
    assert any(graph.counters.replayed for graph in graphs(earlier)) == (lane is not None)
    REPLAYED.clear()
    wrapper.cleanup()


def small(x):
    return OPS.reads_when_small(x + 1) - 1


def sized(n):
    x = torch.randn(n, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


@torch.no_grad()
def test_what_was_recorded_before_a_capture_failed_goes_on_being_replayed(earlier):
    call = compiled(small, pad="never")
    for n in (8, 8, 4, 4, 8, 4, 4, 4, 8):
        x = sized(n)
        assert torch.equal(call(x), small(x))
    first, after = graphs(earlier)
    assert [sum(g.counters.captured.values()) for g in (first, after)] == [1, 1]
    assert [sum(g.counters.replayed.values()) for g in (first, after)] == [3, 2]
    assert reasons(after) == ["capture_failed"]


@torch.no_grad()
def test_a_call_that_waited_while_another_graph_took_over_goes_there(earlier):
    call = compiled(small, pad="never")
    for n in (8, 8, 4, 4):
        call(sized(n))
    first, after = graphs(earlier)
    before = dict(first.counters.uncaptured), sum(after.counters.uncaptured.values())
    x = torch.randn(16, 4)
    args = [16 if i.kind == "size" else x for i in first.inputs]
    key = first._key(args)
    (out,) = first._cold(key, key, args)
    assert torch.equal(out, small(x))
    assert dict(first.counters.uncaptured) == before[0]
    assert sum(after.counters.uncaptured.values()) == before[1] + 1


@torch.no_grad()
def test_keys_captured_before_one_that_failed_are_replayed_as_well():
    x = torch.randn(17, 4)
    settings = {"capture_sizes": (16, 8, 4, 2), "options": {"inner": "eager"}, "device_module": emulated}
    wrapper = TcPiecewiseCudaGraphBackend(small, strict=True, **settings)
    with wrapper.capture_session():
        wrapper._run_compile_pass(lambda n: (x[:n],))  # strict: it is one compilation
    for n in (16, 4, 8, 2, 16):
        x.normal_()
        assert torch.equal(wrapper.replay(n), small(x[:n]))
    wrapper.cleanup()


@torch.no_grad()
def test_what_a_wrapper_released_is_forgotten_where_another_graph_took_over(earlier):
    x = torch.randn(17, 4)
    wrapper = TcPiecewiseCudaGraphBackend(
        small, capture_sizes=(16, 4), options={"inner": "eager"}, device_module=emulated
    )
    with wrapper.capture_session():
        wrapper._run_compile_pass(lambda n: (x[:n],))
    first, _ = graphs(earlier)
    assert first.plans
    wrapper.release()
    assert torch.equal(wrapper.compiled(x[:16]), small(x[:16]))
    assert not first.plans  # or each call would look at it in vain
    with wrapper.capture_session():
        wrapper._run_compile_pass(lambda n: (x[:n],))
    x.normal_()
    assert torch.equal(wrapper.replay(16), small(x[:16]))
    wrapper.cleanup()


@torch.no_grad()
def test_a_graph_that_takes_python_floats_is_split_again(earlier):
    def model(x, scale):
        return OPS.reads(x * scale) + scale

    call = compiled(model)
    for _ in range(4):
        for scale in (2.5, 3.5, 4.5):
            x = torch.randn(4)
            assert torch.equal(call(x, scale), model(x, scale))
    last = graphs(earlier)[-1]
    assert reasons(last) == ["capture_failed"]
    assert len(last.counters.replayed) == 3
    assert any("scale" in i.label for i in last.inputs)  # what the user calls it is known still


@torch.no_grad()
def test_what_holds_the_op_is_cut_as_a_whole(earlier):
    def model(x):
        return wrap(lambda y: OPS.reads(y + 1) * 2, x * 3) - 1

    call = compiled(model)
    for _ in range(5):
        x = torch.randn(4)
        assert torch.equal(call(x), model(x))
    last = graphs(earlier)[-1]
    assert reasons(last) == ["capture_failed"]
    assert last.counters.replayed


@torch.no_grad()
def test_an_explanation_tells_of_the_graph_that_takes_over(earlier):
    text = str(explain(compiled(one), torch.randn(4)))
    _, after = graphs(earlier)
    assert f"{after.name}, which cuts it, takes the calls to come" in text
    assert "a capture failed in sgc_blame.reads" in text


@torch.no_grad()
def test_ops_listed_in_cut_ops_never_fail(caplog):
    call = compiled(two, cut_ops=["sgc_blame::reads", "sgc_blame::asks"], strict=True)
    for _ in range(4):
        x = torch.randn(4)
        assert torch.equal(call(x), two(x))
    assert not [record for record in caplog.records if record.name.startswith("sgc_backend")]


def made(compiler):
    """What a compiler makes of a graph with two custom ops, and the graph."""
    found = []

    def backend(gm, example_inputs):
        found.append(gm)
        return torch._dynamo.lookup_backend(compiler)(gm, example_inputs) if compiler else gm.forward

    return torch.compile(lambda x: OPS.breaks(OPS.harmless(x)), backend=backend), found


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
    assert blamed(raised.value, found) == "sgc_blame::breaks"


@torch.no_grad()
def test_nothing_is_named_where_no_custom_op_was_called():
    call, found = made(None)
    call(torch.randn(4))
    assert blamed(ValueError(), found) is None
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) + torch.ones(3)
    assert blamed(raised.value, found) is None

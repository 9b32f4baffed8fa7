"""What the emulated device forbids in a capture, what that leaves behind, and opaque launches."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from test_emulated import _fresh, capturing, record

from sgc_backend import emulated as dev

__all__ = ["_fresh"]


@torch.library.custom_op("sgc_emulated_test::split_at", mutates_args=())
def split_at(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sums up to each of ``ends``, which the body reads on the host."""
    return torch.stack([x[: int(end)].sum() for end in ends.tolist()])


def invalidate(pool, stream):
    """A capture that fails at a sync."""
    graph = dev.CUDAGraph()
    with dev.stream(stream):
        graph.capture_begin(pool)
        with pytest.raises(dev.EmulatedCaptureError, match="not permitted when stream is capturing"):
            torch.ones(2).sum().item()
        with pytest.raises(dev.EmulatedCaptureError, match=r"invalidated.*_local_scalar_dense"):
            graph.capture_end()
    return graph


# -- opaque launches ---------------------------------------------------------------------------------------------------


def test_opaque_keeps_mutation_and_aliasing():
    def fn(args):
        cache, x, n = args
        args.clear()
        cache.add_(x)
        fresh = x * n
        return [cache[1:], fresh, fresh[:1], x, None, n]

    fn._boxed_call = True
    cache, x = torch.zeros(3), torch.ones(3)
    given = [cache, x, 4]
    step = dev.opaque(fn)
    assert step._boxed_call
    graph, (tail, fresh, head, same, nothing, n) = record(lambda: step(given))
    assert given == [], "a boxed callable takes its arguments"
    assert torch.equal(cache, torch.zeros(3)) and same is x and nothing is None and n == 4
    assert tail.data_ptr() == cache[1:].data_ptr() and head.data_ptr() == fresh.data_ptr()
    graph.replay()
    x.fill_(2)
    graph.replay()
    assert torch.equal(cache, torch.full((3,), 3.0)) and torch.equal(fresh, torch.full((3,), 8.0))
    assert head.item() == 8 and graph.num_nodes == 1


def test_opaque_keeps_the_sign_that_views_are_read_with():
    def fn(z, w):
        return z.conj(), w * 1, (z * 2).conj(), w.imag

    z = torch.randn(4, dtype=torch.complex64)
    w = torch.randn(4, dtype=torch.complex64)
    graph, out = record(lambda: dev.opaque(fn)(z, w.conj()))
    for _ in range(2):
        z.copy_(torch.randn(4, dtype=torch.complex64))
        w.copy_(torch.randn(4, dtype=torch.complex64))
        graph.replay()
        for got, wanted in zip(out, fn(z, w.conj()), strict=True):
            assert (got.is_conj(), got.is_neg()) == (wanted.is_conj(), wanted.is_neg())
            assert torch.equal(got, wanted)


def test_opaque_puts_the_generator_back_and_draws_at_replay():
    step = dev.opaque(lambda x: x + torch.rand(3))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    graph, out = record(lambda: step(torch.zeros(3)))
    graph.replay()
    assert torch.equal(out, expected)


def test_opaque_code_may_count_from_the_begin_of_its_arguments_storages():
    def fn(x, y):
        x.as_strided((2,), (1,), 1).add_(1)  # the offset is the storage's, and not the tensor's
        return x.untyped_storage().nbytes(), x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()

    def whole():
        other, x = torch.zeros(600), torch.zeros(4)
        step(x[2:], x)
        step(x, other)
        return x

    seen = []
    step = dev.opaque(lambda *args: seen.append(fn(*args)))
    graph, result = record(whole)
    graph.replay()
    assert result.tolist() == [0, 2, 2, 0]
    assert seen[2:] == [(16, True), (16, False)]


def test_opaque_without_a_capture_is_the_function():
    assert dev.opaque(lambda x: x + 1)(torch.ones(1)).item() == 2


def test_compiled_code_is_recorded_through_opaque():
    compiled = dev.opaque(torch.compile(lambda x, y: (x * y).relu() + 1, backend="aot_eager"))
    x, y = torch.randn(4), torch.randn(4)
    with torch.no_grad():
        compiled(x, y)
        graph, out = record(lambda: compiled(x * 1, y) * 2)
        x.neg_()
        graph.replay()
    assert torch.equal(out, ((x * y).relu() + 1) * 2) and graph.num_nodes == 3


# -- what a capture forbids, and what that leaves behind ---------------------------------------------------------------


MASK = torch.tensor([True, False, True])
FORBIDDEN = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(MASK),
    "index by mask": lambda x: x[MASK],
    "write by mask": lambda x: x.index_put_((MASK,), torch.zeros(2)),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "tolist in a custom op": lambda x: split_at(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
    "synchronize": lambda x: dev.synchronize(),
    "stream synchronize": lambda x: dev.current_stream().synchronize(),
    "event synchronize": lambda x: dev.current_stream().record_event().synchronize(),
    "query": lambda x: dev.current_stream().query(),
    "outside event": lambda x: dev.current_stream().wait_stream(dev.Stream()),
    "nested capture": lambda x: dev.CUDAGraph().capture_begin(),
    "replay": lambda x: record_before.replay(),
}
record_before: dev.CUDAGraph


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_operations_raise_and_invalidate(what, inference):
    global record_before
    x, graph = torch.ones(3), dev.CUDAGraph()
    record_before, _ = record(lambda: x + 1)
    with torch.inference_mode(inference), dev.stream(dev.Stream()):
        graph.capture_begin()
        with pytest.raises(dev.EmulatedCaptureError, match="operation not permitted when stream is capturing"):
            FORBIDDEN[what](x)
        with pytest.raises(dev.EmulatedCaptureError, match="previous error"):
            x + 1
        with pytest.raises(dev.EmulatedCaptureError, match="invalidated"):
            graph.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    assert not dev.is_current_stream_capturing()


def test_masked_write_of_one_value_is_permitted():
    x = torch.ones(3)

    def fn():
        x[MASK] = 5.0

    graph, _ = record(fn)
    graph.replay()
    assert x.tolist() == [5, 1, 5]


def test_an_op_that_takes_more_than_its_run_on_fake_tensors_is_recorded():
    x, w, ends = torch.randn(8, 16), torch.randn(3, 16, 32), torch.tensor([2, 5, 8], dtype=torch.int32)
    try:
        torch._grouped_mm(x, w, offs=ends)
    except RuntimeError as error:
        pytest.skip(f"this torch has no such op: {error}")
    graph, out = record(lambda: torch._grouped_mm(x * 2, w, offs=ends) + 1)
    for given in ([2, 5, 8], [1, 1, 8]):
        x.normal_()
        ends.copy_(torch.tensor(given))
        graph.replay()
        torch.testing.assert_close(out, torch._grouped_mm(x * 2, w, offs=ends) + 1)


def test_nested_capture_on_another_stream_of_the_thread_is_refused():
    graph = dev.CUDAGraph()
    with pytest.raises(dev.EmulatedCaptureError, match="invalidated"), capturing(graph):
        other = dev.stream(dev.Stream())
        with pytest.raises(dev.EmulatedCaptureError, match="inside of a capture"), other:
            dev.CUDAGraph().capture_begin()


def test_invalidated_capture_poisons_and_is_recovered_from():
    pool, stream = dev.graph_pool_handle(), dev.Stream()
    keeper = record(lambda: torch.zeros(1), pool, stream)[0]
    noisy = record(lambda: torch.rand(2), pool, stream)[0]
    failed = invalidate(pool, stream)
    failed.reset()
    assert not dev.random_usable()
    with pytest.raises(dev.EmulatedCaptureError, match="Offset increment outside graph capture"):
        noisy.replay()
    with dev.stream(stream), pytest.raises(dev.EmulatedCaptureError, match="already recording to mempool_id"):
        dev.CUDAGraph().capture_begin(pool)
    elsewhere = dev.allocate_to_pool(dev.graph_pool_handle())
    with pytest.raises(dev.EmulatedCaptureError, match="Offset increment"), elsewhere:
        torch.rand(1)
    keeper.reset()
    noisy.reset()
    dev.empty_cache()
    assert dev.memory_reserved() > 0, "the failed capture still claims the pool"

    dev.end_allocate_to_pool(0, pool)
    dev.release_pool(0, pool)
    dev.recover_generator()
    assert dev.random_usable() and dev.memory_reserved() == 0
    graph, out = record(lambda: torch.rand(3), pool, stream)
    graph.replay()
    assert not out.isnan().any()


def test_random_op_is_refused_in_a_capture_after_a_failed_one_and_an_empty_capture_cures():
    invalidate(dev.graph_pool_handle(), dev.Stream())
    graph = dev.CUDAGraph()
    with capturing(graph), pytest.raises(dev.EmulatedCaptureError, match="Offset increment"):
        torch.rand(1)
    assert dev.random_usable()
    record(lambda: torch.rand(1))


def test_python_exception_is_clean():
    pool, stream, graph = dev.graph_pool_handle(), dev.Stream(), dev.CUDAGraph()
    with pytest.raises(ZeroDivisionError), capturing(graph, pool, stream):
        torch.zeros(2)
        raise ZeroDivisionError
    assert dev.random_usable() and graph.num_nodes == 1
    with pytest.raises(RuntimeError, match="broadcast"), capturing(dev.CUDAGraph(), pool, stream):
        torch.zeros(2) + torch.zeros(3)
    record(lambda: torch.rand(2), pool, stream)[0].replay()


def test_default_stream_and_used_graphs_are_refused():
    with pytest.raises(dev.EmulatedCaptureError, match="non-default stream"):
        dev.CUDAGraph().capture_begin()
    dev.recover_generator()
    graph, _ = record(lambda: torch.zeros(1))
    with dev.stream(dev.Stream()):
        with pytest.raises(RuntimeError, match="already owns"):
            graph.capture_begin()
        with pytest.raises(RuntimeError, match="without a capture_begin"):
            graph.capture_end()
        with pytest.raises(ValueError, match="capture_error_mode"):
            dev.CUDAGraph().capture_begin(capture_error_mode="any")


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_synchronize_of_another_thread(mode):
    graph, raised = dev.CUDAGraph(), []

    def other():
        try:
            dev.synchronize()
        except dev.EmulatedCaptureError as error:
            raised.append(error)

    expected = pytest.raises(dev.EmulatedCaptureError) if mode == "global" else contextlib.nullcontext()
    with expected, capturing(graph, mode=mode):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(raised) == (mode == "global")

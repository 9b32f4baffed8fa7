import pytest
import torch
from torch import nn

import sgc_backend
from sgc_backend import FullCudaGraphBackend, sgc_piecewise
from sgc_backend.config import batch_sizes
from sgc_backend.driver import driver
from sgc_backend.recorders import recorders

pytestmark = pytest.mark.gpu
WIDTH = 256


def captured(fn):
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        fn()
    return graph


def filled(n, value=1.0):
    return torch.full((n, WIDTH), value, device="cuda")


def test_the_same_kernels_on_other_sizes_are_alike():
    a, b = filled(8), filled(64)
    one, two = captured(lambda: a.mul_(2)), captured(lambda: b.mul_(2))
    assert driver().signature(one.raw_cuda_graph()) == driver().signature(two.raw_cuda_graph())


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x: x.mul_(2).mul_(2), id="one kernel more"),
    ],
)
def test_other_work_is_not_alike(other):
    x = filled(8)
    one, two = captured(lambda: x.mul_(2)), captured(lambda: other(x))
    assert driver().signature(one.raw_cuda_graph()) != driver().signature(two.raw_cuda_graph())


def test_other_kernels_that_are_launched_alike_are_alike():
    x = filled(8)
    one, two = captured(lambda: x.mul_(2)), captured(lambda: x.exp_())
    assert driver().signature(one.raw_cuda_graph()) == driver().signature(two.raw_cuda_graph())


def test_matrix_products_that_are_alike_come_out_right_through_one_executable():
    """cuBLAS picks another kernel for another size, and launches some in clusters, which an update does not change."""
    calls, stream = driver(), torch.cuda.current_stream().cuda_stream
    wide = nn.Linear(2048, 6144, bias=False, device="cuda", dtype=torch.bfloat16)
    narrow = nn.Linear(6144, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
    groups = {}
    for n in batch_sizes(2048):
        x = torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)

        def work(x=x, out=out):
            out.copy_(narrow(torch.relu(wide(x))))

        with torch.no_grad():
            work()
            graph = captured(work)
            work()
        groups.setdefault(calls.signature(graph.raw_cuda_graph()), []).append((graph, out, out.clone(), x))
    assert None not in groups
    assert 1 < len(groups) < len(batch_sizes(2048))
    for members in groups.values():
        executable = calls.instantiate(members[0][0].raw_cuda_graph())
        for graph, out, expected, _ in members + members[::-1] + members[::3] + members[::2]:
            out.zero_()
            assert calls.update(executable, graph.raw_cuda_graph())
            assert calls.launch(executable, stream) == 0
            torch.cuda.synchronize()
            assert torch.equal(out, expected)
        calls.destroy(executable)


def test_an_executable_does_what_each_graph_says_in_turn():
    calls, stream = driver(), torch.cuda.current_stream().cuda_stream
    a, b = filled(8), filled(64)
    one, two = captured(lambda: a.mul_(3)), captured(lambda: b.mul_(3))
    a.fill_(1)
    b.fill_(1)
    executable = calls.instantiate(one.raw_cuda_graph())
    assert calls.launch(executable, stream) == 0
    assert calls.update(executable, two.raw_cuda_graph())
    assert calls.launch(executable, stream) == 0
    assert calls.update(executable, one.raw_cuda_graph())
    assert calls.launch(executable, stream) == 0
    torch.cuda.synchronize()
    calls.destroy(executable)
    assert (a == 9).all()
    assert (b == 3).all()


class Model(nn.Module):
    """Two pieces around a cut, in each size the same kernels."""

    def __init__(self, drops):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.5 if drops else 0.0)

    def forward(self, x):
        y = torch.ops.aten.cumsum.default(self.norm(x) * 2, 0)
        return self.drop(torch.relu(y) + 1)


def compiled(drops=False, shares=True):
    model = Model(drops).cuda().train(drops)
    options = {"inner": "eager", "cut_ops": [torch.ops.aten.cumsum.default], "capture_sizes": None}
    options["share_executables"] = shares
    call = torch.compile(model, backend=sgc_piecewise, dynamic=True, options=options)
    return model, call


@torch.no_grad()
def test_the_sizes_of_a_piece_share_an_executable_and_stay_right():
    before = set(recorders())
    model, call = compiled()
    sizes = [64, 32, 128, 96]
    for _ in range(2):
        for n in sizes:
            call(torch.randn(n, WIDTH, device="cuda"))
    (graph,) = set(recorders()) - before
    plans = [plan for by_address in graph.plans.values() for plan in by_address]
    assert len(plans) == len(sizes)
    used = [{id(plan.graphs[k].executable) for plan in plans} for k in range(2)]
    assert [len(ids) for ids in used] == [1, 1]
    assert used[0].isdisjoint(used[1])  # a piece's may still run when the next one is launched
    for n in [*sizes, *reversed(sizes), 64, 64, 32]:
        x = torch.randn(n, WIDTH, device="cuda")
        assert torch.equal(call(x), model(x))
    plans[0].release()
    for n in (32, 128):
        x = torch.randn(n, WIDTH, device="cuda")
        assert torch.equal(call(x), model(x))
    plan = plans[1]
    sgc_backend.reset()
    assert plan.pool.executables.alive == 0


@torch.no_grad()
def test_each_size_has_an_executable_of_its_own_where_nobody_asks():
    before = set(recorders())
    _, call = compiled(shares=False)
    for n in (64, 64, 32, 32):
        call(torch.randn(n, WIDTH, device="cuda"))
    (graph,) = set(recorders()) - before
    plans = [plan for by_address in graph.plans.values() for plan in by_address]
    assert len(plans) == 2
    assert all(type(one) is torch.cuda.CUDAGraph for plan in plans for one in plan.graphs)
    assert plans[0].pool.executables.alive == 0


@torch.no_grad()
def test_pieces_that_draw_random_numbers_keep_to_torchs_replay():
    before = set(recorders())
    _, call = compiled(drops=True)
    x = torch.randn(64, WIDTH, device="cuda")
    results = [call(x) for _ in range(8)]
    (graph,) = set(recorders()) - before
    assert graph.counters.replayed
    assert not any(torch.equal(a, b) for k, a in enumerate(results) for b in results[:k])
    torch.cuda.manual_seed(3)
    first = [call(x) for _ in range(4)]
    torch.cuda.manual_seed(3)
    assert all(torch.equal(a, call(x)) for a in first)


def test_a_replay_inside_a_capture_of_the_users_own_is_refused():
    backend = FullCudaGraphBackend()
    x = filled(8)
    with backend.capture_session():
        backend.capture_one(8, lambda: x * 2)
    for _ in range(4):
        backend.replay(8)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(sgc_backend.NestedReplayError, match="not ours"), torch.cuda.graph(graph):
        x.add_(0)
        backend.replay(8)
    assert (backend.replay(8) == 2).all()
    backend.cleanup()

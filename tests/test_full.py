"""FullCudaGraphBackend: recordings by key, replays, refusals."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import sgc_backend
from sgc_backend import FullCudaGraphBackend, NotCapturedError, ShapeKey, emulated
from sgc_backend.errors import CaptureError, OptionError
from sgc_backend.pools import pool_of

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])


def module(device: str) -> Any:
    return torch.cuda if device == "cuda" else emulated


@device
def test_every_key_replays_its_own_size_in_any_order(device: str) -> None:
    backend = FullCudaGraphBackend(module(device))
    layer = torch.nn.Linear(8, 8, device=device)
    x = torch.randn(16, 8, device=device)
    with torch.no_grad():
        with backend.capture_session():
            for n in (16, 8, 2):
                out = backend.capture_one(n, lambda n=n: {"y": layer(x[:n]).relu(), "n": n})
                assert out["n"] == n
        for n in (2, 16, 8, 8, 2, 16):
            x.copy_(torch.randn(16, 8))
            out = backend.replay(n)
            assert torch.equal(out["y"], layer(x[:n]).relu())
    assert backend.can_run(8)
    assert not backend.can_run(9)
    assert sgc_backend.stats()["full"]["replayed"] == {"2": 2, "16": 2, "8": 2}
    backend.cleanup()


def test_variants_are_recordings_of_their_own() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        for variant in ("a", "b", ("lora", 3)):
            backend.capture_one(ShapeKey(4, variant), lambda v=variant: x * len(v))
    assert backend.replay(ShapeKey(4, "a"))[0] == 1
    assert backend.replay(ShapeKey(4, ("lora", 3)))[0] == 2
    with pytest.raises(NotCapturedError, match=r"nothing is recorded under key 4; recorded: 4/a, 4/b"):
        backend.replay(4)


@device
def test_state_written_in_place_is_written_once_per_replay(device: str) -> None:
    backend = FullCudaGraphBackend(module(device))
    cache = torch.zeros(8, 4, device=device)
    row, slot = torch.ones(1, 4, device=device), torch.tensor([3], device=device)
    with backend.capture_session():
        backend.capture_one(1, lambda: cache.index_add_(0, slot, row))
    cache.zero_()
    for _ in range(3):
        backend.replay(1)
    assert cache.sum() == 12
    backend.cleanup()


def test_capture_one_outside_a_session_says_how_to_open_one() -> None:
    backend = FullCudaGraphBackend(emulated)
    with pytest.raises(CaptureError, match=r"with backend\.capture_session"):
        backend.capture_one(4, lambda: torch.ones(4))


def test_the_users_own_exception_comes_through_and_the_next_capture_works() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    runs = []

    def forward() -> torch.Tensor:
        runs.append(1)
        if len(runs) == 3:  # twice warmed up, then while recording
            raise LookupError("the user's")
        return x + 1

    with backend.capture_session():
        with pytest.raises(LookupError, match="the user's"):
            backend.capture_one(4, forward)
        assert not backend.can_run(4)
        backend.capture_one(4, forward)
    assert torch.equal(backend.replay(4), x + 1)


def test_a_host_read_in_the_callable_is_a_capture_error_with_its_cause() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        with pytest.raises(CaptureError, match="full, key 4") as raised:
            backend.capture_one(4, lambda: x * 2 if x.sum() > 0 else x)
        assert raised.value.__cause__ is not None
        backend.capture_one(4, lambda: x * 2)
    assert torch.equal(backend.replay(4), x * 2)


def test_the_hook_runs_between_the_warm_up_and_the_recording() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    order: list[str] = []
    with backend.capture_session():
        backend.capture_one(
            4, lambda: (order.append("forward"), x + 1)[1], post_warmup_hook=lambda: order.append("hook")
        )
    assert order == ["forward", "forward", "hook", "forward"]


def test_recording_a_key_again_replaces_it() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: x + 1)
        backend.capture_one(4, lambda: x + 2)
    assert backend.replay(4)[0] == 3


def test_cleanup_is_idempotent_and_replay_after_it_says_so() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: x + 1)
    backend.cleanup()
    backend.cleanup()
    with pytest.raises(NotCapturedError, match="recorded: none"):
        backend.replay(4)


def test_outputs_of_all_sizes_share_memory() -> None:
    backend = FullCudaGraphBackend(emulated)
    weight = torch.randn(64, 2000)
    x = torch.randn(256, 64)
    handle = sgc_backend.get_or_create_global_graph_memory_pool(emulated)
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(256, lambda: x @ weight)
        largest = backend.device.reserved_bytes(handle)
        for n in range(248, 0, -8):
            backend.capture_one(n, lambda n=n: x[:n] @ weight)
    assert backend.device.reserved_bytes(handle) <= 1.02 * largest
    for n in (8, 256, 128):
        torch.testing.assert_close(backend.replay(n), x[:n] @ weight)


def test_without_a_device_the_error_says_how_to_emulate_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGC_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="SGC_DEVICE=emulated"):
        FullCudaGraphBackend()


def test_replays_from_threads_are_serialised_and_right() -> None:
    import threading

    backend = FullCudaGraphBackend(emulated)
    x = torch.arange(8.0)
    with backend.capture_session():
        for n in (8, 4):
            backend.capture_one(n, lambda n=n: (x[:n] * 2 + 1) * 3)
    wrong = []

    def work(n: int) -> None:
        with emulated.stream(emulated.Stream()):
            for _ in range(50):
                with backend.replay_session():
                    if not torch.equal(backend.replay(n), (x[:n] * 2 + 1) * 3):
                        wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (8, 4, 8, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_containers_and_tensors_of_an_output_are_new_objects_each_time() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: {"a": x + 1, "l": x * 2})
    out = backend.replay(4)
    out["a"] = out["a"].clone()
    out["l"].unsqueeze_(0)
    x.fill_(3)
    again = backend.replay(4)
    assert torch.equal(again["a"], x + 1)
    assert again["l"].shape == (4,)


def test_autocasts_cached_casts_of_weights_are_not_recorded() -> None:
    backend = FullCudaGraphBackend(emulated)
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), backend.capture_session():
        layer(x)
        backend.capture_one(4, lambda: layer(x))
    with torch.no_grad():
        layer.weight.mul_(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(backend.replay(4), layer(x))


def test_a_stream_that_the_callable_left_current_breaks_nothing() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        out = x + 1
        if backend.device.is_capturing():
            emulated.set_stream(emulated.Stream())
        return out

    with backend.capture_session():
        backend.capture_one(4, forward)
        backend.capture_one(2, lambda: x[:2] * 2)
    assert torch.equal(backend.replay(4), x + 1)
    assert torch.equal(backend.replay(2), x[:2] * 2)


def test_a_measuring_session_whose_second_recording_fails_keeps_nothing() -> None:
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(1 << 16)
    runs: list[int] = []

    def forward() -> torch.Tensor:
        runs.append(1)
        if len(runs) == 4:
            raise LookupError("the second recording")
        return x + 1

    with backend.capture_session(measure=True), pytest.raises(LookupError):
        backend.capture_one(4, forward)
    assert not backend.can_run(4)
    assert not sgc_backend.memory_report().pools[0].owners


def test_a_replay_that_waited_while_its_key_was_captured_again_replays_the_new_recording() -> None:
    import threading
    import time

    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: x + 1)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(backend.replay(4).clone()))
    with backend.replay_session(), backend.capture_session():
        thread.start()
        time.sleep(0.2)  # until it waits for the pool; if it has not come so far, the test shows nothing, and passes
        backend.capture_one(4, lambda: x + 2)
    thread.join()
    assert torch.equal(results[0], x + 2)


def test_dropping_while_another_thread_replays_gives_the_memory_back_afterwards() -> None:
    import threading

    wrapper, other = FullCudaGraphBackend(emulated), FullCudaGraphBackend(emulated)
    x = torch.ones(1 << 18)
    with wrapper.capture_session():
        wrapper.capture_one(4, lambda: x + 1)
    pool = wrapper._pool
    assert pool is not None
    before = pool.reserved_bytes()
    pool.replay_begin(pool.generation)
    thread = threading.Thread(target=wrapper.cleanup)
    thread.start()
    thread.join()
    pool.replay_end()
    assert pool.reserved_bytes() < before
    assert wrapper.name != other.name


def test_a_session_that_meets_a_reset_pool_says_so() -> None:
    from sgc_backend.errors import StalePoolError

    backend = FullCudaGraphBackend(emulated)
    with backend.capture_session():
        pool = backend._pool
    sgc_backend.reset()
    assert pool is not None
    with pytest.raises(StalePoolError, match="open a new capture session"), pool.session():
        pass


class Contrary:
    """A variant that can be compared as often as it was told, and then raises."""

    def __init__(self) -> None:
        self.patience = 1000

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        self.patience -= 1
        if self.patience < 0:
            raise LookupError("not comparable")
        return isinstance(other, Contrary)


def test_a_key_that_cannot_be_compared_leaves_the_pool_free_for_other_threads() -> None:
    import threading

    backend = FullCudaGraphBackend(emulated)
    x, variant = torch.ones(4), Contrary()
    with backend.capture_session():
        backend.capture_one(ShapeKey(4, variant), lambda: x + 1)
        backend.capture_one(8, lambda: x + 2)
    for call in (backend.replay, backend.hold):
        variant.patience = 0
        with pytest.raises(LookupError):
            call(ShapeKey(4, Contrary()))
        done: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda done=done: done.append(backend.replay(8).clone()), daemon=True)
        thread.start()
        thread.join(20)
        assert done
        assert torch.equal(done[0], x + 2)


def test_a_result_that_cannot_be_taken_apart_leaves_no_recording_behind() -> None:
    class Result(dict):
        def items(self) -> Any:
            raise LookupError("a result of another kind")

    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session(), pytest.raises(LookupError):
        backend.capture_one(4, lambda: Result(y=x + 1))
    assert not backend.can_run(4)
    assert not sgc_backend.memory_report().pools[0].owners


def test_what_only_equals_a_key_is_none() -> None:
    backend = FullCudaGraphBackend(emulated)
    one = torch.ones(1)
    with backend.capture_session():
        backend.capture_one(1, lambda: one * 2)
    for key in (1, ShapeKey(1), ShapeKey(1, None)):
        assert backend.can_run(key)
        assert backend.replay(key).item() == 2
    for key in (True, 1.0, "1", None, [1]):
        with pytest.raises(OptionError):
            backend.can_run(key)
        with pytest.raises(OptionError):
            backend.replay(key)
    assert set(backend.counters.replayed) == {1}


@pytest.mark.parametrize("nested", [False, True])
def test_a_result_comes_in_new_containers_of_the_same_kinds(nested: bool) -> None:
    one = torch.ones(2)
    makes: list[Any] = [
        lambda: (one * 2, one * 3),
        lambda: [one * 2, None, 5],
        lambda: {"b": one * 2, "a": "text"},
        lambda: (one * 2,),
        lambda: {},
    ]
    backend = FullCudaGraphBackend(emulated)
    with backend.capture_session():
        for key, make in enumerate(makes):
            backend.capture_one(key, (lambda make=make: {"inner": [make()]}) if nested else make)
    for key, make in enumerate(makes):
        first, second = backend.replay(key), backend.replay(key)
        assert first is not second
        found, wanted = (second["inner"][0] if nested else second), make()
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        if isinstance(found, dict):
            assert list(found) == list(wanted)
        for a, b in zip(*((list(v.values()) if isinstance(v, dict) else v) for v in (found, wanted)), strict=True):
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def test_nobody_waits_for_the_device_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, third = (FullCudaGraphBackend(emulated) for _ in range(3))
    pool, x = pool_of(one.device, None), torch.ones(4)
    waited: list[tuple[str, bool]] = []  # for what, and whether somebody was capturing
    for wrapper in (one, other, third):
        for name in ("synchronize", "empty_cache"):
            real = getattr(wrapper.device, name)

            def spied(real: Any = real, name: str = name) -> None:
                waited.append((name, pool._capturing))
                real()

            monkeypatch.setattr(wrapper.device, name, spied)
    warm, capturing = threading.Event(), threading.Event()

    def slow() -> torch.Tensor:
        if pool._capturing:
            capturing.set()
            time.sleep(0.2)
        return x + 1

    def hook() -> None:
        warm.set()
        assert capturing.wait(60)

    def clean() -> None:
        assert capturing.wait(60)
        third.cleanup()

    with other.capture_session(), third.capture_session(), one.capture_session():
        third.capture_one(4, lambda: x + 3)
        jobs = [
            threading.Thread(target=lambda: other.capture_one(4, lambda: x + 2, post_warmup_hook=hook)),
            threading.Thread(target=clean),
        ]
        begun = len(waited)
        for job in jobs:
            job.start()
        assert warm.wait(60)
        one.capture_one(4, slow)
        for job in jobs:
            job.join(60)
        assert set(waited[begun:]) == {("synchronize", False), ("empty_cache", False)}
    assert torch.equal(one.replay(4), x + 1)
    assert torch.equal(other.replay(4), x + 2)
    one.cleanup()
    other.cleanup()

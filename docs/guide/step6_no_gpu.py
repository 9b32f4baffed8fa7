"""Step 6: tests of the engine's capture logic that need no GPU: ``python -m pytest step6_no_gpu.py``."""

import os

os.environ["SGC_DEVICE"] = "emulated"  # before the engine is imported, which chooses its device

import step5_production as production
import torch

import sgc_backend


def test_what_is_served_is_what_runs_eagerly():
    engine = production.Engine()
    for adapter in production.ADAPTERS:
        served = engine.serve(production.PROMPTS, adapter)
        engine.run = lambda runner, rows, adapter: runner.eager(
            **dict(zip(("tokens", "slots", "positions"), zip(*rows, strict=True), strict=True)), variant=adapter
        )
        assert served == engine.serve(production.PROMPTS, adapter)
        del engine.run
    engine.close()


def test_every_call_is_replayed_and_every_runner_is_used():
    engine = production.Engine()
    engine.serve(production.PROMPTS)
    for runner in engine.runners:
        assert runner.counters.replayed and not runner.counters.uncaptured
    engine.close()


def test_padding_rows_write_to_the_trash_slot_only():
    engine = production.Engine()
    cache = engine.model.layers[0].k_cache
    engine.run(engine.decode_runner, [(7, 0, 0), (7, 1, 0), (7, 2, 0)], None)  # three rows in a bucket of four
    written = cache.abs().sum(dim=(1, 2, 3)).nonzero().flatten().tolist()
    assert written == [0, 1, 2, production.TRASH]
    engine.close()


def test_each_layers_attention_is_cut_and_nothing_else():
    engine = production.Engine()
    options = {"inner": "eager", "capture": "session", "pad": "never"}  # the runner pads
    compiled = torch.compile(engine.prefill_step, backend="sgc_piecewise", dynamic=True, options=options)
    rows = {i.name: torch.full((16,), i.pad, dtype=i.dtype) for i in production.INPUTS}
    (graph,) = sgc_backend.explain(compiled, **rows, variant=None).graphs
    cuts = [cut.name for group in graph.split.cuts for cut in group.cuts]
    assert len(cuts) == production.LAYERS
    engine.close()


def test_the_phases_share_one_pool_and_closing_gives_it_back():
    engine = production.Engine()
    (pool,) = sgc_backend.memory_report().pools
    owners = {owner.owner for owner in pool.owners}
    assert {engine.verify_runner.backend.name, engine.decode_runner.backend.name} < owners
    assert pool.reserved > 0
    engine.close()
    assert sum(pool.reserved for pool in sgc_backend.memory_report().pools) == 0


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
    for number, tokens in enumerate(production.Engine().serve(production.PROMPTS)):
        print(f"request {number}:", *tokens)

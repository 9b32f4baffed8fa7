"""A real model, transformers' Llama, at many lengths: equal to itself uncompiled, and cut only where it must be."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sgc_backend
from sgc_backend import explain

transformers = pytest.importorskip("transformers", reason="needs transformers; pip install sgc-backend[hf]")
llama = transformers.models.llama.modeling_llama

LAYERS, VOCABULARY = 2, 128
LENGTHS = random.Random(0).sample(range(2, 161), 100)
# Its name changed, and the old one is warned about.
CACHE = "cache" if "cache" in inspect.signature(llama.LlamaForCausalLM.forward).parameters else "past_key_values"


@pytest.fixture(autouse=True)
def no_capture_fails(clean_slate: None) -> Iterator[None]:
    yield
    assert [counted["failures"] for counted in sgc_backend.stats().values() if counted["failures"]] == []


def config(attention: str = "sdpa") -> Any:
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        attn_implementation=attention,
    )


def compile_eagerly(model: Any, dynamic: bool | None = True) -> Any:
    return torch.compile(model, backend=sgc_backend.sgc_piecewise, dynamic=dynamic, options={"inner": "eager"})


def compiled_llama(attention: str = "sdpa", *, dynamic: bool | None = True) -> tuple[Any, Any]:
    """(uncompiled, compiled), of the same random weights."""
    model = llama.LlamaForCausalLM(config(attention)).eval()
    return model, compile_eagerly(model, dynamic)


def tokens(n: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, n))


@torch.no_grad()
def check(model: Any, compiled: Any, **inputs: Any) -> None:
    inputs = {"use_cache": False, **inputs}
    got, expected = compiled(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def graphs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def replays() -> int:
    return sum(sum(counted["replayed"].values()) for counted in sgc_backend.stats().values())


def line_of(cut: Any) -> tuple[str, int]:
    """File and line that a cut comes from."""
    file, line, _ = cut.source.split(":", 2)
    return file, int(line)


# -- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hundred_lengths_give_the_uncompiled_logits_and_cut_nothing_but_attention(
    attention: str, dynamic: bool | None
) -> None:
    before = graphs_compiled()
    model, compiled = compiled_llama(attention, dynamic=dynamic)
    for n in LENGTHS * 2:
        check(model, compiled, input_ids=tokens(n))
    assert replays() > 0
    assert graphs_compiled() - before == (1 if dynamic else 2)  # unasked, the first length is taken for the only one

    found = explain(compiled, input_ids=tokens(LENGTHS[1]), use_cache=False)
    assert found.breaks == []
    (graph,) = found.graphs
    cuts = [cut for group in graph.split.groups for cut in group.cuts]
    for cut in cuts:
        assert f"{cut.name}: {cut.reason}" in str(found)
        assert cut.reason.text
    first, norm = inspect.getsourcelines(llama.LlamaRMSNorm)[1], llama.LlamaRMSNorm
    lines = range(first, first + len(inspect.getsourcelines(norm)[0]))
    assert not [c for c in cuts if line_of(c)[0] == inspect.getsourcefile(norm) and line_of(c)[1] in lines]
    if attention == "sdpa":
        assert [cut.reason.rule for cut in cuts if cut.reason.rule != "padding"] == ["attention"] * LAYERS
    assert graph.padding is not None, graph.not_padded
    assert len(graph.plans) <= 64


def test_ids_cut_out_of_wider_buffers_give_the_uncompiled_logits() -> None:
    model, compiled = compiled_llama()
    for width in (64, 48, 200):
        buffer = tokens(width)
        for n in (16, 17, 16, 17, 40):
            check(model, compiled, input_ids=buffer[:, :n])
            check(model, compiled, input_ids=buffer[:, :n].contiguous())


def test_batch_and_length_may_both_vary() -> None:
    model, compiled = compiled_llama()
    for batch in (2, 3, 5):
        for n in (7, 9, 7, 8, 9):
            check(model, compiled, input_ids=tokens(n, batch))


def test_the_last_tokens_logits_are_those_of_the_calls_last_token() -> None:
    model, compiled = compiled_llama()
    for n in (16, 12, 13, 17, 16, 12, 13, 17, 30, 30):
        check(model, compiled, input_ids=tokens(n), logits_to_keep=1)


def test_a_table_of_positions_is_not_read_behind_its_end() -> None:
    sizes = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 100}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()
    compiled = compile_eagerly(model)
    for n in (96, 97, 100, 80, 99, 100, 96, 97):
        check(model, compiled, input_ids=tokens(n))


# -- what the caller says of positions -------------------------------------------------------------------------------


def test_tokens_masked_on_the_left_stay_masked_at_any_length() -> None:
    model, compiled = compiled_llama()
    for n in (16, 12, 30, 16, 13, 32, 29, 12):
        mask = torch.ones(1, n, dtype=torch.long)
        mask[:, : n // 3] = 0
        check(model, compiled, input_ids=tokens(n), attention_mask=mask)


def test_sequences_packed_into_one_row_do_not_see_one_another_at_any_length() -> None:
    model, compiled = compiled_llama()
    for lengths in ((5, 7), (16,), (1, 2, 10), (6, 6), (9, 4), (3, 8, 5), (5, 7)):
        positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
        check(model, compiled, input_ids=tokens(sum(lengths)), position_ids=positions)


# -- a cache -----------------------------------------------------------------------------------------------------------


def test_chunks_of_any_length_leave_a_static_cache_as_the_uncompiled_model_leaves_it() -> None:
    # The cache counts its tokens itself, by adding each chunk's length, and has the chunk's rows and no others written.
    model, compiled = compiled_llama()
    caches = []
    for _ in range(2):
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        cache.early_initialization(batch_size=1, num_heads=2, head_dim=16, dtype=torch.float32, device="cpu")
        caches.append(cache)
    for chunks in ((16, 12, 9), (13, 16), (9, 30, 25), (12, 12, 12, 13, 15)):
        for cache in caches:
            cache.reset()
        for n in chunks:
            ids = tokens(n)
            with torch.no_grad():
                got, expected = (
                    fn(input_ids=ids, **{CACHE: cache}).logits
                    for fn, cache in zip((compiled, model), caches, strict=True)
                )
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
                assert int(ours.cumulative_length) == int(theirs.cumulative_length)
                torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)
    assert replays() > 0


def test_the_keys_and_values_that_come_back_have_the_calls_length() -> None:
    model, compiled = compiled_llama()
    for n in (16, 12, 13, 16, 12, 13):
        ids = tokens(n)
        with torch.no_grad():
            caches = [fn(input_ids=ids, use_cache=True).past_key_values for fn in (compiled, model)]
        for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)

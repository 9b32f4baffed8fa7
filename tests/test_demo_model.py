"""The demo model, its packaged weights and its serving loop, on the CPU."""

from dataclasses import replace

import pytest
import torch

from sgc_backend import ROWS, DecodeRunner, PrefillRunner, emulated
from sgc_backend.demo.allocator import BlockAllocator
from sgc_backend.demo.engine import Engine
from sgc_backend.demo.model import WEIGHTS, Decoder, DecoderConfig, load
from sgc_backend.demo.prompts import PROMPTS
from sgc_backend.demo.requests import Request
from sgc_backend.demo.serve import input_specs

SMALL = DecoderConfig(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=128)
BLOCK = 8


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are tiny: threads would only wait for each other, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Decoder(SMALL).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Fresh residual branches are zero, and then every layer would be the identity.
        if parameter.ndim == 2:
            parameter.copy_(torch.randn_like(parameter) * 2 * parameter.shape[1] ** -0.5)
    return model


def small_engine(model, **options):
    return Engine(model, **{"max_requests": 3, "max_prefill": 32, "block_size": BLOCK, "max_context": 64} | options)


def alone(model, request):
    """The continuation, made one token at a time by the dense path, which knows no cache and no batch."""
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(int(model.forward_train(torch.tensor([tokens]))[0, -1].argmax()))
    return bytes(tokens[len(request.prompt) :])


def requests(*sizes):
    generator = torch.Generator().manual_seed(len(sizes))
    return [
        Request(prompt=bytes(torch.randint(256, (prompt,), generator=generator).tolist()), max_new_tokens=new)
        for prompt, new in sizes
    ]


MIXED = requests((5, 9), (20, 1), (1, 30), (9, 4), (30, 12), (3, 3), (8, 8))


def ragged_inputs(lengths, padding=0):
    """Inputs of whole prompts, with the blocks of different requests interleaved."""
    most = max(-(-n // BLOCK) for n in lengths)
    tables = torch.arange(most * len(lengths), dtype=torch.int32).view(most, len(lengths)).T.contiguous()
    prompts = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    rows = [(int(prompts[r][p]), p, int(tables[r, p // BLOCK]) * BLOCK + p % BLOCK, r)
            for r, n in enumerate(lengths) for p in range(n)]  # fmt: skip
    tokens, positions, slots, token_req = torch.tensor(rows + [(0, 0, -1, -1)] * padding).T.contiguous()
    return (tokens, positions, slots, token_req.int(), tables), prompts


def test_paged_forward_equals_the_dense_path(model):
    lengths = [11, 1, 24]
    inputs, prompts = ragged_inputs(lengths, padding=4)
    model.allocate_cache(9, BLOCK)
    logits = model.logits(model(*inputs))[:-4]
    for prompt, paged in zip(prompts, logits.split(lengths), strict=True):
        torch.testing.assert_close(paged, model.forward_train(prompt[None])[0], atol=1e-4, rtol=1e-4)


def test_chunks_of_a_prompt_equal_the_whole(model):
    (tokens, positions, slots, token_req, tables), (prompt,) = ragged_inputs([24])
    model.allocate_cache(3, BLOCK)
    chunks = [slice(0, 10), slice(10, 11), slice(11, 24)]
    hidden = [model(tokens[c], positions[c], slots[c], token_req[c], tables) for c in chunks]
    expected = model.forward_train(prompt[None])[0]
    torch.testing.assert_close(model.logits(torch.cat(hidden)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dynamic", [True, None])
def test_forward_compiles_to_one_graph_with_a_dynamic_size(model, dynamic):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    model.allocate_cache(12, BLOCK)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=dynamic)
    for lengths in ([11, 1, 24], [2, 3, 4], [5, 17, 6]):
        inputs, _ = ragged_inputs(lengths)
        inputs = (*inputs[:4], torch.nn.functional.pad(inputs[4], (0, 3 - inputs[4].shape[1])))
        assert torch.equal(compiled(*inputs), model(*inputs))
    # With dynamic unset the first size is compiled for itself.
    assert len(graphs) == (1 if dynamic else 2)
    # A Python number that became a host tensor would be an input of its own, and a sync when it is read.
    inputs = [node.meta["example_value"] for node in graphs[-1].graph.nodes if node.op == "placeholder"]
    assert not [value for value in inputs if isinstance(value, torch.Tensor) and value.ndim == 0]
    torch._dynamo.reset()


def test_caches_that_fit_keep_their_address(model):
    model.allocate_cache(4, BLOCK)
    cache = model.layers[0].attention.k_cache
    cache.fill_(3)
    model.allocate_cache(4, BLOCK)
    assert model.layers[0].attention.k_cache is cache
    assert not cache.any()
    model.allocate_cache(5, BLOCK)
    assert model.layers[0].attention.k_cache.shape == (6, BLOCK, SMALL.kv_heads, SMALL.head_dim)


def test_engine_equals_one_request_at_a_time(model):
    engine = small_engine(model)
    assert engine.run(MIXED) == [alone(model, request) for request in MIXED]
    assert engine.idle
    assert engine.allocator.available == engine.allocator.num_blocks
    counters = engine.counters
    assert counters.finished == len(MIXED)
    assert counters.prefill_tokens == sum(len(request.prompt) for request in MIXED)
    # The first token of a request comes from its prefill.
    assert counters.decode_tokens == sum(request.max_new_tokens - 1 for request in MIXED)
    assert counters.decode_steps < counters.decode_tokens
    assert counters.prefill_calls < len(MIXED)


def test_requests_join_and_leave_in_the_middle(model):
    engine = small_engine(model)
    finished, tickets = {}, []
    for request in MIXED:
        tickets.append(engine.submit(request))
        for _ in range(3):
            finished |= engine.step()
    assert 0 < len(finished) < len(MIXED)
    while not engine.idle:
        finished |= engine.step()
    assert [finished[ticket] for ticket in tickets] == [alone(model, request) for request in MIXED]


def test_scarce_blocks_make_requests_wait_but_change_nothing(model):
    engine = small_engine(model, num_blocks=6)
    assert engine.run(MIXED) == [alone(model, request) for request in MIXED]


def test_served_by_runners_that_record_again_between_steps(model):
    engine = small_engine(model)
    tables = engine.table_shape
    common = {"device_module": emulated, "outputs": "static"}
    prefill = PrefillRunner(model, input_specs(ROWS, *tables), sizes=(8, 32), options={"inner": "eager"}, **common)
    decode = DecodeRunner(model.next_logits, input_specs(ROWS, ROWS, tables[1]), sizes=(1, 2, 4), **common)
    with prefill.capture_session():
        prefill.capture()
        decode.capture()
    engine.prefill, engine.decode = prefill, decode
    tickets = [engine.submit(request) for request in MIXED]
    finished, steps = {}, 0
    while not engine.idle:
        finished |= engine.step()
        steps += 1
        if steps % 8 == 1:  # warm-up and recording run on padding rows, which must touch no request that lives on
            prefill.capture()
            decode.capture()
    assert [finished[ticket] for ticket in tickets] == [alone(model, request) for request in MIXED]
    assert set(prefill.counters.replayed) == {8, 32}
    assert sum(prefill.counters.replayed.values()) == engine.counters.prefill_calls
    assert sum(decode.counters.replayed.values()) == engine.counters.decode_steps
    assert not prefill.counters.uncaptured
    assert not decode.counters.uncaptured


def test_batches_are_host_tensors_without_padding(model):
    engine = small_engine(model)
    seen = {"prefill": [], "decode": []}

    def watched(name, fn):
        def call(**inputs):
            seen[name].append({k: (tuple(v.shape), v.dtype, v.device.type) for k, v in inputs.items()})
            assert min(inputs["slots"]) >= 0
            assert min(inputs["token_req"]) >= 0
            return fn(**inputs)

        return call

    engine.prefill, engine.decode = watched("prefill", engine.prefill), watched("decode", engine.decode)
    engine.run(MIXED[:3])
    wide, narrow = torch.int64, torch.int32
    assert seen["prefill"][0] == {
        "tokens": ((26,), wide, "cpu"),
        "positions": ((26,), wide, "cpu"),
        "slots": ((26,), wide, "cpu"),
        "token_req": ((26,), narrow, "cpu"),
        "block_tables": ((3, 8), narrow, "cpu"),
    }
    assert seen["decode"][0]["tokens"] == ((2,), wide, "cpu")
    assert seen["decode"][0]["block_tables"] == ((2, 8), narrow, "cpu")


def test_results_may_be_static(model):
    engine = small_engine(model)
    static_hidden, static_logits = torch.empty(32, SMALL.hidden), torch.empty(4, SMALL.vocab)
    prefill, decode = engine.prefill, engine.decode
    engine.prefill = lambda **batch: static_hidden[: len(batch["tokens"])].copy_(prefill(**batch))
    engine.decode = lambda **batch: static_logits[: len(batch["tokens"])].copy_(decode(**batch))
    assert engine.run(MIXED) == [alone(model, request) for request in MIXED]


def test_an_error_in_prefill_or_decode_loses_no_request(model):
    engine = small_engine(model)
    working, broken = {"prefill": engine.prefill, "decode": engine.decode}, {"prefill": True, "decode": True}

    def fails_once(name, batch):
        if broken[name]:
            broken[name] = False
            raise KeyError(name)
        return working[name](**batch)

    engine.prefill = lambda **batch: fails_once("prefill", batch)
    engine.decode = lambda **batch: fails_once("decode", batch)
    tickets = [engine.submit(request) for request in MIXED]
    for name in ("prefill", "decode"):
        with pytest.raises(KeyError, match=name):
            engine.step()
    finished = {}
    while not engine.idle:
        finished |= engine.step()
    # What finished in the prefill of the step that failed in decode is handed out by the next one.
    assert [finished[ticket] for ticket in tickets] == [alone(model, request) for request in MIXED]


def test_exhausted_allocator_says_so_and_stays_usable():
    allocator = BlockAllocator(3, BLOCK)
    held = allocator.allocate(2)
    with pytest.raises(RuntimeError, match="exhausted: 2 blocks"):
        allocator.allocate(2)
    assert allocator.available == 1
    allocator.free(held)
    with pytest.raises(RuntimeError, match="aren't all held"):
        allocator.free(held)
    assert sorted(allocator.allocate(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=b"", max_new_tokens=1), "needs a prompt"),
        (Request(prompt=b"a", max_new_tokens=0), "needs a prompt"),
        (Request(prompt=b"a" * 33, max_new_tokens=1), "max_prefill"),
        (Request(prompt=b"a" * 30, max_new_tokens=40), "max_context"),
        (Request(prompt=b"a" * 30, max_new_tokens=30), "cache blocks"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(model, request_, message):
    engine = small_engine(model, num_blocks=5)
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert engine.idle


@pytest.mark.parametrize("options", [{"max_requests": 0}, {"max_prefill": 0}, {"max_context": 0}, {"max_context": 129}])
def test_engine_sizes_that_do_not_fit_are_refused(model, options):
    with pytest.raises(ValueError, match="must be"):
        small_engine(model, **options)


def test_config_refuses_impossible_heads():
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        replace(SMALL, heads=3)


def test_packaged_weights_are_small_and_load_safely():
    assert WEIGHTS.stat().st_size <= 2_000_000
    saved = torch.load(WEIGHTS, weights_only=True)
    assert DecoderConfig(**saved["config"]) == load().config
    assert {weight.dtype for weight in saved["weights"].values()} == {torch.float16}


def test_packaged_model_knows_its_text():
    text = b"The syntax of a function definition is the same as that of a class definition.  The following example "
    tokens = torch.tensor([list(text)])
    full, draft = (
        torch.nn.functional.cross_entropy(load(layers=k).forward_train(tokens)[0, :-1], tokens[0, 1:])
        for k in (None, 2)
    )
    # Nats per byte; ln 256 = 5.5 is knowing nothing.
    assert full < 1.5
    assert draft < 1.8


def test_packaged_model_serves_the_prompts_alike_in_a_batch_and_alone():
    model = load()
    wanted = [Request(prompt=prompt, max_new_tokens=4) for prompt in PROMPTS]
    assert Engine(model, max_context=256, max_requests=4).run(wanted) == [alone(model, one) for one in wanted]


def test_draft_is_the_first_layers():
    model, draft = load(), load(layers=2)
    assert len(draft.layers) == draft.config.layers == 2
    assert torch.equal(draft.layers[1].up.weight, model.layers[1].up.weight)
    with pytest.raises(ValueError, match="between 1 and 4"):
        load(layers=5)

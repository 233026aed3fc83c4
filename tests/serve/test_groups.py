"""Presets that encode tokens in groups, in the real engine on the CPU: no request gets other numbers than alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import packedkv
from packedkv.cache.host import LayerCache
from packedkv.codec import ROLES, roundtrip
from packedkv.errors import KVError
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.layer import Rules
from packedkv.integrations.vllm.pending import PendingGroups
from packedkv.recipe import LayerChoice
from packedkv.registry import write_recipe
from packedkv.store.pages import PageStore
from tests.serve.engines import engine, generate, layers, metric, prompts

BARE = {"window": 0, "sink": 0}
PRESETS = {"kivi-2": BARE, "innerq-hybrid:norm=false": BARE}
IDS = prompts(70, 7, 33, 50)
UNIT, LAYER = 32, 3


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Each request's part of each step in one layer: last position, query, key, value, output, blocks."""
    from packedkv.integrations.vllm.backend import PackedImpl

    seen: list[Any] = []
    forward = PackedImpl.forward

    def watch(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, meta: Any, output: Any, **more: Any) -> Any:
        found = forward(self, layer, q, k, v, cache, meta, output, **more)
        if meta is not None and layer.layer_name.split(".")[2] == str(LAYER):
            steps = [(row, row, row + 1, int(meta.seq_lens[row])) for row in range(meta.decodes)]
            for row, a, b, length in [*steps, *meta.chunks]:
                parts = (x[a:b].reshape(b - a, -1, 64).clone() for x in (q, k, v, output))
                seen.append((length, *parts, meta.table[row].clone()))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(PackedImpl, "forward", watch)
        yield seen


def outputs(seen: list[Any]) -> dict[int, list[torch.Tensor]]:
    """Of every position, what requests got there."""
    found: dict[int, list[torch.Tensor]] = {}
    for length, _, _, _, out, _ in seen:
        for i, x in enumerate(out):
            found.setdefault(length - out.shape[0] + i, []).append(x)
    return found


def same(seen: list[Any], alone: list[Any]) -> None:
    """Every token got what one of the requests that ran alone got at its place.

    Sums in another order move a key by its last bit, which now and then rounds to another code; requests differ by 2.
    """
    want = outputs(alone)
    rows = [(at, x) for at, found in outputs(seen).items() for x in found]
    far = torch.tensor([float((torch.stack(want[at]) - x).abs().amax((1, 2)).min()) for at, x in rows])
    assert float(far.max()) < 0.2
    assert float(far.quantile(0.9)) < 1e-4


@pytest.fixture(scope="module")
def alone(llama: Any) -> Any:
    """Tokens and outputs of requests that run alone, each prompt in one call."""
    made: dict[str, Any] = {}

    def run(preset: str) -> Any:
        if preset not in made:
            with pytest.MonkeyPatch.context() as patch, watched(patch) as seen:
                given = {"preset": preset, **PRESETS[preset]}
                with engine(llama.folder, given, block_size=64, enable_prefix_caching=False) as llm:
                    made[preset] = [generate(llm, [ids], 40)[0] for ids in IDS], seen
        return made[preset]

    return run


@pytest.mark.parametrize("preset", PRESETS)
def test_chunks_batches_and_cached_prefixes_do_not_show(
    preset: str, alone: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets that leave running requests out of a step, parts of groups in every chunk, blocks that change hands."""
    want, solo = alone(preset)
    given = {"preset": preset, **PRESETS[preset]}
    with (
        watched(monkeypatch) as seen,
        engine(llama.folder, given, max_num_batched_tokens=13, max_num_seqs=3, block_size=32) as llm,
    ):
        assert generate(llm, IDS, 40) == want
        assert metric(llm, "prefix_cache_hits") == 0
        assert generate(llm, IDS[::-1], 40) == want[::-1]
        assert metric(llm, "prefix_cache_hits") == 64 + 32 + 32  # whole blocks
        cache = layers(llm)[f"model.layers.{LAYER}.self_attn.attn"].kv_cache
        assert cache[0].numel() == 2 * packedkv.get(preset).page_layout(64, 32).page_bytes
    same(seen, solo)


@pytest.mark.parametrize("preset", PRESETS)
def test_attention_is_its_definition_and_bytes_are_the_librarys(preset: str, alone: Any, llama: Any) -> None:
    """Each token over its own group in 16 bit and the groups before it decoded, of the tensors that the engine had."""
    _, solo = alone(preset)
    count = len(IDS[0]) + 40 - 1
    parts, length = [], 0
    for step in solo:  # the first request's steps
        length += step[1].shape[0]
        assert step[0] == length
        parts.append(step[1:5])
        if length == count:
            break
    q, k, v, out = (torch.cat(x) for x in zip(*parts, strict=True))
    scheme = packedkv.get(preset).for_layer(LAYER, 6)
    own = LayerCache(packedkv.KVScheme(scheme.key, scheme.value), layer=LAYER, page_tokens=64)
    whole = count // UNIT * UNIT
    own.append(*(x[:whole].transpose(0, 1)[None].half() for x in (k, v)))
    decoded = []
    for role, x in zip(ROLES, (k, v), strict=True):
        state = own.roles[role]
        assert state.params is not None
        decoded.append(roundtrip(state.codec, x[:whole].transpose(0, 1)[None].half(), state.params)[0].transpose(0, 1))
    for t in range(count):
        begin = t // UNIT * UNIT
        kt, vt = (torch.cat([d[:begin], x[begin : t + 1].half().float()]) for d, x in zip(decoded, (k, v), strict=True))
        kt, vt = (x.repeat_interleave(2, 1) for x in (kt, vt))
        weights = (torch.einsum("hd,jhd->hj", q[t], kt) / 8).softmax(-1)
        torch.testing.assert_close(out[t], torch.einsum("hj,jhd->hd", weights, vt), rtol=1e-4, atol=1e-4)


def test_blocks_hold_the_librarys_bytes(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        watched(monkeypatch) as seen,
        engine(llama.folder, {"preset": "kivi-4", **BARE}, max_num_batched_tokens=16, block_size=64) as llm,
    ):
        generate(llm, IDS[:1], 30)
        k, v = (torch.cat([step[i] for step in seen]).transpose(0, 1)[None] for i in (2, 3))
        whole = k.shape[2] // UNIT * UNIT
        assert whole == 96
        scheme = packedkv.get("kivi-4")
        own = LayerCache(packedkv.KVScheme(scheme.key, scheme.value), layer=LAYER, page_tokens=64)
        own.append(k[:, :, :whole].half(), v[:, :, :whole].half())
        store, cache = own.store, layers(llm)[f"model.layers.{LAYER}.self_attn.attn"].kv_cache
        assert store is not None
        held = PageStore(store.layout, 1, 2, cache.device)
        held.pages, held.table = cache.flatten(2), seen[-1][-1][None, :2]
        for role in ROLES:
            for name, field in store.read(role, 0, whole).items():
                assert torch.equal(held.read(role, 0, whole)[name], field), (role, name)


def test_preemption_loses_nothing(alone: Any, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool for fewer tokens than the requests grow to."""
    want, solo = alone("kivi-2")
    with (
        watched(monkeypatch) as seen,
        engine(
            llama.folder,
            {"preset": "kivi-2", **BARE},
            block_size=32,
            num_gpu_blocks_override=9,
            max_model_len=128,
            max_num_batched_tokens=24,
        ) as llm,
    ):
        assert generate(llm, IDS, 40) == want
        assert metric(llm, "num_preemptions") > 0
    same(seen, solo)


@pytest.mark.nightly
def test_layers_of_both_kinds_share_blocks(llama: Any, tmp_path: Any) -> None:
    """A recipe: layers with slots beside layers whose pages hold every token."""
    kinds = ("saw-int4", "kivi-2:window=0", "innerq-base:norm=false,window=0,sink=0")
    recipe = tmp_path / "both.json"
    write_recipe(recipe, [LayerChoice(kinds[i % 3], kinds[i % 3]) for i in range(6)])
    given = {"preset": str(recipe)}
    with engine(llama.folder, given, block_size=64, enable_prefix_caching=False) as llm:
        want = [generate(llm, [ids], 40)[0] for ids in IDS]
    with engine(llama.folder, given, max_num_batched_tokens=13, max_num_seqs=3, block_size=32) as llm:
        for _ in range(2):
            assert generate(llm, IDS, 40) == want
        assert metric(llm, "prefix_cache_hits") > 0


def test_cancelled_requests_leave_their_slots(alone: Any, llama: Any) -> None:
    from vllm import SamplingParams

    want, _ = alone("kivi-2")
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    with engine(llama.folder, {"preset": "kivi-2", **BARE}, block_size=32, max_num_seqs=2) as llm:
        for turn in range(6):
            llm.llm_engine.add_request(f"gone {turn}", {"prompt_token_ids": IDS[turn % 4]}, greedy)
            llm.llm_engine.add_request(f"kept {turn}", {"prompt_token_ids": IDS[(turn + 1) % 4]}, greedy)
            ended = []
            for step in range(60):
                ended += [out for out in llm.llm_engine.step() if out.finished]
                if step == 3 + turn:
                    llm.llm_engine.abort_request([f"gone {turn}"])
                if not llm.llm_engine.has_unfinished_requests():
                    break
            (kept,) = [out for out in ended if out.request_id.startswith("kept")]
            assert list(kept.outputs[0].token_ids) == want[(turn + 1) % 4]


@pytest.mark.parametrize(("new", "kernels"), [(1, True), (6, True), (6, False)], ids=["step", "prompt", "reference"])
def test_a_request_reads_a_block_that_another_one_fills_in_the_same_step(new: int, kernels: bool) -> None:
    """The engine finds a block in its prefix cache once the step that fills it is planned, and orders the batch."""
    from packedkv.integrations.vllm.backend import PackedImpl, PackedMetadata

    given = {"layer": 0, "heads": 2, "head_dim": 64, "dtype": torch.float32, "device": torch.device("cpu")}
    layer = GroupedLayer(packedkv.get("kivi-2:window=0"), slots=3, **given)
    layer.unserved = "" if kernels else "a test"
    impl = PackedImpl.__new__(PackedImpl)  # without an engine
    impl.rules = Rules(0.125)
    generator, length = torch.Generator().manual_seed(0), UNIT + new
    q, k, v = (torch.randn(length, heads, 64, generator=generator) for heads in (4, 2, 2))
    table = torch.tensor([[1, 2], [1, 0]], dtype=torch.int32)
    reads, fills = (0, UNIT, length), (1, 0, UNIT)  # row, first and last token

    def outputs(*steps: list[tuple[int, int, int]]) -> torch.Tensor:
        """Of the request that reads."""
        impl.pending = PendingGroups(layer.slots, UNIT, UNIT, 4, table.device)
        cache = torch.zeros(3, 2, UNIT, layer.token_bytes(UNIT), dtype=torch.uint8)
        for step in steps:
            rows, lengths = table[[row for row, *_ in step]], torch.tensor([last for *_, last in step]).int()
            at = torch.tensor([0, *(last - first for _, first, last in step)]).cumsum(0).int()
            own = [torch.cat([x[first:last] for _, first, last in step]) for x in (q, k, v)]
            impl.pending.put(rows, lengths, at, torch.zeros(len(own[0]), dtype=torch.int64))
            decodes = int(at[1] == 1)
            chunks = [(i, int(at[i]), int(at[i + 1]), int(lengths[i])) for i in range(decodes, len(step))]
            found = torch.full_like(own[0], torch.nan)
            impl._forward_groups(layer, *own, cache, PackedMetadata(decodes, chunks, rows, lengths, rows), found)
        return found[:new]

    torch.testing.assert_close(outputs([reads, fills]), outputs([fills], [reads]))


REFUSED = {
    "dense window": ({"preset": "kivi-2"}, {}, r'keeps the newest 128 tokens dense.*; give "window": 0'),
    "statistics": ({"preset": "innerq-base", **BARE}, {}, r"each sequence's own tokens.*run packedkv fit"),
    "block size": (
        {"preset": "kivi-2", "window": 0},
        {"block_size": 48},
        r"--block-size 48; kivi-2.* encodes 32 tokens together and pages are multiples of 32 tokens, give one of these",
    ),
    "connector": (
        {"preset": "kivi-2", "window": 0},
        {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
        r"in whole blocks only, and NixlConnector is not known to do so; use one of ExampleConnector",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_engine_does_not_start(case: str, llama: Any) -> None:
    given, options, sentence = REFUSED[case]
    with pytest.raises(KVError, match=sentence) as error, engine(llama.folder, given, **options):
        pass
    assert "\n" not in str(error.value)

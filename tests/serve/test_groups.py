"""Presets that encode tokens in groups, in the real engine on the CPU: no request gets other numbers than alone."""

from typing import Any

import pytest
import torch

import packedkv
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES, roundtrip
from packedkv.registry import LayerChoice, write_recipe
from tests.serve.engines import Step, engine, generate, layers, metric, prompts, watched

BARE = {"window": 0, "sink": 0}
PRESETS = {"kivi-2": BARE, "innerq-hybrid:norm=false": BARE}
IDS = prompts(70, 7, 33, 50)
UNIT, LAYER = 32, 3


def by_request(steps: list[Step]) -> list[Any]:
    """Each request's part of each step: last position, query, key, value, output, blocks."""
    seen = []
    for _, meta, *rows in steps:
        decodes = [(row, row, row + 1, int(meta.seq_lens[row])) for row in range(meta.decodes)]
        for row, a, b, length in [*decodes, *meta.chunks]:
            seen.append((length, *(x[a:b] for x in rows), meta.block_table[row]))
    return seen


def same(steps: list[Step], alone: list[Any]) -> None:
    """Every token got the output of one of the requests that ran alone, at its position.

    Sums in another order move a key by its last bit, which now and then rounds to another code; requests differ by 2.
    """

    def outputs(seen: list[Any]) -> list[tuple[int, torch.Tensor]]:
        return [(length - len(out) + i, x) for length, _, _, _, out, _ in seen for i, x in enumerate(out)]

    want: dict[int, list[torch.Tensor]] = {}
    for at, x in outputs(alone):
        want.setdefault(at, []).append(x)
    rows = outputs(by_request(steps))
    far = torch.tensor([float((torch.stack(want[at]) - x).abs().amax((1, 2)).min()) for at, x in rows])
    assert float(far.max()) < 0.2
    assert float(far.quantile(0.9)) < 1e-4


@pytest.fixture(scope="module")
def alone(llama: Any) -> Any:
    """Tokens and outputs of requests that run alone, each prompt in one call."""
    made: dict[str, Any] = {}

    def run(preset: str) -> Any:
        if preset not in made:
            given, sizes = {"preset": preset, **PRESETS[preset]}, {"block_size": 64, "enable_prefix_caching": False}
            with watched(LAYER) as steps, engine(llama.folder, given, **sizes) as llm:
                made[preset] = [generate(llm, [ids], 40)[0] for ids in IDS], by_request(steps)
        return made[preset]

    return run


@pytest.mark.parametrize("preset", PRESETS)
def test_chunks_batches_and_cached_prefixes_do_not_show(preset: str, alone: Any, llama: Any) -> None:
    """Budgets that leave running requests out of a step, parts of groups in every chunk, blocks that change hands."""
    want, solo = alone(preset)
    given = {"preset": preset, **PRESETS[preset]}
    sizes = {"max_num_batched_tokens": 13, "max_num_seqs": 3, "block_size": 32}
    with watched(LAYER) as steps, engine(llama.folder, given, **sizes) as llm:
        assert generate(llm, IDS, 40) == want
        assert metric(llm, "prefix_cache_hits") == 0
        assert generate(llm, IDS[::-1], 40) == want[::-1]
        assert metric(llm, "prefix_cache_hits") == 64 + 32 + 32  # whole blocks
        cache = layers(llm)[f"model.layers.{LAYER}.self_attn.attn"].kv_cache
        assert cache[0].numel() == 2 * packedkv.get(preset).page_layout(64, 32).page_bytes
    same(steps, solo)


@pytest.mark.parametrize("preset", PRESETS)
def test_attention_is_its_definition_over_the_librarys_bytes(preset: str, alone: Any, llama: Any) -> None:
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
        decoded.append(roundtrip(state.codec, x[:whole].transpose(0, 1)[None].half(), state.params)[0].transpose(0, 1))
    for t in range(count):
        begin = t // UNIT * UNIT
        kt, vt = (torch.cat([d[:begin], x[begin : t + 1].half().float()]) for d, x in zip(decoded, (k, v), strict=True))
        kt, vt = (x.repeat_interleave(2, 1) for x in (kt, vt))
        weights = (torch.einsum("hd,jhd->hj", q[t], kt) / 8).softmax(-1)
        torch.testing.assert_close(out[t], torch.einsum("hj,jhd->hd", weights, vt), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("new", [1, 6], ids=["step", "prompt"])
def test_a_request_reads_a_block_that_another_one_fills_in_the_same_step(
    new: int, kernels: bool, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine finds a block in its prefix cache once the step that fills it is planned, and orders the batch."""
    if not kernels:
        monkeypatch.setattr("packedkv.kernels.cpu.library.refusal", lambda _: "not here")
    (ids,) = prompts(UNIT + new)
    with engine(llama.folder, {"preset": "kivi-2", **BARE}, block_size=32) as llm:
        want = generate(llm, [ids])
        assert llm.reset_prefix_cache()
        assert generate(llm, [ids, ids]) == 2 * want
        assert metric(llm, "prefix_cache_hits") == UNIT

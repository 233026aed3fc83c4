"""Random programs on caches of tiny models: forward passes and ``generate`` calls, each layer beside the oracle.

What the model gives each layer is noted, what each layer returns or attends is compared on the spot, so no error of a
layer reaches the next one's comparison. Which tokens a query sees follows from the 2-D mask that the model was called
with and the layer's window alone.
"""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.errors import KVError, UnsupportedError
from packedkv.integrations.transformers import cache_for, load_cache
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention import packedkv_attention
from packedkv.integrations.transformers.layers import CrossLayer, PackedCacheLayer, PackedKV
from tests.conftest import SMALL, tiny_model
from tests.fuzz import oracle
from tests.fuzz.oracle import CLOSE, LayerTokens, Mismatch, Stopped, attention64, causal

Setting = dict[str, Any]
Operation = list[Any]
NAMED = ("llama-gqa", "llama-mqa", "qwen2", "gemma2", "gemma3", "gpt-oss", "mistral")
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoX", {"hidden_size": 256, "rotary_pct": 0.25, "num_key_value_heads": 4}),
    "stablelm": ("StableLm", {"hidden_size": 320, "partial_rotary_factor": 0.25}),
    "glm": ("Glm", {"head_dim": 64, "partial_rotary_factor": 0.5}),  # interleaved pairs
    "cohere": ("Cohere", {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "phi": ("Phi", {"hidden_size": 160, "num_attention_heads": 2, "partial_rotary_factor": 0.4}),
}
MODELS = (*NAMED, *OWN)
VOCABULARY = SMALL["vocab_size"]
MOST_TOKENS, MOST_CACHES = 160, 3
OPERATIONS = (
    *("forward",) * 4, *("step",) * 3, *("greedy",) * 3, "sample", "beams", "lookup", "chunked", "assisted", "hole",
    "refused", "record", "crop", "crop", "select", "repeat", "reorder", "deepcopy", "pickle", "save", "reset",
)  # fmt: skip


@lru_cache(maxsize=2 * len(MODELS))
def model_of(name: str, dtype: str = "float32") -> Any:
    """The model of a name, made once in a process."""
    if dtype != "float32":
        return copy.deepcopy(model_of(name)).to(getattr(torch, dtype))
    if name not in OWN:
        return tiny_model(name)
    family, options = OWN[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **options})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" not in key and "lm_head" not in key:
                weight.mul_(4)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def setting_of(random: Random) -> Setting:
    """A model, a preset with options that its cache can be made of, and an attention."""
    while True:
        name, spec, options = random.choice(MODELS), random.choice(packedkv.presets()), {}
        if random.random() < 0.3:
            options["sink"] = random.choice((0, 1, 3))
        if random.random() < 0.5:
            options["window"] = random.choice((0, 1, 5, 17))
        if random.random() < 0.5:
            options["mean"] = random.choice(("none", "post", "pre"))
        if options.get("window") and random.random() < 0.2:
            options["recent"] = random.choice(("int-8", "fp8"))
        text = spec + ":" * bool(options) + ",".join(f"{option}={value}" for option, value in options.items())
        batch = random.choice((1, 1, 2, 3))
        setting = {
            "model": name,
            "spec": text,
            "attention": random.choice(("decoded", "streamed", "fused", "fused")),
            "prefill": random.choice(("exact", "exact", "decoded")),
            "batch": batch,
            "padding": [random.choice((0, 0, 2, 7)) for _ in range(batch)] if random.random() < 0.4 else [0] * batch,
            "seed": random.randint(0, 3),
            "dtype": random.choice(("float32", "float32", "bfloat16")),
            "page_tokens": random.choice((None, None, 128)),
        }
        setting["padding"][0] = 0  # one sequence is whole, as a tokenizer pads
        try:
            with attending(setting):
                made(setting)
        except KVError:
            continue
        return setting


def program_of(seed: int) -> tuple[Setting, list[Operation]]:
    random = Random(seed)
    setting = setting_of(random)
    names = ["forward", *(random.choice(OPERATIONS) for _ in range(random.randint(2, 8))), "step"]
    return setting, [[name, random.randrange(4), *(random.randrange(1 << 16) for _ in range(2))] for name in names]


@contextlib.contextmanager
def attending(setting: Setting) -> Iterator[None]:
    """Give the model the attention function that a cache of the setting needs."""
    model = model_of(setting["model"], setting["dtype"])
    own = "sdpa" if model._supports_sdpa else "eager"
    model.set_attn_implementation(own if setting["attention"] == "decoded" else "packedkv")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def made(setting: Setting) -> Any:
    """An empty cache of the setting."""
    return cache_for(
        model_of(setting["model"], setting["dtype"]), setting["spec"], attention=setting["attention"],
        prefill=setting["prefill"], seed=setting["seed"], page_tokens=setting["page_tokens"], probe="off",
    )  # fmt: skip


@dataclass
class Held:
    """A cache, the ids that it has seen and which of them are tokens, not padding."""

    cache: Any
    ids: Tensor
    mask: Tensor
    padding: list[int]


class Machine(oracle.Machine):
    """Runs the operations of one setting and watches every packed layer."""

    def __init__(self, setting: Setting, folder: str) -> None:
        self.setting, self.folder = setting, Path(folder)
        self.model = model_of(setting["model"], setting["dtype"])
        self.layers: dict[int, tuple[PackedCacheLayer, LayerTokens]] = {}
        self.seen: dict[int, int] = {}
        self.inside = False
        self.mask = torch.empty(0)
        ropes = [m for m in self.model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
        self.placed = len(ropes) == 1  # models with several do not tell their layers' positions
        self.held = [self._new(setting["padding"])]

    def _new(self, padding: list[int]) -> Held:
        cache, batch = made(self.setting), len(padding)
        for layer in cache.packed_layers:
            self._watch(layer, LayerTokens(layer.cache.site, isinstance(layer.cache, FusedLayerCache)), 0)
        return Held(cache, torch.empty(batch, 0, dtype=torch.long), torch.empty(batch, 0, dtype=torch.long), padding)

    def _watch(self, layer: PackedCacheLayer, tokens: LayerTokens, seen: int) -> None:
        self.layers[id(layer)], self.seen[id(layer)] = (layer, tokens), seen

    def tokens(self, layer: PackedCacheLayer) -> LayerTokens:
        return self.layers[id(layer)][1]

    # -- what layers are told ----------------------------------------------------------------------------------------

    def update(self, layer: PackedCacheLayer, call: Callable[[], Any], keys: Tensor, values: Tensor) -> Any:
        exact, found = not layer.filled and layer.prefill == "exact", call()
        tokens, n, seen = self.tokens(layer), keys.shape[2], self.seen[id(layer)]
        past, skip = seen, 0
        if layer.window:
            past = min(seen, layer.window - 1)
            skip = max(n - layer.window + 1, 0) if exact and not layer.record_past else 0
        positions = None
        mean = layer.cache.site.mean
        if self.placed and (layer.cache.places_tokens or mean is not None):
            positions = self._positions(n)[:, skip:]
        tokens.append(keys[:, :, skip:].detach(), values[:, :, skip:].detach(), positions)
        self.seen[id(layer)] = seen + n
        of = f"layer {layer.index}: "
        if exact:
            if not (torch.equal(found[0], keys) and torch.equal(found[1], values)):
                raise Mismatch(f"{of}an exact prefill does not return what came")
        elif layer.attention == "decoded":
            held = len(tokens)
            tokens.check_decoded(found, held - past - n, held, of)
        if exact or layer.attention == "decoded":
            self._restrict(layer)
        return found

    def _positions(self, n: int) -> Tensor:
        """Of the newest n tokens, by the mask: those of padding count down from -1."""
        mask = self.mask
        padding = (mask == 0).sum(-1, keepdim=True)
        return (torch.arange(mask.shape[1])[None] - padding)[:, mask.shape[1] - n :]

    def _restrict(self, layer: PackedCacheLayer) -> None:
        """Drop what a window has passed."""
        tokens = self.tokens(layer)
        if layer.window and not layer.record_past:
            tokens.evict(max(0, len(tokens) - layer.window + 1))

    def attend(self, query: Tensor, key: Any, value: Any, options: dict[str, Any], found: Tensor) -> None:
        n, mask = query.shape[2], self.mask
        rules = {"scale": options.get("scaling"), "sinks": options.get("s_aux"), "softcap": options.get("softcap") or 0}
        if isinstance(key, PackedKV):
            layer, tokens = key.layer, self.tokens(key.layer)
            tokens.encode()
            window, of = getattr(layer, "window", 0), f"layer {key.layer.index}: "
            k, v = (own.read for own in tokens.roles.values())
            self._restrict(layer)
        elif query.dtype != torch.float32:
            return  # by torch, which rounds in between
        else:
            window, of, k, v = options.get("sliding_window") or 0, "fresh keys: ", key, value
        held, largest = k.shape[2], float(v.abs().max())
        visible = causal(n, held, window) & (mask[:, None, None, mask.shape[1] - held :] > 0)
        want = attention64(query, k, v, visible, **rules)
        real = (mask[:, -n:] > 0)[:, None, :, None]  # what padding attends is nothing
        off = (found.transpose(1, 2).double() - want).abs()
        if found.dtype != torch.float32:
            off = off - torch.finfo(found.dtype).eps / 2 * 1.01 * want.abs()
        off = off.masked_fill(~real, 0).max()
        if not float(off) <= CLOSE * largest:
            raise Mismatch(
                f"{of}attention of {n} over {held} tokens is off by {float(off) / largest:.2g} of the largest"
            )

    def crop(self, layer: PackedCacheLayer, call: Callable[[], Any], number: Any) -> None:
        tokens, seen, number = self.tokens(layer), self.seen[id(layer)], int(number)
        keep = min(number, seen) if number > 0 else max(seen + number, 0)
        left = len(tokens) - (seen - keep)
        gone = layer.window and keep < seen and left < min(keep, layer.window - 1)
        if gone or (isinstance(layer.cache, FusedLayerCache) and tokens.refuses(max(left, 0), len(tokens))):
            refusal: type[Exception] = RuntimeError if gone else UnsupportedError
            try:
                call()
            except refusal as error:
                raise Stopped from error
            why = "needs tokens that are gone" if gone else "cuts a block"
            raise Mismatch(f"layer {layer.index}: crop({number}) {why} and is not refused")
        call()
        if keep < seen:
            tokens.crop(left)
            self.seen[id(layer)] = keep
        if layer.window:
            tokens.evict(max(0, len(tokens) - layer.window + 1))

    def select(self, layer: PackedCacheLayer, call: Callable[[], Any], indices: Any) -> None:
        call()
        indices = torch.as_tensor(indices)
        self.tokens(layer).select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def repeat(self, layer: PackedCacheLayer, call: Callable[[], Any], times: int) -> None:
        call()
        if tokens := self.tokens(layer):
            tokens.select(torch.arange(tokens.batch).repeat_interleave(times))

    def reset(self, layer: PackedCacheLayer, call: Callable[[], Any]) -> None:
        call()
        self.tokens(layer).reset()
        self.seen[id(layer)] = 0

    # -- the operations ----------------------------------------------------------------------------------------------

    def operate(self, operation: Callable[..., None], of: Held, numbers: list[int]) -> None:
        with torch.inference_mode() if numbers[-1] % 5 == 4 else torch.no_grad():
            operation(of, *numbers)

    def check(self, of: Held) -> None:
        for layer in of.cache.packed_layers:
            tokens = self.tokens(layer)
            if len(layer.cache) != len(tokens):
                raise Mismatch(f"layer {layer.index}: {len(layer.cache)} tokens, expected {len(tokens)}")
            if len(tokens):
                tokens.check_decoded(layer.cache.decode(), of=f"layer {layer.index}: ")
        if int(of.cache.get_seq_length()) != of.ids.shape[1]:
            raise Mismatch(f"{int(of.cache.get_seq_length())} tokens seen, expected {of.ids.shape[1]}")

    def _fresh(self, of: Held, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Ids and masks with n more tokens; an empty cache gets its left padding."""
        batch, held = of.ids.shape
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, VOCABULARY, (batch, n), generator=generator)
        mask = torch.ones(batch, n, dtype=torch.long)
        if not held:
            for b, padding in enumerate(of.padding):
                mask[b, : min(padding, n - 1)] = 0
            ids = ids * mask
        return torch.cat([of.ids, ids], 1), torch.cat([of.mask, mask], 1)

    def _room(self, of: Held, n: int) -> int:
        return min(n, MOST_TOKENS - of.ids.shape[1])

    def _forward(self, of: Held, n: int, seed: int) -> None:
        n = self._room(of, 1 + n % (70 if n % 5 == 0 else 24))
        if n < 1:
            return
        held = of.ids.shape[1]
        ids, mask = self._fresh(of, n, seed)
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, seed % 2)[:, held:]
        self.model(ids[:, held:], attention_mask=mask, position_ids=places, **passing(self.model, of.cache))
        of.ids, of.mask = ids, mask

    def _hole(self, of: Held, n: int, seed: int) -> None:
        """A turn of a batch that is padded on the left: kernels may refuse it, but then at once."""
        held, n = of.ids.shape[1], self._room(of, 4 + n % 8)
        if not held or n < 4 or any(layer.cache.places_tokens for layer in of.cache.packed_layers):
            return
        ids, mask = self._fresh(of, n, seed)
        for b in range(1, len(ids)):
            mask[b, held : held + (seed + b) % n] = 0
        places = (mask.cumsum(-1) - 1).clamp_min(0)[:, held:]
        try:
            self.model(ids[:, held:], attention_mask=mask, position_ids=places, **passing(self.model, of.cache))
        except UnsupportedError as error:
            if self.setting["attention"] == "fused" and "hides tokens" in str(error):
                raise Stopped from error
            raise
        of.ids, of.mask = ids, mask

    def _refused(self, of: Held, n: int, seed: int) -> None:
        """Tokens that no codec can hold: the first layer refuses them, and all stays as it was."""
        x = torch.full((len(of.ids), 1 + n % 5, self.model.config.hidden_size), torch.inf, dtype=self.model.dtype)
        try:
            self.model(inputs_embeds=x, **passing(self.model, of.cache))
        except ValueError:
            return
        raise Mismatch("keys of NaN are not refused")

    def _record(self, of: Held, _: int, __: int) -> None:
        if hasattr(of.cache, "activate_past_recording"):
            of.cache.activate_past_recording()
            if not all(layer.record_past for layer in of.cache.packed_layers if layer.window):
                raise Mismatch("a window does not record what leaves it")

    def _step(self, of: Held, n: int, seed: int) -> None:
        for i in range(1 + n % 3):
            if of.ids.shape[1]:
                self._forward(of, 0, seed + i)

    def _greedy(self, of: Held, n: int, seed: int, **options: Any) -> None:
        fresh = self._room(of, 1 + n % 20)
        ids, mask = self._fresh(of, max(1, fresh), seed)
        new = 2 + seed % 5
        torch.manual_seed(seed)
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=new, **{"do_sample": False, **options},
            **passing(self.model, of.cache),
        )  # fmt: skip
        seen = int(of.cache.get_seq_length())
        of.ids = out[:, :seen]
        of.mask = torch.cat([mask, torch.ones(len(mask), new, dtype=torch.long)], 1)[:, :seen]

    def _sample(self, of: Held, n: int, seed: int) -> None:
        self._greedy(of, n, seed, do_sample=True, top_k=20)

    def _chunked(self, of: Held, n: int, seed: int) -> None:
        chunk = {"prefill_chunk_size": 8 + n % 7}  # more than any padding
        self._greedy(of, n, seed, **({} if of.ids.shape[1] else chunk))

    def _lookup(self, of: Held, n: int, seed: int) -> None:
        self._greedy(of, n, seed, **({"prompt_lookup_num_tokens": 2 + n % 3} if self._assists(of) else {}))

    def _assisted(self, of: Held, n: int, seed: int) -> None:
        assists = self._assists(of) and self.setting["attention"] == "decoded"
        draft = {"assistant_model": model_of("llama-gqa"), "num_assistant_tokens": 3} if assists else {}
        self._greedy(of, n, seed, **draft)

    def _assists(self, of: Held) -> bool:
        """Whether drafts are offered: transformers gives a cache that holds tokens all of them again."""
        return len(of.ids) == 1 and not of.ids.shape[1] and self.setting["dtype"] == "float32"

    def _beams(self, of: Held, n: int, seed: int) -> None:
        """A cache of beams is of no use afterwards."""
        if len(of.ids) > 2:
            return
        batch, beams = len(of.ids), 2
        if of.ids.shape[1]:  # as transformers asks for it
            self._repeat(of, 1, 0)
            of.ids, of.mask = of.ids[::2], of.mask[::2]
        self._greedy(of, n, seed, num_beams=beams)
        self._reset(of, 0, 0)
        of.ids, of.mask = of.ids[:batch], of.mask[:batch]
        of.padding = of.padding[:batch]

    def _crop(self, of: Held, n: int, how: int) -> None:
        held = of.ids.shape[1]
        if not held:
            return
        remove = n % min(held, 12 if how % 2 else held) if held > 1 else 0
        of.cache.crop(-remove)
        left = held - remove
        of.ids, of.mask = of.ids[:, :left], of.mask[:, :left]

    def _take(self, of: Held, index: Tensor) -> None:
        of.ids, of.mask, of.padding = of.ids[index], of.mask[index], [of.padding[i] for i in index.tolist()]

    def _select(self, of: Held, n: int, seed: int) -> None:
        if not of.ids.shape[1]:
            return
        index = torch.randint(len(of.ids), (1 + n % 3,), generator=torch.Generator().manual_seed(seed))
        of.cache.batch_select_indices(index)
        self._take(of, index)

    def _reorder(self, of: Held, _: int, seed: int) -> None:
        if of.ids.shape[1]:
            index = torch.randint(len(of.ids), (len(of.ids),), generator=torch.Generator().manual_seed(seed))
            of.cache.reorder_cache(index)
            self._take(of, index)

    def _repeat(self, of: Held, times: int, _: int) -> None:
        times = 1 + times % 2
        if of.ids.shape[1] and len(of.ids) * times <= 4:
            of.cache.batch_repeat_interleave(times)
            self._take(of, torch.arange(len(of.ids)).repeat_interleave(times))

    def _reset(self, of: Held, _: int, __: int) -> None:
        of.cache.reset()
        of.ids, of.mask = of.ids[:, :0], of.mask[:, :0]

    def go_on(self, of: Held, cache: Any, both: int) -> None:
        for old, new in zip(of.cache.packed_layers, cache.packed_layers, strict=True):
            self._watch(new, self.tokens(old).copy(), self.seen[id(old)])
        if both % 3 and len(self.held) < MOST_CACHES:
            self.held.append(Held(cache, of.ids, of.mask, list(of.padding)))
        else:
            of.cache = cache

    def _save(self, of: Held, _: int, both: int) -> None:
        if of.ids.shape[1] and not any(layer.holds_state for layer in of.cache.plan.layers):
            path = self.folder / "cache.safetensors"
            of.cache.save(path)
            self.go_on(of, load_cache(path, self.model), both)


@contextlib.contextmanager
def watching(machine: Machine) -> Iterator[None]:
    """Show the machine each call of the layers' methods, of the attention function and of the model."""
    own: list[tuple[type, str, Any]] = []

    def watched(kind: type, name: str, to: Callable[..., Any]) -> None:
        method = vars(kind)[name]
        own.append((kind, name, method))

        def call(layer: Any, *args: Any, **options: Any) -> Any:
            plain = lambda: method(layer, *args, **options)  # noqa: E731
            if machine.inside or id(layer) not in machine.layers:
                return plain()
            machine.inside = True
            try:
                return to(layer, plain, *args[:2] if name == "update" else args)
            finally:
                machine.inside = False

        setattr(kind, name, call)

    def attention(module: nn.Module, query: Tensor, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        found, weights = packedkv_attention(module, query, key, value, mask, **options)
        machine.attend(query, key, value, options, found)
        return found, weights

    def note(module: nn.Module, args: Any, options: dict[str, Any]) -> None:
        mask, ids = options.get("attention_mask"), options.get("input_ids", args[0] if args else None)
        ids = options["inputs_embeds"] if ids is None else ids
        if not isinstance(mask, Tensor) or mask.ndim != 2:  # drafts come without one
            cache = options.get("cache", options.get("past_key_values"))
            seen = 0 if cache is None else int(cache.get_seq_length())
            mask = torch.ones(len(ids), seen + ids.shape[1], dtype=torch.long)
        machine.mask = mask

    for kind in (PackedCacheLayer, CrossLayer):
        for name, to in (
            ("update", machine.update), ("crop", machine.crop), ("batch_select_indices", machine.select),
            ("batch_repeat_interleave", machine.repeat), ("reset", machine.reset),
        ):  # fmt: skip
            if name in vars(kind):
                watched(kind, name, to)
    hook = machine.model.register_forward_pre_hook(note, with_kwargs=True)
    AttentionInterface.register("packedkv", attention)
    try:
        yield
    finally:
        AttentionInterface.register("packedkv", packedkv_attention)
        hook.remove()
        for kind, name, method in own:
            setattr(kind, name, method)


def run(setting: Setting, operations: list[Operation]) -> None:
    """Run a program; raises ``Mismatch`` if a layer differs from its oracle or raises what it should not."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), attending(setting):
        machine = Machine(setting, folder)
        with watching(machine):
            machine.run(operations)

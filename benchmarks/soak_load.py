"""Requests of ``soak_serve``.

Token ids are held as bytes, four each: a tuple of numbers takes ten times as much, and a soak that keeps every prompt
and every answer would seem to leak.
"""

import json
from array import array

KINDS = ("whole", "queued", "prefill", "decode")
"""How requests end: answered, or cancelled while they wait, within their prompt, within their answer."""


WIDTH = array("i").itemsize


def pack(ids):
    """Token ids as bytes, which can be concatenated, compared and searched like the ids."""
    return array("i", ids).tobytes()


def unpack(ids):
    return array("i", ids).tolist()


class Request:
    """One request and what became of it; ``prompt`` and ``tokens`` packed."""

    __slots__ = ("at", "cut", "ended", "kind", "length", "new", "prompt", "step", "tokens")

    def __init__(self, prompt, new, kind, cut):
        self.prompt, self.new, self.kind, self.cut = prompt, new, kind, cut
        self.length = len(prompt) // WIDTH  # stays when the prompt is dropped
        self.tokens, self.ended = b"", "running"
        self.at = self.step = 0  # its place among the requests, and the engine's steps when it came


class Prompts:
    """Packed ids that share prefixes: systems, documents of a system, questions of a document; a few on their own."""

    def __init__(self, args, words, rng):
        self.args, self.words, self.rng = args, words, rng
        longest = args.prompt
        systems = [self.text(longest // 8, longest // 4) for _ in range(3)]
        documents = [s + self.text(longest // 8, longest // 3) for s in systems for _ in range(3)]
        shared = [rng.choice(documents) + self.text(1, longest // 3) for _ in range(args.prompts * 3 // 4)]
        own = [self.text(longest // 2, longest) for _ in range(args.prompts - len(shared))]
        self.all = shared + own
        self.turns = [self.text(1, longest // 8) for _ in self.all]

    def text(self, least, most):
        count = self.rng.randint(max(1, least), max(1, most))
        if isinstance(self.words, int):
            return pack(self.rng.randrange(3, self.words) for _ in range(count))
        start = self.rng.randrange(len(self.words) - count)
        return pack(self.words[start : start + count])

    def draw(self, seconds):
        """A request: any prompt, an answer of any length; ``seconds``: about what a queued one waits."""
        rng = self.rng
        at, kind = rng.randrange(len(self.all)), rng.choices(KINDS, (70, 6, 12, 12))[0]
        new = self.args.answer if kind != "whole" or rng.random() < 0.3 else rng.randint(1, self.args.answer)
        cut = rng.expovariate(1 / seconds) if kind == "queued" else rng.randint(1, max(1, new - 1))
        # nothing of it in the cache, so that its chunks take several steps
        prompt = self.text(self.args.prompt * 3 // 4, self.args.prompt) if kind == "prefill" else self.all[at]
        return at, Request(prompt, new, kind, cut)


def words_of(args):
    """Tokens of a text where the model has a tokenizer that knows its words, else the number of ids."""
    config = json.loads((args.model / "config.json").read_text())
    size = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    if args.load_format == "dummy" or not (args.model / "tokenizer.json").is_file():
        return size
    from transformers import AutoTokenizer

    from kvcodec.models.loading import load_text

    ids = AutoTokenizer.from_pretrained(str(args.model))(load_text().text)["input_ids"]
    return ids if len(set(ids)) > 1000 else size

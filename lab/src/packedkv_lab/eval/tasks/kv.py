"""Key-value retrieval: a JSON object of random UUIDs and one key whose value is asked for ("Lost in the Middle",
arXiv:2307.03172). Records are generated; ``--data kv_retrieval=FILE`` takes those of the paper's own file instead.
"""

import gzip
import hashlib
import json
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from packedkv.errors import FormatError, KVError, ModelError
from packedkv_lab.eval.tasks.base import Item, Source, TaskSettings, token_ids
from packedkv_lab.eval.tasks.haystack import Place, largest
from packedkv_lab.eval.tasks.needle import Retrieval

HEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
MOST_TOKENS = 40
"""Of an answer: 36 characters, at most a token each, and the closing quote."""
DRAWS, PASSES = 32, 3
"""Records drawn for each one that is replaced by a longer one, and how often each is looked at."""

FORM = "JSON lines with ordered_kv_records, a list of [key, value]"
Pair = tuple[str, str]


class KeyValue(Retrieval):
    """The value of one key among as many as the length takes."""

    name = "kv_retrieval"
    summary = "the value of one UUID among as many as fit, by length and depth"
    hidden = False

    def material(self, tokenizer: Any, settings: TaskSettings) -> list[list[Pair]]:
        return self._records(settings)[0]

    def source(self, settings: TaskSettings) -> Source | None:
        return self._records(settings)[1]

    def _records(self, settings: TaskSettings) -> tuple[list[list[Pair]], Source | None]:
        """Records of the file; ``KVError`` if it cannot be read, ``FormatError`` if it holds something else."""
        if (path := settings.data.get(self.name)) is None:
            return [], None
        if path.is_dir():
            path = next(iter(sorted(path.glob("**/kv-retrieval*.jsonl*"))), path)
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        except (OSError, EOFError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise KVError(f"{self.name}: {path} cannot be read ({reason}); pass {FORM}.") from error
        records = []
        for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
            try:
                records.append(_pairs(json.loads(line)))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                missing = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise FormatError(f"{self.name}: {path}, record {number}: {missing}; expected {FORM}.") from error
        if not records:
            raise FormatError(f"{self.name}: {path} holds no records; expected {FORM}.")
        return records, Source(path.name, hashlib.sha256(raw).hexdigest())

    def item(self, tokenizer: Any, material: Sequence[Sequence[Pair]], seed: int, place: Place) -> Item:
        records = material
        rng = random.Random(f"{self.name} {seed} {place.length} {place.depth} {place.draw}")
        pairs = list(records[rng.randrange(len(records))]) if records else []
        rng.shuffle(pairs)

        def pair(i: int) -> Pair:
            while not records and i >= len(pairs):
                pairs.append((_uuid(rng), _uuid(rng)))
            return pairs[i]

        def prompt(others: int) -> str:
            shown = [pair(i + 1) for i in range(others)]
            shown.insert(round(place.depth * others), pair(0))
            lines = ",\n ".join(f'"{k}": "{v}"' for k, v in shown)
            return f'{HEAD}{{{lines}}}\n\nKey: "{pair(0)[0]}"\nCorresponding value: "'

        most = len(pairs) - 1 if records else place.length
        others = largest(tokenizer, place.length, prompt, most)
        if others < 1:
            raise ModelError(f"{self.name}: {place.length} tokens do not hold two keys; pass longer --lengths.")
        if not records:
            _fill(tokenizer, place.length, lambda: prompt(others), pairs, others, rng)
        text, value = prompt(others), pair(0)[1]
        return self.made(place, text, [value], value, MOST_TOKENS, stop=('"', "\n"))


def _fill(
    tokenizer: Any, length: int, prompt: Callable[[], str], pairs: list[Pair], others: int, rng: random.Random
) -> None:
    """Replace records by some of more tokens until the prompt has ``length``: only equally long ones share a call."""

    def tokens(pair: Pair) -> int:
        return len(token_ids(tokenizer, f'"{pair[0]}": "{pair[1]}"'))

    missing = length - len(token_ids(tokenizer, prompt()))
    for i in [*range(1, others + 1)] * PASSES:
        if not missing:
            return
        old = pairs[i]
        drawn = [(_uuid(rng), _uuid(rng)) for _ in range(DRAWS)]
        sizes = {pair: tokens(pair) for pair in drawn}
        room = tokens(old) + missing
        pairs[i] = max((p for p in sizes if sizes[p] <= room), key=sizes.__getitem__, default=old)
        left = length - len(token_ids(tokenizer, prompt()))
        if 0 <= left < missing:
            missing = left
        else:
            pairs[i] = old


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _pairs(record: dict[str, Any]) -> list[Pair]:
    pairs = [(str(key), str(value)) for key, value in record["ordered_kv_records"]]
    if len(pairs) < 2:
        raise ValueError("fewer than two pairs")
    return pairs

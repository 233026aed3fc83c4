"""Errors of attention scores by preset on a model's own keys: which layers fail, whether we warn, and what mends it.

    python benchmarks/key_errors.py MODEL [--specs A,B] [--text FILE] [--stress FACTOR:PAIRS] [--out FILE]

The uncompressed model reads one window of a text; ``kvcodec_lab.eval.key_errors`` says what is measured on its keys.
The file is written again after each preset, and a second call with it measures what it lacks.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from kvcodec.cli.measure import fidelity
from kvcodec.cli.measure.outliers import outliers_of
from kvcodec.cli.measure.perplexity import uncompressed
from kvcodec.cli.measure.rows import plain
from kvcodec.cli.stamp import versions
from kvcodec.integrations.transformers.biases import biases_of
from kvcodec.integrations.transformers.plan import plan_for
from kvcodec.key_layer import frequencies_of
from kvcodec.models.loading import load, load_text
from kvcodec.models.windows import split_windows, tokenize
from kvcodec.progress import Progress
from kvcodec.registry import presets, split_specs
from kvcodec_lab.eval.key_errors import key_errors
from kvcodec_lab.eval.stress import stress

WINDOW_TOKENS, QUERIES = 512, 128
FURTHER = ("hqmq-s192_r6:outliers=3", "hqmq-s192_r6:outliers=3,slots=8", "int-4:outliers=3,slots=8")
"""Measured beside the presets: what mends HQMQ and plain integers in HQMQ's paper."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--specs", type=split_specs, help="default: every preset, and Med3")
    parser.add_argument("--text", help="default: the packaged head of WikiText-2")
    parser.add_argument("--window-tokens", type=int, default=WINDOW_TOKENS)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--stress", metavar="FACTOR:PAIRS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    specs = args.specs or [*(name for name in presets() if name != "dense"), *FURTHER]
    progress, text = Progress(), load_text(args.text)
    model = load(args.model, dtype=args.dtype, progress=progress)
    factor, _, pairs = (args.stress or "").partition(":")
    about = {
        "model": Path(model.name).name,
        "text": text.name,
        "window_tokens": args.window_tokens,
        "queries": args.queries,
    }
    about |= {"dtype": args.dtype, "stress": {"factor": float(factor), "pairs": int(pairs)} if factor else None}
    with stress(model, float(factor), int(pairs)) if factor else nullcontext():
        window = split_windows(tokenize(model.tokenizer, text.text, args.window_tokens), 1, args.window_tokens)[0]
        with fidelity.record(model.model, args.queries) as found:
            uncompressed(model.model, window)
        records = [r for r in found if r.source is None]
        biases = biases_of(model.model, plan_for(model.model, "decoded"))
        config = model.model.config.get_text_config(decoder=True)
        frequencies = frequencies_of(config, records[0].k.shape[-1])
        data = {**about, "versions": versions(), "outliers": [outliers_of(r.layer, r.k) for r in records]}
        data["rows"] = kept(args.out, about)
        for i, spec in enumerate(specs):
            if any(row["spec"] == spec for row in data["rows"]):
                continue
            progress.bar("key errors", i, len(specs), spec)
            data["rows"].append(key_errors(records, spec, frequencies=frequencies, biases=biases))
            save(args.out, data)
    save(args.out, data)
    if not args.out:
        print(written(data))
    return 0


def save(path: Path | None, data: dict) -> None:
    if path is not None:
        path.write_text(written(data))


def kept(path: Path | None, about: dict) -> list[dict]:
    """Rows of an earlier call on the same; a file of something else is refused."""
    if path is None or not path.is_file():
        return []
    data = json.loads(path.read_text())
    if differs := [name for name, value in about.items() if data.get(name) != value]:
        sys.exit(f"{path} was measured with another {', '.join(differs)}; name another file.")
    return data["rows"]


def written(data: dict) -> str:
    """JSON with a row to a line."""
    lines = {name: json.dumps(value) for name, value in plain(data).items() if name not in ("outliers", "rows")}
    for name in ("outliers", "rows"):
        lines[name] = "[\n  " + ",\n  ".join(json.dumps(row) for row in plain(rounded(data[name]))) + "\n ]"
    return "{" + ",\n ".join(f'"{name}": {text}' for name, text in lines.items()) + "}\n"


def rounded(value):
    """Five digits of every float."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())

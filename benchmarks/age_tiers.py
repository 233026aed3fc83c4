"""What the newest tokens of a cache are worth in more bits: KL of age tiers beside plain presets, as in generation.

    python benchmarks/age_tiers.py [MODEL] [--specs A,B] [--tokens 2048,4096] [--windows 1] [--call 64] [--out FILE]

A window of a text is fed in calls of ``--call`` tokens, each of which attends what the cache then holds
(``prefill="decoded"``), so a query finds its newest neighbours in the newer tier; ``kvcodec compare`` gives a window to
the cache in one call, where only the last queries do. ``kl``: mean over the tokens of positions 1 to ``tokens``, in
nats, to the uncompressed model, with the standard error over tokens; ``effective_bits``: all bytes held behind
``tokens`` tokens, both tiers, reserve and tables. The file is written after each spec, and a second call with it
measures what it lacks.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from kvcodec.cli.measure.perplexity import Reference, uncompressed
from kvcodec.cli.stamp import versions
from kvcodec.integrations.transformers.argument import passing
from kvcodec.integrations.transformers.recording import CacheMaker
from kvcodec.models.loading import LoadedModel, load, load_text
from kvcodec.models.windows import check_window, split_windows, tokenize
from kvcodec.progress import Progress
from kvcodec.registry import split_specs

SPECS = (
    "saw-int4", "turboquant-4", "turboquant-3", "turboquant-3:window=128", "turboquant-3:window=256,recent=int-8",
    "ghost-4", "ghost-3", "ghost-3:window=256,recent=int-8", "octopus-3", "octopus-3:window=1024,recent=int-8",
    "kivi-2", "kivi-2:window=256,recent=int-8",
)  # fmt: skip


def scores(
    model: LoadedModel, spec: str, windows: list[torch.Tensor], references: list[Reference], at: list[int], call: int
) -> list[dict[str, Any]]:
    """Rows of one spec, one for each length of ``at``."""
    kl: dict[int, list[torch.Tensor]] = {n: [] for n in at}
    agree: dict[int, list[torch.Tensor]] = {n: [] for n in at}
    bits: dict[int, list[float]] = {n: [] for n in at}
    with CacheMaker(model.model, spec, remember=True).attending() as new_cache, torch.no_grad():
        for window, reference in zip(windows, references, strict=True):
            cache, ids = new_cache(), window.to(model.model.device)[None]
            found_kl, found_top = [], []
            for a in range(0, max(at), call):
                given = passing(model.model, cache)
                logits = model.model(input_ids=ids[:, a : a + call], **given, use_cache=True).logits[0]
                last = a + logits.shape[0] == ids.shape[1]  # what follows the window is not known
                found = reference.compare(logits[:-1] if last else logits, a + 1)
                found_kl.append(found.kl.double())
                found_top.append(found.top1)
                if (held := min(a + call, max(at))) in at:
                    bits[held].append(cache.report()["effective_bits"])
            for n in at:
                kl[n].append(torch.cat(found_kl)[: n - 1])
                agree[n].append(torch.cat(found_top)[: n - 1])
    rows = []
    for n in at:
        each, same = torch.cat(kl[n]), torch.cat(agree[n]).double()
        rows.append(
            {
                "spec": spec,
                "tokens": n,
                "effective_bits": round(sum(bits[n]) / len(bits[n]), 3),
                "kl": float(each.mean()),
                "kl_se": float(each.std() / len(each) ** 0.5),
                "top1_agreement": float(same.mean()),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--specs", type=split_specs, default=list(SPECS))
    parser.add_argument("--tokens", default="2048,4096", help="lengths, of one window that is as long as the last")
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--call", type=int, default=64)
    parser.add_argument("--text", help="default: the packaged head of WikiText-2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    at, text, progress = sorted(map(int, args.tokens.split(","))), load_text(args.text), Progress()
    model = load(args.model, progress=progress)
    check_window(model.model.config, at[-1])
    ids = tokenize(model.tokenizer, text.text, args.windows * at[-1])
    windows = split_windows(ids, args.windows, at[-1])
    about = {"model": Path(model.name).name, "text": text.name, "windows": len(windows), "call_tokens": args.call}
    rows: list[dict[str, Any]] = []
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text())
        if {name: before[name] for name in about} != about:
            raise SystemExit(f"{args.out} holds other settings; give another file.")
        rows = before["rows"]
    references = [uncompressed(model.model, window) for window in windows]
    for spec in args.specs:
        if {row["tokens"] for row in rows if row["spec"] == spec} >= set(at):
            continue
        new = scores(model, spec, windows, references, at, args.call)
        rows += new
        for row in new:
            print(
                f"{row['spec']:40} {row['tokens']:6} {row['effective_bits']:6.3f} {row['kl']:.5f} +- {row['kl_se']:.5f}"
            )
        if args.out:
            args.out.write_text(json.dumps({**about, "versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""``packedkv compare``: presets on your model and text, one row each."""

import argparse
from collections.abc import Sequence
from typing import Any

from packedkv.cli.arguments import Result, add_model, add_probe, add_reading, add_text, not_negative, specs
from packedkv.errors import KVError

NEW_TOKENS = 32


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_model(p)
    p.add_argument("--specs", type=specs, required=True, metavar="A,B", help="presets, e.g. saw-int4,kivi-2:window=64")
    add_text(p)
    p.add_argument(
        "--new-tokens",
        type=not_negative,
        default=NEW_TOKENS,
        metavar="N",
        help="generated tokens; 0 for none (%(default)s)",
    )
    add_probe(p)
    add_reading(p)


def run(args: argparse.Namespace) -> Result:
    from packedkv.cli.measure.compare import about
    from packedkv.cli.measure.rows import plain, table

    rows = measure(args, args.specs)
    return Result(rows, f"{table(plain(rows))}\n\n{about(rows)}")


def measure(args: argparse.Namespace, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Load text and model, and compare; all options are validated before the model loads."""
    from packedkv.cli.measure.compare import Settings, compare
    from packedkv.models.loading import load, load_text
    from packedkv.progress import Progress

    params = read_constants(args.params, wanted)
    text = load_text(args.text)
    progress = Progress()
    same = ("windows", "window_tokens", "prefill", "seed", "budget", "new_tokens")
    settings = Settings(
        **{name: getattr(args, name) for name in same},
        text_name=text.name,
        text_sha256=text.sha256,
        probe=args.probe or "refuse",
    )
    model = load(args.model, progress=progress, device=args.device, dtype=args.dtype)
    return compare(model, wanted, text.text, settings, params=params, progress=progress)


def read_constants(files: Sequence[str], wanted: Sequence[str]) -> list[Any]:
    """Read files of fitted constants, each for one of the specs."""
    from packedkv.cli.measure.quantized_cache import quantized_cache_of
    from packedkv.files.params import match_params, read_params
    from packedkv.registry import get

    schemes = [get(spec) for spec in wanted if quantized_cache_of(spec) is None]
    try:
        params = [read_params(path) for path in files]
    except OSError as error:
        raise KVError(str(error)) from error
    match_params(params, schemes)
    return params

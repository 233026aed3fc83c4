"""``packedkv fit``: fit constants of a preset to your model, on your text or on the model's own samples."""

import argparse
import time

from packedkv.cli.arguments import Result, add_device, add_model, at_least, check_target, positive
from packedkv.errors import KVError


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_model(p)
    p.add_argument("spec", metavar="SPEC", help="a preset with constants to fit, e.g. innerq-base")
    p.add_argument(
        "--text", metavar="FILE", help="UTF-8 text; not the one that you measure on (default: the model's own samples)"
    )
    p.add_argument("-o", "--out", required=True, metavar="PARAMS", help="the file to write, for --params")
    p.add_argument("--windows", type=positive, default=4, metavar="N", help="windows of text (%(default)s)")
    p.add_argument(
        "--window-tokens", type=at_least(2), metavar="N", help="tokens of a window (2048; of own samples 1024)"
    )
    p.add_argument(
        "--max-tokens",
        type=positive,
        default=8192,
        metavar="N",
        help="tokens that a layer is fitted on, at most (%(default)s)",
    )
    p.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of own samples and of random constants (%(default)s)"
    )
    add_device(p)


def run(args: argparse.Namespace) -> Result:
    from packedkv.fitting.fit import about, about_text, check_fit, fit_model
    from packedkv.models.loading import load, load_text
    from packedkv.progress import Progress

    check_target("--out", args.out)
    text = load_text(args.text) if args.text else None
    check_fit(args.spec, text.text if text else None, args.window_tokens)
    begun, progress = time.monotonic(), Progress()
    model = load(args.model, progress=progress, device=args.device, dtype=args.dtype)
    fitted = fit_model(
        model,
        args.spec,
        text.text if text else None,
        windows=args.windows,
        window_tokens=args.window_tokens,
        max_tokens=args.max_tokens,
        seed=args.seed,
        text_name=text.name if text else "",
        progress=progress,
    )
    try:
        fitted = fitted.save(args.out)
    except OSError as error:
        raise KVError(str(error)) from error
    summary = about(fitted) | {"file": args.out, "seconds": time.monotonic() - begun}
    return Result(summary, about_text(summary, args.windows))

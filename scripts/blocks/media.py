"""docs/video-audio.md: speech and video.

speech, speech-summary, speech-tiny, speech-tiny-summary
            Whisper with packed caches, from SPEECH and SPEECH_TINY
video, video-summary
            rollouts of the video model trained here, from VIDEO
findings    OCTOPUS's findings on video and audio, on models of ours, from the files of `own_models.OWN`
frames, frames-summary
            attention of a frame and of an audio step on a GPU, from FRAMES
"""

from functools import partial
from pathlib import Path
from typing import Any

from blocks.sources import Blocks, MissingResultError, row_of, rows_of
from kvcodec.cli.page import figures, pictures
from kvcodec.cli.page.tables import markdown
from kvcodec.cli.page.words import listed
from kvcodec_lab.reproduce import own_models

SPEECH, SPEECH_TINY = (Path(f"benchmarks/results/cpu/speech_whisper-{name}.json") for name in ("base", "tiny.en"))
SPEECH_BITS, SPEECH_POINTS = 4.5, 0.5
SPEECH_FIGURE, VIDEO_FIGURE = (Path(f"docs/img/{name}-bits.png") for name in ("speech", "video"))
DRIFT_FIGURE = Path("docs/img/video-drift.png")
DRIFTING = ("int-8", "octopus-4", "saw-int4", "turboquant-3", "octopus-3", "octopus-2", "turboquant-2")
"""Presets in DRIFT_FIGURE."""
VIDEO, FRAMES = (Path(f"benchmarks/results/nvidia-h100/{name}.json") for name in ("video_digits", "frames"))


def speech_rows(root: Path, file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of a file, the smallest cache last; and the 16-bit one."""
    rows = sorted(media_rows(root, file), key=lambda row: -row["effective_bits"])
    return rows, row_of(rows, "dense")


def speech_block(root: Path, file: Path = SPEECH) -> str:
    """Bits, word errors, KL and bytes of each preset."""
    rows, _ = speech_rows(root, file)
    heads = [
        "preset",
        "bits held",
        "word errors %",
        "beside 16 bit %",
        "KL a token",
        "largest",
        "MB a stream",
        "GB of 64",
    ]
    lines = []
    for row in rows:
        size = sum(row["bytes"].values())
        errors = [f"{100 * row[key]:.2f}" for key in ("wer_reference", "wer_16bit")]
        moved = [f"{row['kl']:.4f}", f"{row['kl_largest']:.2f}"]
        held = [f"{size / 1e6:.2f}", f"{64 * size / 1e9:.2f}"]
        lines.append([f"`{row['spec']}`", f"{row['effective_bits']:.2f}", *errors, *moved, *held])
    return markdown(heads, lines)


def speech_summary_block(root: Path, file: Path = SPEECH) -> str:
    """Which presets are within half a point of 16 bit at up to 4.5 bits, and what a stream holds."""
    rows, plain = speech_rows(root, file)
    small = [row for row in rows if row["effective_bits"] <= SPEECH_BITS]
    near = [row for row in small if row["wer_reference"] - plain["wer_reference"] <= SPEECH_POINTS / 100]
    cross, whole = plain["bytes"]["cross"], sum(plain["bytes"].values())
    names = listed([f"`{row['spec']}`" for row in near])
    read = {row["spec"]: [row["errors_and_words_by_set"][name] for name in ("jfk", "ljspeech")] for row in rows}
    wrong = {spec: sum(errors for errors, _ in sets) for spec, sets in read.items()}
    heard = f"16 bit has {wrong['dense']} wrong and the presets {min(wrong.values())} to {max(wrong.values())}"
    return (
        f"{plain['streams']} clips, {plain['words']['reference']} words of reference text, {plain['tokens']:,} tokens. "
        f"Of the presets at up to {SPEECH_BITS} bits held, {len(near)} of {len(small)} make at most {SPEECH_POINTS} "
        f"points more word errors than 16 bit ({100 * plain['wer_reference']:.2f} %): {names}. Of the "
        f"{sum(n for _, n in read['dense'])} words that are no digits {heard}. The cross-attention holds "
        f"{100 * cross / whole:.0f} % of a stream's {whole / 1e6:.1f} MB."
    )


def media_rows(root: Path, file: Path) -> list[dict[str, Any]]:
    """Rows of a file that docs/video-audio.md shows."""
    path = root / file
    rows = rows_of(path) if path.is_file() else []
    if not rows:
        raise MissingResultError(f"{file} does not exist; docs/video-audio.md says what makes it.")
    return rows


def video_block(root: Path) -> str:
    """Bits and the least, mean and largest over the prompts of each metric."""
    rows = media_rows(root, VIDEO)
    heads = [
        "preset",
        "bits of codes",
        "bits held",
        "PSNR dB",
        "SSIM",
        "feature distance",
        "frames alike",
        "as the world %",
    ]
    lines = []
    for row in rows:
        bits = [f"{(row['key_bits'] + row['value_bits']) / 2:.2f}", f"{row['effective_bits']:.2f}"]
        forms = (("psnr", "{:.1f}", 1), ("ssim", "{:.2f}", 1), ("feature", "{:.3f}", 1), ("alike", "{:.0f}", 1))
        cells = [
            " / ".join(form.format(unit * x) for x in row[name])
            for name, form, unit in (*forms, ("truth", "{:.1f}", 100))
        ]
        lines.append([f"`{row['spec']}`", *bits, *cells])
    return markdown(heads, lines)


def video_summary_block(root: Path) -> str:
    """OCTOPUS's findings on video, on this model: 4 bits, 2 bits, the sketch."""
    rows = media_rows(root, VIDEO)

    def psnr(spec: str) -> float:
        return float(row_of(rows, spec)["psnr"][1])

    four = ("saw-int4", "kivi-4:group=32", "octopus-4", "turboquant-4", "hqmq-s96_r4", "int-4")
    of_four = [psnr(spec) for spec in four]
    return (
        f"Mean PSNR beside the 16-bit rollout: the presets of 4 bits lie between {min(of_four):.1f} and "
        f"{max(of_four):.1f} dB, `int-8` at {psnr('int-8'):.1f}; at 3 bits `octopus-3` {psnr('octopus-3'):.1f}, "
        f"`turboquant-3` {psnr('turboquant-3'):.1f}; at 2 bits `octopus-2` {psnr('octopus-2'):.1f}, `turboquant-2` "
        f"{psnr('turboquant-2'):.1f}. TurboQuant's sketch at the same bits: `turboquant-qjl-3` "
        f"{psnr('turboquant-qjl-3'):.1f}."
    )


def write_figures(root: Path) -> None:
    """Draw SPEECH_FIGURE and VIDEO_FIGURE, what moved over the bits held, and DRIFT_FIGURE, over time."""
    x = figures.Axis("bits held per element of K and V (all bytes x 8 / elements; uncompressed: 16)")
    heard, plain = speech_rows(root, SPEECH)
    drawn = [figures.Point(row["spec"], row["effective_bits"], row["kl"]) for row in heard if row["spec"] != "dense"]
    y = figures.Axis("KL a token along the 16-bit text, nats", "log")
    note = f"{plain['streams']} clips, both caches; lower and further left is better"
    pictures.write([figures.Plot("Whisper base", x, y, drawn, names="all", note=note)], root / SPEECH_FIGURE)
    seen = [row for row in media_rows(root, VIDEO) if row["spec"] != "dense"]
    drawn = [figures.Point(row["spec"], row["effective_bits"], row["psnr"][1]) for row in seen]
    y = figures.Axis("mean PSNR beside the 16-bit rollout, dB")
    note = "300 frames, 32 prompts, whose spread is larger than that of methods; higher and further left is better"
    plot = figures.Plot("Video model of 14 M", x, y, drawn, better="higher", names="all", note=note)
    pictures.write([plot], root / VIDEO_FIGURE)
    styles = figures.curve_styles(DRIFTING)
    curves = [
        figures.Curve(spec, [(float(end), psnr) for end, psnr in row_of(seen, spec)["drift"].items()], styles[spec])
        for spec in DRIFTING
    ]
    x = figures.Axis("frames of a rollout, from the number before up to this one", "doubling")
    pictures.write([figures.Plot(plot.title, x, y, curves=curves, names="legend")], root / DRIFT_FIGURE)


def findings_block(root: Path) -> str:
    """Each finding as a ratio of errors: the paper's and ours, and whether ours lies within its bound."""
    claims = {
        own.name: {c.item: c for c in own_models.own_claims(own, own_models.errors_of(own, rows_of(file)))}
        for own in own_models.OWN
        if (file := root / own_models.RESULTS / own.file).is_file()
    }
    if not claims:
        raise MissingResultError(f"none of the files of `own_models.OWN` is under {own_models.RESULTS}.")
    heads = ["errors of", *(part for name in claims for part in ("paper's", name, "holds"))]
    lines = []
    for item in dict.fromkeys(item for of in claims.values() for item in of):
        cells = []
        for of in claims.values():
            if (claim := of.get(item)) is None:
                cells += ["", "", ""]
                continue
            printed = "" if "not printed" in claim.note else claim.printed
            cells += [printed, f"{claim.ours:.3g}", "yes" if claim.row("octopus", "")["holds"] else "no"]
        lines.append([item, *cells])
    return markdown(heads, lines)


def frames_block(root: Path) -> str:
    """Microseconds, times as fast as bf16, and megabytes, of a frame's attention and of an audio step."""
    rows = media_rows(root, FRAMES)
    parts = {
        "frame": [row for row in rows if row["part"] == "frame"],
        "64 streams": [row for row in rows if row["part"] == "step" and row["batch"] == 64],
        "1 stream": [row for row in rows if row["part"] == "step" and row["batch"] == 1],
    }
    lines = []
    for name, part in parts.items():
        cudnn = row_of(part, "bf16 cudnn")["us"]
        for row in part:
            times = f"{row['us']:,.0f}", f"{row['vs_flash']:.2f}", f"{cudnn / row['us']:.2f}"
            lines.append([name, f"`{row['spec']}`", *times, f"{row['bytes'] / 1e6:,.1f}"])
    return markdown(["", "", "us", "x flash", "x cuDNN", "MB"], lines, text=(0, 1))


def frames_summary_block(root: Path) -> str:
    """How a frame's attention compares with bf16's, and what ran."""
    rows = media_rows(root, FRAMES)
    frame = [row for row in rows if row["part"] == "frame"]
    ours, cudnn = [row_of(frame, spec)["us"] for spec in ("saw-int4", "octopus-3")], row_of(frame, "bf16 cudnn")["us"]
    flash, fastest = ([f"{of / us:.2f}" for us in ours] for of in (row_of(frame, "bf16 flash")["us"], cudnn))
    names = {"cudnn": "cuDNN's", "flash_fwd": "PyTorch's flash"}
    ran = listed(sorted({names[row["by"]] for row in frame if "by" in row}))
    plan = next(row for row in rows if row["part"] == "plan")
    return (
        f"With `saw-int4` and `octopus-3` a frame's attention is {' and '.join(flash)} times as fast as flash "
        f"attention over bf16, and {' and '.join(fastest)} times as fast as cuDNN's. What ran over the unpacked pages "
        f"was {ran} attention. A plan takes {plan['ms']:.0f} ms, once for a length."
    )


BLOCKS: Blocks = {
    "speech": (Path("docs/video-audio.md"), speech_block),
    "speech-summary": (Path("docs/video-audio.md"), speech_summary_block),
    "speech-tiny": (Path("docs/video-audio.md"), partial(speech_block, file=SPEECH_TINY)),
    "speech-tiny-summary": (Path("docs/video-audio.md"), partial(speech_summary_block, file=SPEECH_TINY)),
    "video": (Path("docs/video-audio.md"), video_block),
    "video-summary": (Path("docs/video-audio.md"), video_summary_block),
    "findings": (Path("docs/video-audio.md"), findings_block),
    "frames": (Path("docs/video-audio.md"), frames_block),
    "frames-summary": (Path("docs/video-audio.md"), frames_summary_block),
}

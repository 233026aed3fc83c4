"""docs/video-audio.md: speech and video.

speech, speech-summary
            Whisper with packed caches, from SPEECH
video, video-summary
            rollouts of the video model trained here, from VIDEO
findings    OCTOPUS's findings on video and audio, on models of ours, from the files of `own_models.OWN`
frames      attention of a frame and of an audio step on a GPU, from FRAMES
"""

from pathlib import Path
from typing import Any

from blocks.sources import Blocks, MissingResultError, row_of, rows_of
from kvcodec_lab.report import figures, pictures
from kvcodec_lab.report.tables import markdown
from kvcodec_lab.report.words import listed
from kvcodec_lab.reproduce import own_models

SPEECH = Path("benchmarks/results/cpu/speech_whisper-base.json")
SPEECH_BITS, SPEECH_POINTS = 4.5, 0.5
SPEECH_FIGURE, VIDEO_FIGURE = (Path(f"docs/img/{name}-bits.png") for name in ("speech", "video"))
VIDEO, FRAMES = (Path(f"benchmarks/results/nvidia-h100/{name}.json") for name in ("video_digits", "frames"))


def speech_rows(root: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of SPEECH, the smallest cache last; and the 16-bit one."""
    rows = sorted(media_rows(root, SPEECH), key=lambda row: -row["effective_bits"])
    return rows, row_of(rows, "dense")


def speech_block(root: Path) -> str:
    """Bits, word errors, KL and bytes of each preset."""
    rows, _ = speech_rows(root)
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


def speech_summary_block(root: Path) -> str:
    """Which presets are within half a point of 16 bit at up to 4.5 bits, and what a stream holds."""
    rows, plain = speech_rows(root)
    small = [row for row in rows if row["effective_bits"] <= SPEECH_BITS]
    near = [row for row in small if row["wer_reference"] - plain["wer_reference"] <= SPEECH_POINTS / 100]
    cross, whole = plain["bytes"]["cross"], sum(plain["bytes"].values())
    names = listed([f"`{row['spec']}`" for row in near])
    return (
        f"{plain['streams']} clips, {plain['words']['reference']} words of reference text, {plain['tokens']:,} tokens. "
        f"Of the presets at up to {SPEECH_BITS} bits held, {len(near)} of {len(small)} make at most {SPEECH_POINTS} "
        f"points more word errors than 16 bit ({100 * plain['wer_reference']:.2f} %): {names}. The cross-attention "
        f"holds {100 * cross / whole:.0f} % of a stream's {whole / 1e6:.1f} MB."
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
    """Draw SPEECH_FIGURE and VIDEO_FIGURE: what moved, over the bits held."""
    x = figures.Axis("bits held per element of K and V (all bytes x 8 / elements; uncompressed: 16)")
    heard, plain = speech_rows(root)
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
    """Microseconds, and times as fast as bf16, of a frame's attention and of an audio step."""
    rows = media_rows(root, FRAMES)
    parts = {
        "frame": [row for row in rows if row["part"] == "frame"],
        "64 streams": [row for row in rows if row["part"] == "step" and row["batch"] == 64],
        "1 stream": [row for row in rows if row["part"] == "step" and row["batch"] == 1],
    }
    heads = ["", *(f"{name} {what}" for name in parts for what in ("us", "x flash", "x cuDNN"))]
    lines = []
    for first in parts["frame"]:
        cells = []
        for part in parts.values():
            row = row_of(part, first["spec"])
            cudnn = row_of(part, "bf16 cudnn")["us"] / row["us"]
            cells += [f"{row['us']:,.0f}", f"{row['vs_flash']:.2f}", f"{cudnn:.2f}"]
        lines.append([f"`{first['spec']}`", *cells])
    return markdown(heads, lines)


BLOCKS: Blocks = {
    "speech": (Path("docs/video-audio.md"), speech_block),
    "speech-summary": (Path("docs/video-audio.md"), speech_summary_block),
    "video": (Path("docs/video-audio.md"), video_block),
    "video-summary": (Path("docs/video-audio.md"), video_summary_block),
    "findings": (Path("docs/video-audio.md"), findings_block),
    "frames": (Path("docs/video-audio.md"), frames_block),
}

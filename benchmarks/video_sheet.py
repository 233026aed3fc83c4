"""Pictures of the rollouts that ``video.py`` kept: presets below each other over time, or side by side and moving.

    python benchmarks/video_sheet.py FOLDER/video.npz docs/img/video.png [--prompt 0] [--specs truth,dense,...]
    python benchmarks/video_sheet.py FOLDER/video.npz docs/img/video.gif [--prompt 0] [--specs dense,...]

A name that ends in ``.gif`` makes the moving one.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from PIL import Image, ImageDraw

TIMES = (0, 5, 10, 20, 40, 80, 120, 180, 240, 299)
SPECS = "truth,dense,int-8,saw-int4,octopus-4,octopus-3,turboquant-3,octopus-2,turboquant-2,turboquant-qjl-2"
MOVING = "truth,dense,kivi-4:group=32,octopus-2,turboquant-2"
ZOOM, GAP, HEAD = 4, 8, 16
"""Pixels of the moving picture: of a frame's pixel, between two rollouts, and of the names above them."""
INK = ((16, 16, 16), (255, 255, 255), (210, 60, 60), (120, 170, 255))
"""Ground, a pixel as in 16 bit, one that 16 bit has not, and one that only 16 bit has."""
MILLISECONDS = 120
"""Of a frame; the last one stays for a second."""

Frames = np.ndarray[Any, np.dtype[np.uint8]]
"""Rollouts by time, 0 and 1: ``[300, 32, 32]``."""


def titled(spec: str) -> str:
    return {"truth": "world", "dense": "16 bit"}.get(spec, spec)


def sheet(rollouts: dict[str, Frames], out: Path) -> None:
    """Write a still picture: a row for each rollout, some of its frames from left to right."""
    figure, axes = pyplot.subplots(
        len(rollouts), len(TIMES), figsize=(0.8 * len(TIMES) + 1.6, 0.8 * len(rollouts) + 0.3)
    )
    for row, (spec, frames) in zip(axes, rollouts.items(), strict=True):
        for axis, time in zip(row, TIMES, strict=True):
            axis.imshow(frames[time], cmap="gray", interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(titled(spec), rotation=0, ha="right", va="center", fontsize=8)
    for axis, time in zip(axes[0], TIMES, strict=True):
        axis.set_title(str(time + 1), fontsize=8)
    figure.tight_layout(pad=0.3)
    figure.savefig(out, dpi=110)


def moving(rollouts: dict[str, Frames], out: Path, last: int) -> None:
    """Write a GIF of the rollouts side by side; pixels that differ from 16 bit have colours of their own."""
    side, wanted = ZOOM * next(iter(rollouts.values())).shape[1], rollouts["dense"]
    width, pictures = len(rollouts) * (side + GAP) + GAP, []
    for time in range(last):
        picture = Image.new("P", (width, side + GAP + HEAD), 4)
        picture.putpalette([c for colour in (*INK, (244, 244, 244)) for c in colour])
        draw = ImageDraw.Draw(picture)
        for i, (spec, frames) in enumerate(rollouts.items()):
            mine, theirs = frames[time].astype(bool), wanted[time].astype(bool)
            which = mine.astype(np.uint8)
            if spec != "truth":
                which[mine & ~theirs], which[theirs & ~mine] = 2, 3
            left = GAP + i * (side + GAP)
            picture.paste(Image.fromarray(which.repeat(ZOOM, 0).repeat(ZOOM, 1), "L"), (left, HEAD))
            draw.text((left, 2), titled(spec), fill=0)
        draw.text((width - GAP - 24, 2), f"{time + 1:4}", fill=0)
        pictures.append(picture)
    shown = [MILLISECONDS] * (last - 1) + [1000]
    pictures[0].save(out, save_all=True, append_images=pictures[1:], duration=shown, loop=0, optimize=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frames", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--specs", help="comma-separated")
    parser.add_argument("--last", type=int, default=45, help="frames of the moving picture")
    given = parser.parse_args()
    kept, moves = np.load(given.frames), given.out.suffix == ".gif"
    specs = (given.specs or (MOVING if moves else SPECS)).split(",")
    rollouts = {s: np.unpackbits(kept[s][given.prompt], axis=-1) for s in specs if s in kept.files}
    if moves:
        moving(rollouts, given.out, given.last)
    else:
        sheet(rollouts, given.out)


if __name__ == "__main__":
    main()

"""Contact sheet of the rollouts that ``video.py`` kept: presets below each other, time from left to right.

python benchmarks/video_sheet.py FOLDER/frames.npz docs/img/video.png [--prompt 0] [--specs truth,dense,...]
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib import pyplot

TIMES = (0, 5, 10, 20, 40, 80, 120, 180, 240, 299)
SPECS = "truth,dense,int-8,saw-int4,octopus-4,octopus-3,turboquant-3,octopus-2,turboquant-2,turboquant-qjl-2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frames", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--specs", default=SPECS)
    given = parser.parse_args()
    kept = np.load(given.frames)
    specs = [spec for spec in given.specs.split(",") if spec in kept.files]
    figure, axes = pyplot.subplots(len(specs), len(TIMES), figsize=(0.8 * len(TIMES) + 1.6, 0.8 * len(specs) + 0.3))
    for row, spec in zip(axes, specs, strict=True):
        frames = np.unpackbits(kept[spec][given.prompt], axis=-1)
        for axis, time in zip(row, TIMES, strict=True):
            axis.imshow(frames[time], cmap="gray", interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel("world" if spec == "truth" else spec, rotation=0, ha="right", va="center", fontsize=8)
    for axis, time in zip(axes[0], TIMES, strict=True):
        axis.set_title(str(time + 1), fontsize=8)
    figure.tight_layout(pad=0.3)
    figure.savefig(given.out, dpi=110)


if __name__ == "__main__":
    main()

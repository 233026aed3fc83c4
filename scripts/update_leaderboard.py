"""Publish runs of `kvcodec eval`, and write docs/leaderboard.md and its figures from those that are published.

    scripts/update_leaderboard.py                            write page and figures (scripts/update_readme.py: README)
    scripts/update_leaderboard.py --check                    compare only
    scripts/update_leaderboard.py --add NAME=FOLDER          publish a run first, in place of one of that name
    scripts/update_leaderboard.py --unpack NAME=FOLDER       make a published run's folder again

A run is published as benchmarks/results/eval/NAME/: run.json, results.json with the rows of whole tasks, and
items.jsonl.gz, from which every row can be made again. FOLDER is what `kvcodec eval --output` or
`benchmarks/evaluate.py --out` wrote.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from kvcodec.cli.page import pictures
from kvcodec.cli.page.figures import Plot
from kvcodec.errors import KVError
from kvcodec_lab.eval.merge import PACKED, pack, unfinished, unpack, write_results
from kvcodec_lab.eval.store import read_run
from kvcodec_lab.report.pages.leaderboard import Runs, pair_plots, plots, prediction, read_runs, tables
from kvcodec_lab.report.ranks import WITHIN

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("benchmarks/results/eval")
PAGE, FIGURE = Path("docs/leaderboard.md"), Path("docs/img/leaderboard.png")
PAIRS = Path("docs/img/leaderboard-models.png")

HEAD = """\
# Leaderboard

Every preset by the same program on the same items, a section for each model, the one that caches the most per token
first; plain, and on [keys with outlier channels](stress.md).
Written by `scripts/update_leaderboard.py`; [what a task is and what its numbers say](evaluate.md).
"""
NONE = """\
No results are published yet: `benchmarks/evaluate.py` makes them.
"""
READING = """\
Bits are true ones: every byte held when the scored text was read x 8 / elements, in the first run's prompts. Brackets
are 95 % intervals over items; `difference` is from the uncompressed model on the same items, paired. Presets stand in
the order of the first value column; where intervals overlap, that order says little. Runs called `mean=auto`
[remove key biases from the keys](key-biases.md) where a preset breaks on them; all others have `mean=none`, unless a
row says `mean=pre`. The default also removes them for `int-8`, `octopus`, `octopus-qjl`, `ultra-tq`, `ultraquant` and
`rope-pairs`, which lose less with it.
"""
PREDICTS = f"""\
## What one model says about another

Presets that both runs have, ordered by KL. Brackets are 95 % intervals over windows; they do not cover another text. A
preset holds where its perplexity is at most {100 * (WITHIN - 1):.0f} % above the uncompressed model's; otherwise it
breaks. Bits of a preset differ with head_dim; they stand in each model's own tables.
"""
ADDING = """\
## Add a row

A preset of your own (`--codec-file`), other options of one, or a model of your own. The same command goes on with a
folder and adds specs to it; another model, seed, device or data is a run of its own. The published runs can be gone on
with, on the device that they name:

```sh
scripts/update_leaderboard.py --unpack NAME=FOLDER     # a published run
kvcodec eval MODEL --specs SPEC --tasks TASKS --output FOLDER    # tasks and settings as in its run.json
scripts/update_leaderboard.py --add NAME=FOLDER        # publishes it, writes this page
```

`benchmarks/evaluate.py` runs all presets at once, in processes that share a GPU and in calls of limited length. A run
with items left of a task is refused; a spec may lack whole tasks, and its cells there stay empty. In a pull request:
the folder below `benchmarks/results/eval/`, this page and its figure.

`kvcodec report FOLDER -o report.html` makes [the page of a run](report.md), with heat maps of grids, from an unpacked
folder; of `benchmarks/results/eval/NAME` itself, all but the heat maps.
"""


def page(runs: Runs) -> str:
    """The page's Markdown."""
    if not runs:
        return "\n".join([HEAD, NONE, ADDING])
    picture = f"![KL over effective bits](img/{FIGURE.name})\n"
    parts = [HEAD, picture, READING]
    if told := prediction(runs):
        parts += [PREDICTS, f"![KL on one model over KL on another](img/{PAIRS.name})\n", told + "\n"]
    return "\n".join([*parts, tables(runs) + "\n", ADDING])


def write_figures(runs: Runs, root: Path) -> list[Path]:
    """Draw the figures that the runs have points for; which they are."""
    drawn: dict[Path, list[Plot]] = {FIGURE: plots(runs), PAIRS: pair_plots(runs)}
    for path, panels in drawn.items():
        if panels:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            pictures.write(panels, root / path)
    return [path for path, panels in drawn.items() if panels]


def add(name: str, folder: Path, root: Path) -> None:
    """Publish a run.

    Raises
    ------
    KVError
        If items of a task are left, or the folder is no run.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if (folder / PACKED).is_file():
            folder = unpack(folder, temporary).folder
        left = unfinished(read_run(folder))
        if left:
            spec, lacks = next(iter(left.items()))
            raise KVError(
                f"{folder}: {len(left)} specs have items left, e.g. {spec} {lacks}; give the same call again first."
            )
        pack(folder, root / RUNS / name)


def main() -> int:
    """Do what the options say; 1 when something is missing or, with ``--check``, differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--add", action="append", default=[], metavar="NAME=FOLDER", help="publish a run")
    parser.add_argument(
        "--unpack", metavar="NAME=FOLDER", help="make a published run's folder again, and do nothing else"
    )
    args = parser.parse_args()
    for given in [*args.add, *filter(None, [args.unpack])]:
        if not re.fullmatch(r"[\w.-]+=.+", given):
            parser.error(f"{given!r} is not NAME=FOLDER")
    if args.check and args.add:
        parser.error("--check changes nothing; leave --add out")
    try:
        if args.unpack:
            name, _, folder = args.unpack.partition("=")
            write_results(unpack(ROOT / RUNS / name, folder))
            return 0
        for given in args.add:
            name, _, folder = given.partition("=")
            add(name, Path(folder), ROOT)
        runs = read_runs(ROOT / RUNS)
    except KVError as error:
        print(error, file=sys.stderr)
        return 1
    text, target = page(runs), ROOT / PAGE
    if args.check:
        if target.is_file() and target.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE}: differs", file=sys.stderr)
        return 1
    target.write_text(text, encoding="utf-8")
    write_figures(runs, ROOT)
    print(f"{PAGE}: {len(runs)} runs; now scripts/update_readme.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Texts that played no part in the design or the fitting of `ghost`, one file each, for `kvcodec eval --text`.

    python benchmarks/fresh_texts.py --data FOLDER --novel FILE --out DIR

The last quarter of WikiText-2's raw test split (tables elsewhere are of its beginning), the solutions of HumanEval as
one Python file, and a novel of Project Gutenberg, from its first chapter on. Prints characters and sha256 of each.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path


def wikitext(path: Path) -> str:
    """The articles of the last quarter."""
    text = path.read_text(encoding="utf-8")
    articles = re.split(r"(?m)^(?= = [^=])", text)
    begin = next(i for i in range(len(articles)) if sum(map(len, articles[:i])) >= 0.75 * len(text))
    return "".join(articles[begin:])


def programs(path: Path) -> str:
    """Every problem with its solution."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if line.strip()]
    return "\n\n\n".join((one["prompt"] + one["canonical_solution"]).strip() for one in found) + "\n"


def novel(path: Path) -> str:
    """Behind the first heading of a chapter, without Project Gutenberg's own words."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("iso-8859-1")
    text = text.replace("\r\n", "\n")
    begin = [m.start() for m in re.finditer(r"(?m)^(CHAPTER )?I\.?$", text)]
    end = re.search(r"(\*\*\* ?END|\nEnd) OF (THE|THIS)? ?PROJECT GUTENBERG", text, re.I)
    if not begin or end is None:
        raise SystemExit(f"{path}: no first chapter, or no end, of a text of Project Gutenberg was found.")
    return text[begin[0] : end.start()].strip() + "\n"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="with wikitext2_raw/ and humaneval/")
    parser.add_argument("--novel", type=Path, required=True, help="plain text of Project Gutenberg")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = {
        "wikitext-end": wikitext(args.data / "wikitext2_raw/wiki.test.raw"),
        "code": programs(args.data / "humaneval/HumanEval.jsonl"),
        "novel": novel(args.novel),
    }
    for name, text in texts.items():
        raw = text.encode("utf-8")
        (args.out / f"{name}.txt").write_bytes(raw)
        print(f"{name}.txt: {len(text):,} characters, sha256 {hashlib.sha256(raw).hexdigest()}")


if __name__ == "__main__":
    main()

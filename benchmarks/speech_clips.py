"""Speech clips with reference texts, from public repositories at fixed commits, as 16 kHz WAV files in one folder.

    python benchmarks/speech_clips.py FOLDER [--repository openai/whisper=PATH ...]

PATH is a local copy (a bare one will do); repositories without one are cloned. What comes of it, in ``clips.json``:

- ``jfk``: 11 s of a speech (needs the package soundfile, which reads FLAC);
- ``ljspeech``: 32 clips of 1 to 10 s read by one voice; 8 of them have a reference text;
- ``digits``: 48 recordings of ten spoken digits by six voices, put together here from Free Spoken Digits with pauses of
  0.25 s, in an order drawn with seed 0 (CC BY-SA 4.0).
"""

import argparse
import io
import json
import subprocess
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np

Samples = np.ndarray[Any, np.dtype[np.float32]]

RATE = 16_000
COMMITS = {
    "openai/whisper": "c0d2f624c09dc18e709e37c2ad90c039a4eb72a2",
    "coqui-ai/TTS": "dbf1a08a0d4e47fdad6172e433eeb34bc6b13b4e",
    "Jakobovski/free-spoken-digit-dataset": "26eb9aaf76e81b692f806f9140c2d2777410d7a1",
}
JFK = "And so, my fellow Americans, ask not what your country can do for you, ask what you can do for your country."
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
PAUSE = 0.25
EACH = 8


def resampled(x: Samples, rate: int) -> Samples:
    """The same sound at 16 kHz, by its spectrum."""
    n = round(len(x) * RATE / rate)
    spectrum, half = np.fft.rfft(x), n // 2 + 1
    cut = np.zeros(half, dtype=complex)
    cut[: min(half, len(spectrum))] = spectrum[:half]
    return (np.fft.irfft(cut, n) * (n / len(x))).astype(np.float32)


def read_wav(raw: bytes) -> Samples:
    """Samples of a 16-bit mono file, -1 to 1, at 16 kHz."""
    with wave.open(io.BytesIO(raw)) as file:
        if (file.getnchannels(), file.getsampwidth()) != (1, 2):
            raise ValueError(f"{file.getnchannels()} channels of {file.getsampwidth()} bytes; expected 16 bit, mono.")
        x = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
        return x if file.getframerate() == RATE else resampled(x, file.getframerate())


def write_wav(path: Path, x: Samples) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((x.clip(-1, 1) * 32767).round().astype("<i2").tobytes())


class Source:
    """A repository's files at the fixed commit."""

    def __init__(self, name: str, path: Path | None, folder: Path) -> None:
        self.name, self.path = name, path or folder / name.replace("/", "+")
        if path is None:
            url = f"https://github.com/{name}"
            subprocess.run(["git", "clone", "-q", "--bare", "--filter=blob:none", url, str(self.path)], check=True)

    def read(self, file: str) -> bytes:
        asked = f"{COMMITS[self.name]}:{file}"
        return subprocess.run(["git", "-C", str(self.path), "show", asked], check=True, stdout=subprocess.PIPE).stdout

    def names(self, under: str) -> list[str]:
        command = ["git", "-C", str(self.path), "ls-tree", "--name-only", COMMITS[self.name], f"{under}/"]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", action="append", default=[], metavar="NAME=PATH")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    local = {name: Path(path) for name, path in (item.split("=", 1) for item in given.repository)}
    clips: list[dict[str, Any]] = []

    def keep(kind: str, name: str, x: Samples, text: str | None) -> None:
        write_wav(given.folder / f"{name}.wav", x)
        clips.append({"set": kind, "file": f"{name}.wav", "seconds": round(len(x) / RATE, 2), "text": text})

    with tempfile.TemporaryDirectory() as new:
        whisper, tts, digits = (Source(name, local.get(name), Path(new)) for name in COMMITS)
        import soundfile

        x, rate = soundfile.read(io.BytesIO(whisper.read("tests/jfk.flac")), dtype="float32", always_2d=True)
        keep("jfk", "jfk", resampled(x.mean(1), rate), JFK)
        lines = tts.read("tests/data/ljspeech/metadata.csv").decode().splitlines()
        texts = {name: text for name, text, _ in (line.split("|") for line in lines)}
        for file in tts.names("tests/data/ljspeech/wavs"):
            if file.endswith(".wav"):
                name = Path(file).stem
                keep("ljspeech", name, read_wav(tts.read(file)), texts.get(name))
        order, rest = np.random.default_rng(0), np.zeros(round(PAUSE * RATE), np.float32)
        for speaker in SPEAKERS:
            for take in range(EACH):
                said = order.permutation(10)
                files = [digits.read(f"recordings/{d}_{speaker}_{take}.wav") for d in said]
                parts = [part for file in files for part in (read_wav(file), rest)]
                keep("digits", f"{speaker}-{take}", np.concatenate(parts), " ".join(DIGITS[d] for d in said))
    (given.folder / "clips.json").write_text(json.dumps(clips, indent=1) + "\n")
    print(f"{len(clips)} clips, {sum(clip['seconds'] for clip in clips):.0f} s, in {given.folder}")


if __name__ == "__main__":
    main()

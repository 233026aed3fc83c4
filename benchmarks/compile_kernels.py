"""Compile the CUDA kernels that the benches launch, several at a time, into the cache folder.

    PYTHONPATH=src python benchmarks/compile_kernels.py [--specs A,B] [--shapes spine,sweep8] [--arch sm_90] [--rivals]
                                                        [--shared-memory 100]

Without this a bench compiles a program when it first needs it, one after the other: about two seconds each, two to five
for a preset; `kvcodec compile` takes all that any cache may need. It needs NVRTC and no GPU: with ``--arch`` it can run
elsewhere, with the same version of NVRTC, and the cache (``~/.cache/kvcodec/cuda``, or below ``$XDG_CACHE_HOME``) be
taken along. What it does not foresee is compiled when it is needed. ``--rivals`` lets the rivals that are installed
compile theirs at the same time, which needs the GPU.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import torch
from checkout import environment

from kvcodec.codec import ROLES
from kvcodec.errors import KVError
from kvcodec.kernels.cuda import launch
from kvcodec.kernels.cuda.build import Program, architecture
from kvcodec.kernels.cuda.launch import Machine
from kvcodec.kernels.cuda.needed import Needed, Steps, compile_needed, of_codecs
from kvcodec.kernels.mean import most_pairs
from kvcodec.kernels.spec import kernels_for
from kvcodec.registry import get, split_specs
from kvcodec.scheme import KVScheme
from kvcodec_lab.bench import first
from kvcodec_lab.bench.attention_rivals import Dense, library_rivals, missing
from kvcodec_lab.bench.generate import BATCHES, PROMPT
from kvcodec_lab.bench.key_means import decided
from kvcodec_lab.bench.packed import scheme_of
from kvcodec_lab.bench.shapes import PRESETS, Shape, shapes_named

LAYERS = 36
WARM = (Shape("warm", 1, 28, 4, 128, 2048), Shape("warm", 20, 32, 8, 128, 2048))
"""The spine's heads with few tokens: what rivals compile depends on heads, and on whether sequences are split."""


def programs_of(scheme: KVScheme, shape: Shape, machine: Machine) -> Iterator[Program]:
    """Programs that fit, encode, decode at a shape, and unpack; none where no kernel reads the scheme."""
    dim = shape.head_dim
    key, value = (scheme.codec(role).for_dtype(torch.bfloat16) for role in ROLES)
    if kernels_for(scheme, dim)["decode"] == "none":
        return
    less = decided(scheme).mean != "none"
    page = scheme.page_layout(dim).page_tokens
    dense = torch.bfloat16 if scheme.sink or scheme.window or max(key.block_tokens, value.block_tokens) > 1 else None
    steps = Steps((shape.group,), (dense,), heads=(shape.batch * shape.kv_heads,), capacity=shape.tokens)
    for one in of_codecs(key, value, dim, page, machine, steps, pairs=most_pairs(dim) if less else 0):
        yield one.program


def wanted(specs: Iterable[str], shapes: Iterable[Shape], machine: Machine) -> list[Program]:
    """Return the programs of all specs at all shapes and in the steps of a whole model, each once."""
    found: dict[Program, None] = {}
    whole = [Shape("generate", batch, 32, 8, 128, PROMPT + 64) for batch in BATCHES]
    whole.append(Shape("first", 1, 32, 8, 64, max(first.PROMPTS)))
    for spec in specs:
        layers = dict.fromkeys(get(spec).for_layer(i, LAYERS) for i in range(LAYERS))
        cases = [(scheme_of(spec), s) for s in shapes] + [(scheme, s) for scheme in layers for s in whole]
        for scheme, shape in cases:
            try:
                found |= dict.fromkeys(programs_of(scheme, shape, machine))
            except KVError as error:  # the bench will say so in a row
                print(f"{spec} at {shape.name}: {error}")
    return list(found)


def warm_rival(form: str) -> None:
    """Call a rival once at each of WARM; what it lacks is its row's business."""
    for shape in WARM:
        rival = next(r for r in library_rivals(Dense(shape, torch.device("cuda"))) if f"{r.backend}, {r.form}" == form)
        try:
            rival.make()()
        except Exception as error:  # the bench meets it again and writes it into a row
            print(f"{form}: {missing(error)}")
            return
    print(f"{form}: compiled")


def start_rivals() -> list[subprocess.Popen[bytes]]:
    """Start a process for each rival."""
    forms = [
        f"{r.backend}, {r.form}" for r in library_rivals(Dense(Shape("one", 1, 2, 1, 64, 16), torch.device("cpu")))
    ]
    return [subprocess.Popen([sys.executable, __file__, "--rival", form], env=environment()) for form in forms]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default=",".join(PRESETS), help="default: what the benches time")
    parser.add_argument("--shapes", default="spine,corners,octopus,saw,per-head,sweep", help="(%(default)s)")
    parser.add_argument("--arch", help="e.g. sm_90, which is then taken for an H200; default: the GPU here")
    parser.add_argument("--shared-memory", type=int, metavar="KB", help="as of the benches: a GPU with so much of it")
    parser.add_argument("--rivals", action="store_true", help="those of other libraries as well")
    parser.add_argument("--rival", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    args = parser.parse_args()
    if args.rival:
        warm_rival(args.rival)
        return 0
    begun = time.monotonic()
    others = start_rivals() if args.rivals else []
    gpu = None if args.arch else torch.device("cuda", 0)
    arch = args.arch if gpu is None else architecture(gpu)
    with launch.limited(args.shared_memory) if args.shared_memory else contextlib.nullcontext():
        machine = launch.machine(gpu or torch.device("cpu"))
    todo = wanted(split_specs(args.specs), shapes_named(args.shapes), machine)
    made = compile_needed([Needed(program, "") for program in todo], arch, args.workers)
    seconds = [one.seconds for one in made]
    print(f"{len(todo)} programs for {arch}: {time.monotonic() - begun:.0f} s, {sum(seconds):.0f} s of work")
    for process in others:
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())

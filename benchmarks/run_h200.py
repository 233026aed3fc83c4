"""Time fused decode attention on packed pages against bf16 attention in torch, on one GPU.

Correctness comes first: every shape is checked against fp32 attention on the decoded values, with
the sizes that are timed, and nothing is timed after a failure. Results go to one JSON file per
shape, which is never overwritten.

    python benchmarks/run_h200.py --out DIR [--shapes llm64k,video] [--sweep] [--codec int-4] [--commit ID]
"""

import argparse
import json
import pathlib
import sys

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvcodec.kernels.decode_attention as decode
from kvcodec.bench.timing import Timer
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.kernels import _int4_encode

SEED = 20261121
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 64
# B, HQ, H, D, T
SHAPES = {
    "llm64k": (1, 28, 4, 128, 65536),
    "video": (1, 16, 16, 64, 32760),
    "b32_8k": (32, 32, 8, 128, 8192),
    "b32_32k": (32, 32, 8, 128, 32768),
}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


CODECS = {"saw-int4": "saw_int4", "int-4": "group_int"}


class Problem:
    """One shape: queries, bf16 keys and values, and the packed pool, pages in random order."""

    def __init__(self, name, spec):
        self.name, self.spec, self.stem = name, spec, CODECS[spec]
        self.kernels = decode.CODECS[self.stem]
        b, hq, h, d, t = self.shape = SHAPES[name]
        gen = torch.Generator(DEVICE).manual_seed(SEED)
        kw = {"device": DEVICE, "dtype": torch.bfloat16, "generator": gen}
        self.q = torch.randn(b, hq, 1, d, **kw)
        self.k = torch.randn(b, h, t, d, **kw)
        self.v = torch.randn(b, h, t, d, **kw)
        columns = -(-t // PAGE)
        self.pages = torch.zeros(b * columns, h, self.kernels.page_bytes(d, PAGE), dtype=torch.uint8, device=DEVICE)
        order = torch.randperm(b * columns, device=DEVICE, generator=gen)
        self.table = order.view(b, columns).int().contiguous()
        self.lens = torch.full((b,), t, dtype=torch.int32, device=DEVICE)
        self.last = self.lens - 1
        self.start = torch.zeros(b, dtype=torch.int32, device=DEVICE)
        self.sizes = {"key_block": d & -d if spec == "saw-int4" else 1, "value_block": 1, "page_tokens": PAGE}
        self.encode()

    def encode(self):
        self.kernels.encode_to_pages(self.k, self.v, self.pages, self.table, self.start, **self.sizes)

    def append(self):
        """Encode one token per sequence, the last one again."""
        self.kernels.encode_to_pages(
            self.k[:, :, -1:], self.v[:, :, -1:], self.pages, self.table, self.last, **self.sizes
        )

    def encode_with(self, rows, warps):
        _int4_encode.launch(self.kernels.quantize, self.kernels.PAIRED, self.k, self.v, self.pages, self.table,
                            self.start, None, self.sizes["key_block"], 1, PAGE, (rows, warps))  # fmt: skip

    def attend(self):
        return decode.decode_attention(
            self.q, self.pages, self.table, self.lens, scale=self.shape[3] ** -0.5, num_kv_heads=self.shape[2],
            codec=self.stem, **self.sizes,
        )  # fmt: skip

    def attend_with(self, config, pdl=True):
        _, _, h, d, _ = self.shape
        return decode._launch(self.q, self.pages, self.table, self.lens, d**-0.5,
                              self.sizes["key_block"], 1, PAGE, h, None, None, None, None, None, None, None, config,
                              self.stem, pdl)[0]  # fmt: skip

    def sdpa(self, packed):
        b, hq, h, d, _ = self.shape
        if packed or hq == h:
            # the heads of a group as query rows: the same sums, and no head is read twice
            q = self.q.view(b, h, hq // h, d)
            return torch.nn.functional.scaled_dot_product_attention(q, self.k, self.v).view(b, hq, 1, d)
        return torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True)

    def decoded(self, b, h):
        """Decode one head from the bytes with the reference codec, fp32 [T, D] each."""
        from kvcodec.layout import PageLayout

        d, t = self.shape[3:]
        codecs = {"key": SawInt4(d & -d), "value": SawInt4(1)}
        if self.spec == "int-4":
            codecs = dict.fromkeys(codecs, GroupInt(4, 0))
        layout = PageLayout(codecs["key"].layout(d), codecs["value"].layout(d), PAGE)
        own = self.pages[self.table[b].long(), h]
        out = []
        for role, codec in codecs.items():
            payload = {}
            for plane in layout.planes:
                if plane.role == role:
                    payload[plane.field.name] = layout.view(own, plane).flatten(0, 1)[:t]
            out.append((codec.from_code(codec.decode(payload, {}), {}), payload, codec))
        return out

    def check(self, call):
        """Return "" or what is wrong: bytes against the reference, attention against fp32."""
        b, hq, h, d, _ = self.shape
        got = call()
        for bi, hi in {(0, 0), (b - 1, h - 1), (b // 2, h // 2)}:
            (k, key_bytes, codec), (v, _, _) = self.decoded(bi, hi)
            # on the CPU, because torch on CUDA divides by a constant through its reciprocal
            x = self.k[bi, hi, :8192].float().cpu()
            want = codec.encode(codec.to_code(x, {}), {})["codes"]
            other = want ^ key_bytes["codes"][:8192].cpu()
            differ = (((other & 15) != 0).sum() + ((other >> 4) != 0).sum()).item()
            print(f"check {self.name}: {differ} of {x.numel()} codes differ from the reference", flush=True)
            if differ > 1e-4 * x.numel():
                return f"{self.name}: {differ} of {x.numel()} codes differ (head {bi},{hi})"
            q = self.q[bi, hi * (hq // h) : (hi + 1) * (hq // h), 0].float()
            exact = torch.softmax((q.double() @ k.double().T) * d**-0.5, -1) @ v.double()
            low = torch.nn.functional.scaled_dot_product_attention(
                q.bfloat16()[None, None], k.bfloat16()[None, None], v.bfloat16()[None, None]
            )[0, 0]
            error = ((got[bi, hi * (hq // h) : (hi + 1) * (hq // h), 0].double() - exact).norm() / exact.norm()).item()
            limit = 2 * ((low.double() - exact).norm() / exact.norm()).item()
            print(f"check {self.name}: attention error {error:.2e}, bf16 SDPA {limit / 2:.2e}", flush=True)
            if not error <= limit:
                return f"{self.name}: error {error:.2e} above {limit:.2e} (head {bi},{hi})"
        return ""


def sweep(problem, timer, configs, reps):
    """Time launch constants, cold; a table that `config_for` is read from."""
    rows = []
    for config in configs:
        config = decode.Config(*config)
        try:
            row = timer.cold(lambda c=config: problem.attend_with(c), reps)
        except Exception as error:
            row = {"p50": float("nan"), "error": str(error)[:200]}
        rows.append({"shape": problem.name, **config._asdict(), **row})
        print("sweep", problem.name, tuple(config), row, flush=True)
    b, _, h, d, _ = problem.shape
    default = decode.config_for(b * h, 8, d, PAGE, problem.table.shape[1] * PAGE, decode._sms(problem.q.device))
    for pdl in (True, False):
        row = timer.cold(lambda p=pdl: problem.attend_with(default, p), reps)
        print("sweep", problem.name, tuple(default), "pdl", pdl, row, flush=True)
        rows.append({"shape": problem.name, "pdl": pdl, **default._asdict(), **row})
    for cfg in ((16, 1), (32, 2)):
        row = timer.cold(lambda c=cfg: problem.encode_with(*c), 8)
        print("sweep encode", problem.name, cfg, row, flush=True)
        rows.append({"shape": problem.name, "encode": cfg, **row})
    return rows


def baseline(problem, timer, reps, warm_calls):
    """Time every form of bf16 SDPA that runs here."""
    out = []
    forms = (True,) if problem.shape[1] == problem.shape[2] else (True, False)
    for name, backend in BACKENDS.items():
        for packed in forms:
            try:
                with sdpa_kernel([backend]):
                    call = lambda p=packed: problem.sdpa(p)  # noqa: E731
                    row = {
                        "backend": name,
                        "form": "group as query rows" if packed else "enable_gqa",
                        "cold": timer.cold(call, reps),
                        "clean": timer.clean(call, reps),
                        "warm": timer.warm(call, warm_calls),
                    }
            except RuntimeError as error:
                print("baseline", problem.name, name, packed, "not available:", str(error)[:120], flush=True)
                continue
            out.append(row)
            print("baseline", problem.name, row, flush=True)
    return out


def measure(problem, timer, commit):
    """Return the result rows of one shape."""
    small = problem.shape[0] == 1
    reps, calls = (60, 20) if small else (20, 6)
    b, hq, h, d, t = problem.shape
    stamp = {
        "shape": problem.name,
        "sizes": {"batch": b, "query_heads": hq, "kv_heads": h, "head_dim": d, "tokens": t, "page_tokens": PAGE},
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
                     "python": sys.version.split()[0]},
        "commit": commit,
        "seed": SEED,
    }  # fmt: skip
    bits = problem.kernels.page_bytes(d, PAGE) * 8 / (PAGE * d * 2)
    rows = []

    def add(spec, bits, metric, unit, values, **more):
        rows.append({"spec": spec, "effective_bits": bits, "metric": metric, "unit": unit, "values": values,
                     **more, **stamp})  # fmt: skip

    ours = {"cold": timer.cold(problem.attend, reps), "clean": timer.clean(problem.attend, reps),
            "warm": timer.warm(problem.attend, calls)}  # fmt: skip
    bars = baseline(problem, timer, reps, calls)
    # ours once more, after the rivals: the spread between the two is the noise of the run
    again = timer.cold(problem.attend, reps)
    encode = timer.cold(problem.encode, reps)
    append = timer.cold(problem.append, reps)
    for state, values in ours.items():
        add(problem.spec, bits, f"decode_us_{state}", "us", values)
    add(problem.spec, bits, "decode_us_cold_again", "us", again)
    add(problem.spec, bits, "encode_us", "us", encode)
    add(problem.spec, bits, "append_us", "us", append)
    for row in bars:
        for state in ("cold", "clean", "warm"):
            add("dense", 16.0, f"decode_us_{state}", "us", row[state], backend=row["backend"], form=row["form"])
    for state in ("cold", "clean", "warm"):
        best = min(bars, key=lambda r: r[state]["p50"])
        ratio = {p: round(best[state]["p50"] / ours[state][p], 3) for p in ("p80", "p50", "p20")}
        ratio = {"p20": ratio["p80"], "p50": ratio["p50"], "p80": ratio["p20"]}
        add(problem.spec, bits, f"speedup_vs_bf16_{state}", "x", ratio, backend=best["backend"], form=best["form"])
        print(f"RESULT {problem.name} {state}: {ours[state]} against {best['backend']} {best[state]}: {ratio['p50']}x")
    print(f"RESULT {problem.name} cold again {again}, encode {encode}, append {append}", flush=True)
    return rows


SWEEPS = {
    "llm64k": [(64, 1, s, n) for s in (3, 4) for n in (66, 99, 114, 132, 198, 264)]
    + [(128, 2, 3, n) for n in (66, 132)],
    "video": [(64, 1, s, n) for s in (3, 4) for n in (33, 44, 60, 66)] + [(128, 2, 3, n) for n in (16, 33)],
    "b32_8k": [(64, 1, s, n) for s in (3, 4) for n in (1, 2, 3, 4, 8)] + [(128, 2, 3, n) for n in (1, 2)],
    "b32_32k": [(64, 1, s, n) for s in (3, 4) for n in (2, 3, 4, 8)] + [(128, 2, 3, n) for n in (1, 2)],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--codec", choices=CODECS, default="saw-int4")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--sweep", action="store_true", help="time launch constants instead")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    timer = Timer()
    for name in args.shapes.split(","):
        path = args.out / f"{'sweep_' if args.sweep else ''}{args.codec}_{name}.json"
        if path.exists():
            sys.exit(f"{path} exists; results are not overwritten")
        problem = Problem(name, args.codec)
        wrong = problem.check(problem.attend)
        if wrong:
            sys.exit(f"RED, nothing timed: {wrong}")
        if args.sweep:
            reps = 20 if problem.shape[0] == 1 else 8
            rows = sweep(problem, timer, SWEEPS[name], reps)
        else:
            rows = measure(problem, timer, args.commit)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        del problem
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

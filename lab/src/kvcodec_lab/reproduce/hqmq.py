"""HQMQ, arXiv:2605.27646: bits, memory, the geometry of the codebook, errors on Gaussian tokens."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvcodec.codec import Codec, Sample, Site, roundtrip
from kvcodec.codecs.additive import Additive
from kvcodec.ops.quaternion import (
    chunk_lengths,
    decode_lengths,
    nearest_entry,
    nearest_product,
    products,
    quantize_lengths,
    random_units,
    split_chunks,
)
from kvcodec.registry import get
from kvcodec_lab.reproduce.claims import NOT_PRINTED, Axes, Claim, cannot, reproduces
from kvcodec_lab.reproduce.measure import gauss, relative_mse, token_bytes

SIZES = (24, 48, 96, 192)
SEED_BAND, QUICK_BAND = 0.04, 0.06
"""Errors differ by 2 to 5 % from one random codebook to another; the references are means over 5 or 10 of them."""

PRINTED_BITS = {
    "s24_r3": "3.04",
    "s24_r4": "3.29",
    "s24_r6": "3.79",
    "s48_r3": "3.29",
    "s48_r4": "3.54",
    "s48_r6": "4.04",
    "s96_r3": "3.54",
    "s96_r4": "3.79",
    "s96_r6": "4.29",
    "s192_r3": "3.79",
    "s192_r4": "4.04",
    "s192_r6": "4.54",
}


@reproduces("hqmq", "Tables 2, 8, 9, bits")
def printed_bits(quick: bool) -> Iterator[Claim]:
    """(log2(24 S) + r) / 4 of all configurations, and of the additive baseline."""
    for config, bits in PRINTED_BITS.items():
        scheme = get(f"hqmq-{config}")
        note = f"fractional code widths, no scale; bytes held: {scheme.effective_bits(128):.4f}"
        yield Claim(config, "bits", bits, scheme.nominal_bits(128), 0.0, note)
    for k, r, bits in ((24, 3, "3.04"), (48, 4, "3.79"), (192, 4, "4.79")):
        layout = Additive(k, r).layout(128)
        note = f"(2 log2 K + r) / 4; bytes held: {layout.effective_bits:.4f}"
        yield Claim(f"additive, K={k} r={r} (Table 16)", "bits", bits, layout.nominal_bits, 0.0, note)


@reproduces("hqmq", "Tables 12, 21")
def bits_with_scale(quick: bool) -> Iterator[Claim]:
    """Bits with the scale, and compression, from the bytes of the radix packing."""
    printed = {
        "s24_r3": ("3.17", "5.05"),
        "s24_r4": ("3.42", "4.68"),
        "s48_r4": ("3.67", "4.36"),
        "s96_r4": ("3.92", "4.08"),
        "s192_r4": ("4.17", "3.84"),
        "s192_r6": ("4.67", "3.43"),
    }
    for config, (bits, ratio) in printed.items():
        held = get(f"hqmq-{config}:packing=radix").effective_bits(128)
        ceil = get(f"hqmq-{config}").effective_bits(128)
        note = f"codes as base-9 digits; in whole bits per code, as the text says, {ceil:.4f}"
        yield Claim(config, "bits", bits, held, 0.002, note)
        yield Claim(config, "ratio_to_fp16", ratio, 16 / held, 0.002, note)


@reproduces("hqmq", f"{NOT_PRINTED}: bytes")
def held_bits(quick: bool) -> Iterator[Claim]:
    """True bits of both packings."""
    ceil = {"3.04": "3.3750", "3.29": "3.6250", "3.54": "3.8750", "3.79": "4.1250", "4.04": "4.3750", "4.29": "4.6250"}
    radix = {"3.04": "3.1719", "3.29": "3.4219", "3.54": "3.6719", "3.79": "3.9219", "4.04": "4.1719", "4.29": "4.4219"}
    ceil["4.54"], radix["4.54"] = "4.8750", "4.6719"
    for config, bits in PRINTED_BITS.items():
        yield Claim(f"{config} ceil", "bits", ceil[bits], get(f"hqmq-{config}").effective_bits(128))
        yield Claim(f"{config} radix", "bits", radix[bits], get(f"hqmq-{config}:packing=radix").effective_bits(128))


@reproduces("hqmq", "Sec. 4.10, memory")
def memory(quick: bool) -> Iterator[Claim]:
    """Decimal GB of whole caches."""
    for model, layers, tokens, dense, packed in (
        ("Mistral-7B, 32k tokens", 32, 32768, "4.3", "0.850"),
        ("Llama-3-70B, 128k tokens", 80, 131072, "43", "8.5"),
    ):
        gigabytes = {
            spec: token_bytes(spec, layers, 8, 128) * tokens / 1e9
            for spec in ("dense", "hqmq-s24_r3:packing=radix", "hqmq-s24_r3")
        }
        bits_16, radix, ceil = gigabytes.values()
        yield Claim(model, "fp16_gb", dense, bits_16)
        note = f"radix packing; {ceil:.3f} GB in whole bits per code"
        yield Claim(f"{model}, s24_r3", "gb", packed, radix, 0.002, note)


@reproduces("hqmq", "Eq. 2, Med-C bits")
def outlier_bits(quick: bool) -> Iterator[Claim]:
    """(1 - p) b + 16 p + 1/4 at the outlier share p that a model's rows imply."""
    rows = (
        ("Mistral-7B", 0.024, {"s192_r6": "5.07"}),
        ("Mistral-7B, Table 3", 0.030, {"s96_r4": "4.41"}),
        ("Llama-3-8B", 0.018, {"s192_r6": "5.00", "s96_r6": "4.76", "s24_r6": "4.27"}),
        ("Qwen2.5-7B", 0.031, {"s192_r6": "5.15", "s96_r6": "4.91", "s24_r6": "4.42"}),
        ("Qwen2.5-7B, C=4", 0.018, {"s192_r6": "5.00"}),
        ("Qwen2.5-7B, C=5", 0.010, {"s192_r6": "4.91", "s96_r6": "4.67", "s24_r6": "4.17"}),
        ("Qwen3-8B", 0.038, {"s96_r6": "4.99", "s24_r6": "4.51"}),
        ("Qwen3-8B, Table 4", 0.030, {"s96_r6": "4.89"}),
        ("gpt-oss-20b", 0.060, {"s96_r6": "5.25", "s24_r6": "4.78"}),
    )
    for model, share, configs in rows:
        for config, bits in configs.items():
            base = get(f"hqmq-{config}").nominal_bits(128)
            note = f"p = {share:.3f}, implied by the rows of this model; b without its scale"
            yield Claim(f"{model}, {config} + Med", "bits", bits, _with_outliers(base, share), 0.0015, note)
    for model, share, width, bits in (
        ("Qwen2.5-7B", 0.028, 4, "4.59"),
        ("Qwen2.5-7B", 0.028, 3, "3.62"),
        ("Qwen2.5-7B, C=5", 0.010, 4, "4.37"),
        ("Qwen3-8B", 0.031, 4, "4.62"),
    ):
        note = f"p = {share:.3f}"
        yield Claim(f"{model}, int{width} + Med", "bits", bits, _with_outliers(width, share), 0.0015, note)
    added = _with_outliers(get("hqmq-s192_r6").nominal_bits(128), 0.024) - get("hqmq-s192_r6").nominal_bits(128)
    note = "the text's figure; its own Table 8 has 5.07 - 4.54, and the flag alone is 0.25"
    yield Claim("Mistral-7B, what Med adds (Sec. 4.1)", "bits", "0.15", added, 0.01, note, spec="0.53")


def _with_outliers(bits: float, share: float) -> float:
    return (1 - share) * bits + 16 * share + 1 / 4


@reproduces("hqmq", "Tables 2, 3")
def baseline_bits(quick: bool) -> Iterator[Claim]:
    """Bits that the paper prints for its baselines, against bytes held."""
    note = "printed: the codes alone; held with a scale and an offset per token"
    for bits in (2, 3, 4):
        held = get(f"int-{bits}").effective_bits(128)
        yield Claim(f"naive int{bits}", "bits", f"{bits}.00", held, 0.0, note, spec=f"{bits}.25")
    note = "groups of 32, as the paper says, with scale and offset in fp16 take one bit; the print fits groups of 64"
    for bits in (2, 4):
        held = get(f"kivi-{bits}").effective_bits(128)
        yield Claim(f"KIVI-{bits}", "bits", f"{bits}.5", held, 0.0, note, spec=f"{bits + 1}.00")


@reproduces(
    "hqmq",
    f"{NOT_PRINTED}: geometry (Prop. 3.1)",
    axes=Axes("log2 of the codebook's size 24 S", "covering radius (degrees)"),
    seconds=60,
)
def geometry(quick: bool) -> Iterator[Claim]:
    """Covering radii: the largest holes found by climbing from many points, so lower bounds that are all but exact."""
    units = products(torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))
    apart = (units @ units.T).fill_diagonal_(-1).max(1).values.arccos().rad2deg()
    yield Claim("2T alone, nearest neighbours", "degrees", "60", float(apart.min()), 1e-6)
    note = "each from the middle of four corners"
    yield Claim("2T alone, covering radius", "degrees", "45", covering_radius(units, 4096, 0), 1e-3, note)
    product = {24: "21.8", 48: "18.2", 96: "15.2", 192: "12.1"}
    haar = {24: "26.2", 48: "21.0", 96: "17.3", 192: "13.9"}
    seeds = 6 if quick else 20
    means: dict[int, float] = {}
    for s in SIZES[:2] if quick else (6, 12, *SIZES):
        radii = torch.tensor([covering_radius(products(_secondary(s, i)), 2048, i) for i in range(seeds)])
        means[s] = float(radii.mean())
        if s in SIZES:
            note = f"mean of {seeds} codebooks, {float(radii.std()):.1f} apart"
            x = math.log2(24 * s)
            band = QUICK_BAND if quick else 0.05
            yield Claim(f"S={s}, 2T x random", "degrees", product[s], means[s], band, note, curve="2T x random", x=x)
            found = [covering_radius(random_units(24 * s, _generator(100 + i)), 16384, i) for i in range(seeds)]
            mean = sum(found) / seeds
            yield Claim(
                f"S={s}, {24 * s} Haar points", "degrees", haar[s], mean, band, curve="as many Haar points", x=x
            )
    if not quick:
        log_n = torch.tensor([math.log(s) for s in means])
        log_radius = torch.tensor([math.log(radius) for radius in means.values()])
        slope = float(((log_n - log_n.mean()) * log_radius).sum() / (log_n - log_n.mean()).square().sum())
        note = "S = 6 to 192; the proof's union bound leaves a factor (log S)^(1/3), which is seen"
        yield Claim("rate of the covering radius in S", "log-log slope", "-0.333", slope, 0.05, note, spec="-0.264")


@reproduces(
    "hqmq",
    f"{NOT_PRINTED}: codebooks (Table 16)",
    axes=Axes("log2 of the number of codewords", "E |u - c|^2"),
    seconds=60,
)
def direction_errors(quick: bool) -> Iterator[Claim]:
    """Products, points at random and sums of two, by mean squared error of a direction."""
    reference = {
        "2T x random": ("0.0351", "0.0237", "0.0144", "0.0092"),
        "Haar points": ("0.0365", "0.0231", "0.0146", "0.0092"),
        "theory of Haar points": ("0.0367", "0.0231", "0.0146", "0.0092"),
        "sums, normalised": ("0.0435", "0.0266", "0.0158", "0.0095"),
        "sums, raw": ("0.106", "0.073", "0.052", "0.037"),
        "sums, greedy": ("0.42", "", "", "0.47"),
    }
    count, seeds = (2048, 5) if quick else (4096, 20)
    u = torch.randn(count, 4, generator=_generator(7), dtype=torch.float64)
    u = u / u.norm(dim=1, keepdim=True)
    for i, s in enumerate(SIZES):
        n, k = 24 * s, round((24 * s) ** 0.5)
        found: dict[str, list[float]] = {name: [] for name in reference}
        volume = 2 * math.pi**2 / n
        found["theory of Haar points"] = [math.gamma(5 / 3) * (3 * volume / (4 * math.pi)) ** (2 / 3)]
        for seed in range(seeds):
            book = _secondary(s, seed)
            found["2T x random"].append(_distance(u, products(book)[nearest_product(u, book)]))
            points = random_units(n, _generator(200 + seed))
            found["Haar points"].append(_distance(u, points[nearest_entry(u, points, by="angle")]))
            first, second = random_units(k, _generator(300 + seed)), random_units(k, _generator(400 + seed))
            sums = (first[:, None] + second).flatten(0, 1)
            raw = sums[nearest_entry(u, sums, by="distance")]
            unit = sums / sums.norm(dim=1, keepdim=True).clamp_min(1e-9)
            found["sums, normalised"].append(_distance(u, unit[nearest_entry(u, unit, by="angle")]))
            found["sums, raw"].append(_distance(u, raw))
            start = first[nearest_entry(u, first, by="distance")]
            found["sums, greedy"].append(_distance(u, start + second[nearest_entry(u - start, second, by="distance")]))
        for name, errors in reference.items():
            if not errors[i]:
                continue  # of greedy sums only the ends are known
            values = torch.tensor(found[name])
            note = (
                f"{seeds} codebooks, {100 * float(values.std() / values.mean()):.1f} % apart" if len(values) > 1 else ""
            )
            if name == "sums, raw" or name == "sums, greedy":
                note += "; the paper does not define its additive code: only such a one is 3 to 12 times worse"
            band = QUICK_BAND if quick else SEED_BAND
            item = f"{name}, {k * k if name.startswith('sums') else n}"
            yield Claim(item, "E|u-c|^2", errors[i], float(values.mean()), band, note, curve=name, x=math.log2(n))


@reproduces(
    "hqmq",
    f"{NOT_PRINTED}: relative MSE",
    axes=Axes("bits per element held (radix), D = 128", "relative MSE, N(0, I)"),
    seconds=40,
)
def gaussian_error(quick: bool) -> Iterator[Claim]:
    """N(0, I) tokens of 128 channels, the mean over codebooks."""
    reference = {
        24: ("0.0629", "0.0411", "0.0372", "0.0362"),
        48: ("0.0495", "0.0277", "0.0239", "0.0229"),
        96: ("0.0412", "0.0194", "0.0156", "0.0146"),
        192: ("0.0356", "0.0138", "0.0100", "0.0090"),
    }
    x = torch.randn(1, 1, 128 if quick else 512, 128, generator=_generator(0))
    seeds = 5 if quick else 20
    for s, errors in reference.items():
        for r, error in zip((2, 3, 4, 6), errors, strict=True):
            found = torch.tensor([_error(x, s, r, seed) for seed in range(seeds)])
            note = f"{seeds} codebooks, {100 * float(found.std() / found.mean()):.1f} % apart"
            band = QUICK_BAND if quick else SEED_BAND
            bits = (math.log2(24 * s) + r) / 4 + 16 / 128
            yield Claim(f"s{s}_r{r}", "relative_mse", error, float(found.mean()), band, note, curve=f"S = {s}", x=bits)


def _error(x: Tensor, s: int, r: int, seed: int) -> float:
    """Relative MSE of one codebook; r = 2, of which there is no preset, from the codec's bricks."""
    if r > 2:
        return relative_mse(x, get(f"hqmq-s{s}_r{r}"), seed)
    chunks = split_chunks(x)
    secondary = random_units(s, Site(0, "key", 1, x.shape[-1], seed).generator(0))
    unit = products(secondary)[nearest_product(chunks.reshape(-1, 4), secondary)].view(chunks.shape)
    radius, scale = quantize_lengths(chunk_lengths(chunks), r)
    decoded = unit * decode_lengths(radius, scale, r)[..., None]
    return float((decoded - chunks).square().sum() / chunks.square().sum())


@reproduces("hqmq", NOT_PRINTED)
def naive_int(quick: bool) -> Iterator[Claim]:
    """Naive integers on N(0, 1), one scale per token of 128 channels; the paper does not say which kind it used."""
    reference = {
        "symmetric": {2: "0.592", 3: "0.0752", 4: "0.0139"},
        "asymmetric": {2: "0.251", 3: "0.0457", 4: "0.0099"},
    }
    x = gauss(quick)
    for kind, errors in reference.items():
        for bits, error in errors.items():
            scheme = get(f"int-{bits}:symmetric={str(kind == 'symmetric').lower()}")
            yield Claim(f"naive int{bits}, {kind}", "relative_mse", error, relative_mse(x, scheme), 0.01)


@reproduces("hqmq", f"{NOT_PRINTED}: outlier chunks", seconds=5)
def outliers(quick: bool) -> Iterator[Claim]:
    """One chunk of 32 in every token 100 times the median: relative MSE of the other 31."""
    calm, x, loud = _with_loud_chunks(128 if quick else 256)
    note, share = "every other radius becomes 0", _zero_share(63)
    rows = [("hqmq-s24_r3", "1.000", note), ("hqmq-s24_r4", "1.000", note)]
    note = f"{100 * share:.0f} % of the other radii become 0; reference: integral over the radius"
    rows += [(f"hqmq-s{s}_r6", f"{_bulk_error(63, error):.3f}", note) for s, error in ((24, 0.0351), (192, 0.0092))]
    for spec, error, note in rows:
        errors = [_bulk(get(spec).key, x, loud, seed) for seed in range(5 if quick else 10)]
        yield Claim(
            spec, "bulk_relative_mse", error, sum(errors) / len(errors), QUICK_BAND if quick else SEED_BAND, note
        )
    spec = "int-4:symmetric=true,outliers=3"
    _, longer, where = _with_loud_chunks(4096)
    yield Claim(spec, "bulk_relative_mse", "0.0135", _bulk(get(spec).key, longer, where, 0), 0.01)
    for spec in OUTLIER_SPECS:
        with_it, without = (get(name).key for name in (f"{spec}:outliers=3", spec))
        ratios = [_bulk(with_it, x, loud, seed) / _bulk(without, calm, loud, seed) for seed in range(3)]
        note = "against the same tokens without a loud chunk: Med restores the error"
        yield Claim(f"{spec}:outliers=3", "bulk error / undisturbed", "1.00", sum(ratios) / 3, SEED_BAND, note)


OUTLIER_SPECS = ("hqmq-s24_r3", "hqmq-s24_r6", "hqmq-s192_r6")


def _with_loud_chunks(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, I) tokens; the same with one chunk of 32 scaled to 100 medians; which chunk that is."""
    calm = torch.randn(1, 1, tokens, 128, generator=_generator(0))
    chunks = split_chunks(calm).clone()
    length = chunk_lengths(chunks)
    place = torch.randint(32, length.shape[:3], generator=_generator(1))[..., None]
    loud = torch.zeros_like(length, dtype=torch.bool).scatter_(-1, place, True)
    chunks[loud] *= (100 * length.median() / length[loud])[:, None].float()
    return calm, chunks.flatten(-2), loud


def _bulk(codec: Codec, x: Tensor, loud: Tensor, seed: int) -> float:
    """Relative MSE of the chunks that are not ``loud``."""
    decoded = roundtrip(codec, x, codec.fit(Site(0, "key", 1, x.shape[-1], seed), Sample(x)))
    chunks = split_chunks(x)[~loud]
    return float((split_chunks(decoded)[~loud] - chunks).square().sum() / chunks.square().sum())


MEDIAN_CHI4 = 1.83213
"""Median length of a chunk of N(0, I_4)."""


def _zero_share(steps: int) -> float:
    """Share of N(0, I_4) chunks whose radius rounds to 0 when ``steps`` steps reach to 100 medians."""
    y = (100 * MEDIAN_CHI4 / (2 * steps)) ** 2 / 2
    return 1 - math.exp(-y) * (1 + y)


def _bulk_error(steps: int, direction_error: float) -> float:
    """Relative MSE of those chunks, given E |u - c|^2 of the codebook; integrated over r."""
    r = (torch.arange(200_000, dtype=torch.float64) + 0.5) * (10 / 200_000)
    held = (r * steps / (100 * MEDIAN_CHI4)).round() * (100 * MEDIAN_CHI4 / steps)
    error = r.square() + held.square() - 2 * r * held * (1 - direction_error / 2)
    weight = r**3 * (-r.square() / 2).exp()
    return float((error * weight).sum() / (r.square() * weight).sum())


def covering_radius(points: Tensor, starts: int, seed: int) -> float:
    """Angle in degrees from the emptiest place of the sphere to the nearest of ``points [n, 4]``.

    The largest holes are circumcentres: equally far from four points, with no other nearer. From the emptiest of
    ``starts`` random places, each step goes to the emptiest circumcentre of four of the eight nearest points, while
    the hole grows. What is found is a lower bound: a larger hole would have to have been missed by every start.
    """
    points = points.double()
    u = torch.randn(starts, 4, generator=_generator(1000 + seed), dtype=torch.float64)
    u = u / u.norm(dim=1, keepdim=True)
    coarse = points.float().T.contiguous()
    near = torch.cat([(part.float() @ coarse).amax(1) for part in u.split(1024)])
    u = u[near.topk(min(starts, 256), largest=False).indices]
    best = (u @ points.T).amax(1)
    fours = torch.combinations(torch.arange(min(8, len(points))), 4)
    for _ in range(4):
        around = points[(u @ points.T).topk(min(24, len(points))).indices]
        corners = around[:, fours]
        flat = torch.linalg.det(corners).abs() < 1e-9
        corners[flat] = torch.eye(4, dtype=torch.float64)
        centres = torch.linalg.solve(corners, torch.ones_like(corners[..., 0]))
        centres = centres / centres.norm(dim=-1, keepdim=True)
        height = (centres @ around.mT).amax(-1)
        height[flat | ((centres * u[:, None]).sum(-1) < best[:, None])] = 1.0  # another hole's
        trial = centres[torch.arange(len(u)), height.argmin(1)]
        after = (trial @ points.T).amax(1)
        better = after < best
        u, best = torch.where(better[:, None], trial, u), torch.where(better, after, best)
    return math.degrees(math.acos(float(best.min())))


def _distance(u: Tensor, c: Tensor) -> float:
    return float((u - c).square().sum(1).mean())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _secondary(s: int, seed: int) -> Tensor:
    return random_units(s, _generator(500 + seed))


cannot("hqmq", "Tables 1-4, 8-11, 13, 14, 16-18, 20", "perplexity and accuracy of 7B to 20B models")
cannot("hqmq", "Tables 5, 7, 15, 19", "times on the authors' GPU; `kvcodec bench` measures ours on your machine")
cannot("hqmq", "Tables 8, 9, sph_r4_jl4", "its direction code is not defined")
cannot(
    "hqmq",
    "Table 16, perplexities",
    "how the additive code is normalised and searched is not said; three readings are in `additive`",
)
cannot(
    "hqmq",
    "Table 14, seeds",
    "spread of perplexity; the spread of errors from seed to seed, 2 to 4 %, is in the notes above",
)

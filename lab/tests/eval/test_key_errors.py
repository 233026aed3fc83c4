"""Errors of scores on recorded keys: by definition, in the right layer and head, and what each mend leaves of them."""

import pytest
import torch
from torch import Tensor

from kvcodec.cli.measure.fidelity import LayerRecord
from kvcodec.key_bias import BiasError
from kvcodec_lab.eval.key_errors import MENDS, key_errors, less_unrotated_mean, rotated, score_error

D, N, QUERIES = 64, 96, 32
FREQUENCIES = 10000.0 ** (-torch.arange(0, D, 2).float() / D)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def record(layer: int, bias: float = 0.0, head: int = 1) -> LayerRecord:
    """A layer of two KV heads; ``bias`` is added to one channel of a head before RoPE, and the keys turned."""
    k = normal(1, 2, N, D, seed=layer)
    k[:, head, :, D - 1] += bias  # the channel that turns most slowly
    q = normal(1, 4, QUERIES, D, seed=100 + layer)
    k = rotated(k, FREQUENCIES)
    return LayerRecord(layer, q, k, normal(1, 2, N, D, seed=200 + layer), None, D**-0.5, 0.0, None)


def test_the_error_is_that_of_the_definition() -> None:
    r = record(0)
    decoded = r.k + 0.1 * normal(*r.k.shape, seed=5)
    error, shift = score_error(r, decoded)
    for head in range(2):
        e = []
        for i in (2 * head, 2 * head + 1):  # its query heads
            for n in range(QUERIES):
                e.append([float(r.q[0, i, n] @ (decoded - r.k)[0, head, t]) * r.scale for t in range(N - QUERIES)])
        wanted = torch.tensor(e)
        mean = wanted.mean(1, keepdim=True)
        assert float(error[head]) == pytest.approx(float((wanted - mean).pow(2).mean().sqrt()), rel=1e-4)
        assert float(shift[head]) == pytest.approx(float(mean.pow(2).mean().sqrt()), rel=1e-4)


def test_what_all_tokens_share_is_a_shift_and_no_error() -> None:
    r = record(0)
    error, shift = score_error(r, r.k + normal(1, 2, 1, D, seed=6))
    assert error.tolist() == pytest.approx([0, 0], abs=1e-5)
    assert bool((shift > 0.5).all())


def test_rope_is_undone_and_keeps_relative_positions() -> None:
    x = normal(1, 1, N, D, seed=1)
    assert torch.allclose(rotated(rotated(x, FREQUENCIES), FREQUENCIES, -1), x, atol=1e-5)
    a, b = normal(1, D, seed=2).expand(N, D), normal(1, D, seed=3).expand(N, D)
    products = rotated(a, FREQUENCIES) @ rotated(b, FREQUENCIES).T
    assert torch.allclose(products[10, 3], products[60, 53], atol=1e-3)
    assert not torch.allclose(products[10, 3], products[10, 4], atol=1e-3)


def test_the_mean_before_rope_is_the_bias() -> None:
    bias = normal(1, 2, 1, D, seed=4).expand(1, 2, N, D)
    r = record(0)
    r = LayerRecord(0, r.q, rotated(bias, FREQUENCIES), r.v, None, r.scale, 0.0, None)
    left, undo = less_unrotated_mean(r, FREQUENCIES)
    assert float(left.abs().max()) < 1e-4
    assert torch.allclose(undo(left), r.k, atol=1e-5)
    for change in MENDS.values():  # undone, nothing is left of any of them
        keys, undo = change(r, FREQUENCIES)
        assert torch.allclose(undo(keys), r.k, atol=1e-4)


def test_a_biased_head_is_found_and_mended() -> None:
    records = [record(0), record(1, 300.0), record(2)]
    row = key_errors(records, "int-4", frequencies=FREQUENCIES)
    assert (row["spec"], row["layer"], row["head"]) == ("int-4", 1, 1)
    assert row["by_layer"][1] == row["error"] > 0.9  # all that tells keys apart is rounded away: scores of deviation 1
    assert max(row["by_layer"][0], row["by_layer"][2]) < 0.3
    assert row["probe"]["warned"]
    assert row["probe"]["layer"] == 1
    assert row["check"] is None
    calm = key_errors([record(0), record(1), record(2)], "int-4", frequencies=FREQUENCIES, mends=False)
    assert not calm["probe"]["warned"]
    assert calm["mends"] == {}
    assert row["mends"]["mean before RoPE"] < 0.3
    assert row["mends"]["outliers"] < 0.3
    assert set(row["mends"]) == {*MENDS, "outliers"}


def test_groups_along_tokens_need_no_mending() -> None:
    row = key_errors([record(0), record(1, 300.0)], "kivi-4", frequencies=FREQUENCIES, mends=False)
    # slow channels turn a little within a group, so some of the bias is left in its range
    assert row["error"] < key_errors([record(0), record(1, 300.0)], "int-4", mends=False)["error"] / 4
    assert not row["probe"]["warned"]


def test_a_preset_that_removes_the_mean_is_measured_without_it() -> None:
    records = [record(0), record(1, 300.0)]
    mended = key_errors(records, "int-4", frequencies=FREQUENCIES)["mends"]["mean before RoPE"]
    row = key_errors(records, "int-4:mean=pre", frequencies=FREQUENCIES)
    assert row["error"] == pytest.approx(mended)
    assert row["mends"] == {}
    assert not row["probe"]["warned"]


def test_layers_with_dense_keys_have_no_error() -> None:
    row = key_errors([record(0, 300.0), record(1), record(2, 300.0)], "octopus-4", mends=False)
    assert row["by_layer"][0] is None
    assert row["by_layer"][2] is None
    assert row["layer"] == 1
    dense = key_errors([record(0, 300.0)], "octopus-4")
    assert dense["error"] is None
    assert dense["layer"] is None
    assert dense["mends"] == {}
    assert dense["probe"]["layer"] is None


def test_the_check_of_the_weights_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        def worst(self, scheme: object) -> BiasError:
            return BiasError(7, 5.0, 1.0)

        def holds(self, layer: int, codec: object, mean: str) -> bool:
            return True

    row = key_errors([record(0, 300.0)], "int-4", biases=Known(), mends=False)  # type: ignore[arg-type]
    assert row["check"] == {"warned": True, "layer": 7, "error": 5.0, "without": 1.0}
    assert not row["probe"]["warned"], "the probe is silent where the check knows that scores are nearly right"

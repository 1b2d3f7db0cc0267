"""Packing: algorithms against plain ones, rows laid out by hand, nothing lost without a word."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from query_mutator.batching import (
    PackingConfig,
    PackingMode,
    SequenceToPack,
    compute_packing_metrics,
    create_segment_attention_mask,
    pack_sequences,
)
from query_mutator.batching.planning.binpacking import (
    pack_best_fit,
    pack_decreasing,
    pack_first_fit,
    pack_in_order,
)
from query_mutator.errors import UsageError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=200)


def sequence(name: str, ids: list[int], mask: list[int] | None = None) -> SequenceToPack:
    return SequenceToPack(sample_id=name, input_ids=ids, loss_mask=mask or [1] * len(ids))


def plain_first_fit(lengths: list[int], capacity: int, most: int | None) -> list[list[int]]:
    packs: list[list[int]] = []
    for number, length in enumerate(lengths):
        for pack in packs:
            if sum(lengths[one] for one in pack) + length <= capacity and (most is None or len(pack) < most):
                pack.append(number)
                break
        else:
            packs.append([number])
    return packs


@given(lengths=LENGTHS, most=st.sampled_from([None, 1, 3]))
@settings(max_examples=50, deadline=None)
def test_first_fit_is_first_fit(lengths: list[int], most: int | None) -> None:
    packs = pack_first_fit(np.array(lengths), 40, max_segments=most)
    found = [part.tolist() for part in np.split(packs.order, packs.offsets[1:-1])]
    assert found == plain_first_fit(lengths, 40, most)


def test_first_fit_over_many_blocks_is_first_fit() -> None:
    lengths = np.random.default_rng(0).integers(20, 41, 400).tolist()  # most packs hold one: several blocks of packs
    packs = pack_first_fit(np.array(lengths), 60)
    assert [part.tolist() for part in np.split(packs.order, packs.offsets[1:-1])] == plain_first_fit(lengths, 60, None)


@given(lengths=LENGTHS)
@settings(max_examples=50, deadline=None)
def test_decreasing_is_best_fit_of_the_sorted_lengths(lengths: list[int]) -> None:
    packs = pack_decreasing(np.array(lengths), 40)
    sorted_packs = pack_best_fit(np.array(sorted(lengths, reverse=True)), 40)
    assert len(packs.offsets) == len(sorted_packs.offsets)


@given(lengths=LENGTHS)
@settings(max_examples=50, deadline=None)
def test_the_order_preserving_packs_follow_the_input(lengths: list[int]) -> None:
    packs = pack_in_order(np.array(lengths), 40)
    assert packs.order.tolist() == list(range(len(lengths)))
    totals = packs.totals(np.array(lengths))
    firsts = np.array(lengths)[packs.offsets[1:-1]]
    assert (totals[:-1] + firsts > 40).all()  # no pack could have taken the next sequence too


def test_greedy_fills_almost_completely() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(200), 1.0, 100_000)), 1, 2048).astype(np.int32)
    for packer, least in ((pack_decreasing, 0.9998), (pack_first_fit, 0.996), (pack_best_fit, 0.996)):
        packs = packer(lengths, 2048)
        assert lengths.sum() / (2048 * (len(packs.offsets) - 1)) >= least


def test_a_pack_is_laid_out_by_hand() -> None:
    packs = pack_sequences([sequence("a", [1, 2, 3], [0, 1, 1]), sequence("b", [4, 5])], PackingConfig(max_length=8), 9)
    (pack,) = packs
    assert pack.input_ids.tolist() == [1, 2, 3, 4, 5, 9, 9, 9]
    assert pack.segment_ids.tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert pack.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert pack.loss_mask.tolist() == [0, 1, 1, 0, 1, 0, 0, 0]  # b's first token follows a's last: no loss on it
    assert pack.labels.tolist() == [-100, 2, 3, -100, 5, -100, -100, -100]
    assert pack.cu_seqlens.tolist() == [0, 3, 5]
    assert (pack.max_seqlen, pack.total_tokens, pack.padding_tokens, pack.num_segments) == (3, 5, 3, 2)
    assert (pack.sample_ids, pack.sample_lengths, pack.efficiency) == (("a", "b"), (3, 2), 5 / 8)


def test_separators_stand_between_segments() -> None:
    config = PackingConfig(max_length=11, add_separator=True, separator_token_id=7, pad_to_max=False)
    (pack,) = pack_sequences([sequence("a", [1] * 5), sequence("b", [2] * 5)], config)
    assert pack.input_ids.tolist() == [1, 1, 1, 1, 1, 7, 2, 2, 2, 2, 2]
    assert pack.segment_ids.tolist() == [0] * 6 + [1] * 5
    assert pack.loss_mask[5] == 0
    assert len(pack_sequences([sequence("a", [1] * 5), sequence("b", [2] * 6)], config)) == 2
    with pytest.raises(ValidationError, match="separator_token_id"):
        PackingConfig(add_separator=True)


@pytest.mark.parametrize("mode", list(PackingMode))
def test_overlong_sequences_follow_the_named_policy(mode: PackingMode) -> None:
    sequences = [sequence("long", list(range(1, 11))), sequence("short", [1, 2])]
    with pytest.raises(UsageError, match="1 of 2 samples are longer than 4"):
        pack_sequences(sequences, PackingConfig(mode=mode, max_length=4))
    dropped = pack_sequences(sequences, PackingConfig(mode=mode, max_length=4, overlong="drop"))
    assert (dropped.report.num_dropped, compute_packing_metrics(dropped).num_skipped) == (1, 1)
    truncated = pack_sequences(sequences, PackingConfig(mode=mode, max_length=4, overlong="truncate"))
    assert sorted(one for pack in truncated for one in pack.sample_lengths) == [2, 4]
    assert truncated.report.tokens_lost == 6
    split = pack_sequences(sequences, PackingConfig(mode=mode, max_length=4, overlong="split"))
    assert (split.report.num_pieces, compute_packing_metrics(split).num_original_samples) == (3, 4)
    assert sorted(one for pack in split for one in pack.input_ids[pack.segment_ids >= 0]) == sorted(
        [*range(1, 11), 1, 2]
    )


def test_mismatched_sequences_are_refused() -> None:
    with pytest.raises(ValidationError, match="2 input_ids but 1 loss_mask"):
        sequence("a", [1, 2], [1])
    assert pack_sequences([], PackingConfig()) == []


def test_metrics_by_hand() -> None:
    packs = pack_sequences(
        [sequence("a", [1] * 3), sequence("b", [1] * 3), sequence("c", [1])], PackingConfig(max_length=4)
    )
    metrics = compute_packing_metrics(packs)
    assert (metrics.num_original_samples, metrics.num_packed_sequences) == (3, 2)
    assert (metrics.packing_ratio, metrics.efficiency, metrics.total_loss_tokens) == (1.5, 7 / 8, 4)
    assert metrics.saving_over(12) == pytest.approx(1 / 3)
    assert metrics.summary()["efficiency"] == 7 / 8


def test_the_mask_keeps_segments_apart() -> None:
    mask = create_segment_attention_mask([0, 0, 1, -1])
    assert mask.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert create_segment_attention_mask([0, 0, 1, -1], causal=False)[0].tolist() == [True, True, False, False]


def test_an_mlx_mask_needs_mlx() -> None:
    if importlib.util.find_spec("mlx") is not None:
        pytest.skip("MLX is installed")
    with pytest.raises(UsageError, match="pip install mlx"):
        create_segment_attention_mask([0, 0], use_mlx=True)

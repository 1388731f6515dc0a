import numpy as np
import pytest

from pipeline import batches
from pipeline.dataset import padded_length
from pipeline.seeds import derive_seed

REALISTIC = np.clip(np.random.Generator(np.random.PCG64(0)).lognormal(4.5, 0.8, 20_000).astype(int), 1, 256)


def padded_share(plan, lengths):
    return 1 - lengths.sum() / sum(len(rows) * lengths[rows].max() for rows in plan)


@pytest.mark.parametrize("make", [lambda n, b: batches.epoch_plan(n, b, 3, 2), batches.sequential_plan])
@pytest.mark.parametrize("lengths", [REALISTIC, np.array([300, 1, 0, 0, 7, 100, 101]), np.zeros(50, int), [5]])
@pytest.mark.parametrize("batch_tokens", [100, 4096])
def test_every_row_once_and_no_batch_over_the_budget(make, lengths, batch_tokens):
    lengths = np.asarray(lengths)
    plan = make(lengths, batch_tokens)
    np.testing.assert_array_equal(np.sort(np.concatenate(plan)), np.arange(len(lengths)))
    for rows in plan:
        assert len(rows) == 1 or len(rows) * max(1, lengths[rows].max()) <= batch_tokens


@pytest.mark.parametrize("plan", [batches.epoch_plan([], 8, 0, 0), batches.sequential_plan([], 8)])
def test_no_rows_no_batches(plan):
    assert plan == []


def test_sequential_plan_by_hand():
    # Sorted: 9 | 4 4 (8, a third would make 12) | 3 (2 beside it would be a sixth of padding) | 2 1 0, four would fit
    plan = batches.sequential_plan([1, 4, 9, 3, 4, 0, 2], 8)
    assert [rows.tolist() for rows in plan] == [[2], [1, 4], [3], [6, 0, 5]]


def test_a_zero_length_row_takes_one_position():
    assert sorted(map(len, batches.sequential_plan([0] * 10, 4))) == [2, 4, 4]


def test_epoch_plan_by_hand():
    # Equal lengths, 3 of 10 tokens in a batch of 32: only the shuffle is left to chance.
    plan = batches.epoch_plan([10] * 7, 32, seed=1, epoch=0)
    assert sorted(map(len, plan)) == [1, 3, 3]


@pytest.mark.parametrize("lengths", [REALISTIC, np.zeros(130, int)])
def test_batches_of_few_rows(lengths):
    plan = batches.epoch_plan(lengths, 4096, 17, 0, batch_rows=20)
    np.testing.assert_array_equal(np.sort(np.concatenate(plan)), np.arange(len(lengths)))
    assert max(map(len, plan)) == 20
    assert all(len(rows) * max(1, lengths[rows].max()) <= 4096 for rows in plan)
    assert len(plan) < 1.3 * len(lengths) / 20 + 1  # and still batches, not crumbs
    # No cap, or one that no batch reaches: the same plan. (Zero lengths count as 1.)
    loose = batches.epoch_plan(lengths, 4096, 17, 0, batch_rows=4096)
    for a, b in zip(loose, batches.epoch_plan(lengths, 4096, 17, 0), strict=True):
        np.testing.assert_array_equal(a, b)


def test_batches_of_few_rows_are_padded_little_and_mixed_anew():
    plans = [batches.epoch_plan(REALISTIC, 4096, 17, epoch, batch_rows=20) for epoch in (0, 1)]
    assert padded_share(plans[0], REALISTIC) < 0.06
    mates = [{frozenset(rows.tolist()) for rows in plan} for plan in plans]
    assert not mates[0] & mates[1]


def test_epoch_plan_is_a_pure_function_of_its_arguments():
    np.random.seed(0)
    first = batches.epoch_plan(REALISTIC, 4096, 17, 3)
    np.random.seed(1)
    second = batches.epoch_plan(REALISTIC.tolist(), 4096, 17, 3)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    for seed, epoch in ((18, 3), (17, 4)):
        other = batches.epoch_plan(REALISTIC, 4096, seed, epoch)
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=False))


def test_epoch_plan_stays_what_it_was():
    # A checkpoint holds (epoch, step) only: another plan for the same arguments would break its resume.
    plan = batches.epoch_plan([3, 1, 4, 1, 5, 9, 2, 6], 12, seed=17, epoch=1)
    assert [rows.tolist() for rows in plan] == [[5], [4], [2], [7], [0, 6], [1, 3]]


@pytest.mark.parametrize("batch_tokens", [2048, 4096, 8192])
def test_little_padding_and_no_order_by_length(batch_tokens):
    plan = batches.epoch_plan(REALISTIC, batch_tokens, 17, 0)
    assert padded_share(plan, REALISTIC) < 0.06
    longest = np.array([REALISTIC[rows].max() for rows in plan])
    assert abs(np.corrcoef(longest, np.arange(len(plan)))[0, 1]) < 0.2


def test_pools_leave_no_small_batches_over():
    plan = batches.epoch_plan(REALISTIC, 4096, 17, 0)
    smallest = 4096 // 256
    assert sum(len(rows) < smallest for rows in plan) <= 1


def test_batch_mates_change_from_epoch_to_epoch():
    def batch_of_row(epoch):
        found = np.empty(len(REALISTIC), int)
        for i, rows in enumerate(batches.epoch_plan(REALISTIC, 4096, 17, epoch)):
            found[rows] = i
        return found

    first, second = batch_of_row(0), batch_of_row(1)
    _, together = np.unique(np.stack([first, second]), axis=1, return_counts=True)
    _, size = np.unique(first, return_counts=True)
    assert (together * (together - 1)).sum() / (size * (size - 1)).sum() < 0.1


def dropped(token_ids, rows=None, rate=0.3, seed=1, epoch=2):
    rows = np.arange(len(token_ids)) if rows is None else np.asarray(rows)
    return batches.drop_tokens(np.asarray(token_ids, np.int32), rows, rate, 2, seed, epoch)


def test_a_share_of_the_tokens_is_hidden_and_never_padding():
    token_ids = np.full((400, 500), 7, np.int32)
    token_ids[:, 300:] = 0
    found = dropped(token_ids)
    assert found.dtype == np.int32
    assert (token_ids[:, :300] == 7).all()  # left as it was
    assert (found[:, 300:] == 0).all()
    hidden = found[:, :300] == 2
    assert (hidden | (found[:, :300] == 7)).all()
    # 4 standard deviations, of all tokens, of the rows and of the positions; and of neighbours both ways.
    assert hidden.mean() == pytest.approx(0.3, abs=4 * (0.21 / hidden.size) ** 0.5)
    assert hidden.mean(axis=1).std() == pytest.approx((0.21 / 300) ** 0.5, rel=4 / (2 * 400) ** 0.5)
    assert hidden.mean(axis=0).std() == pytest.approx((0.21 / 400) ** 0.5, rel=4 / (2 * 300) ** 0.5)
    for a, b in ((hidden[:, 1:], hidden[:, :-1]), (hidden[1:], hidden[:-1])):
        assert (a & b).mean() == pytest.approx(0.09, abs=0.005)
    np.testing.assert_array_equal(dropped(token_ids, rate=0.0), token_ids)
    assert (dropped(token_ids, rate=1.0)[:, :300] == 2).all()


def test_what_is_hidden_depends_on_seed_epoch_and_row_alone():
    token_ids = np.arange(3, 603, dtype=np.int32).reshape(6, 100)
    found = dropped(token_ids, rows=[5, 0, 3, 9, 70_000, 1])
    alone = dropped(np.pad(token_ids[[4, 2]], ((0, 0), (0, 9))), rows=[70_000, 3])
    np.testing.assert_array_equal(alone[:, :100], found[[4, 2]])
    for other in ({"seed": 2}, {"epoch": 3}):
        assert ((dropped(token_ids, **other) == 2) != (dropped(token_ids) == 2)).mean() == pytest.approx(0.42, abs=0.09)


def test_hidden_tokens_stay_what_they_were():
    # A checkpoint holds the position only: other tokens for the same arguments would break its resume.
    found = dropped(np.full((3, 12), 7), rows=[0, 1, 100_000], seed=17, epoch=1)
    hidden = ["".join("x" if i == 2 else "_" for i in row) for row in found]
    assert hidden == ["xx___x___x__", "____x____x__", "____x___xx_x"]


PIECES = np.array([5, 6, 9], np.int32)


def masked(token_ids, rows=None, share=0.15, seed=1, epoch=2):
    rows = np.arange(len(token_ids)) if rows is None else np.asarray(rows)
    return batches.mask_tokens(np.asarray(token_ids, np.int32), rows, share, 2, PIECES, seed, epoch)


def test_a_share_is_masked_in_three_ways_and_never_padding():
    token_ids = np.full((400, 500), 7, np.int32)
    token_ids[:, 300:] = 0
    found, chosen = masked(token_ids)
    assert (found.dtype, chosen.dtype) == (np.int32, bool)
    assert (token_ids[:, :300] == 7).all()  # left as it was
    assert (found[:, 300:] == 0).all() and not chosen[:, 300:].any()
    assert (found[~chosen] == token_ids[~chosen]).all()
    assert chosen[:, :300].mean() == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / 120_000) ** 0.5)
    assert chosen[:, :300].mean(axis=1).std() == pytest.approx((0.15 * 0.85 / 300) ** 0.5, rel=4 / (2 * 400) ** 0.5)
    values = found[chosen]
    for value, expected in ((2, 0.8), (7, 0.1), (5, 1 / 30), (6, 1 / 30), (9, 1 / 30)):
        tolerance = 4 * (expected * (1 - expected) / len(values)) ** 0.5
        assert np.mean(values == value) == pytest.approx(expected, abs=tolerance)
    assert set(np.unique(values)) == {2, 5, 6, 7, 9}


def test_what_is_masked_depends_on_seed_epoch_and_row_alone():
    token_ids = np.arange(10, 610, dtype=np.int32).reshape(6, 100)
    found, chosen = masked(token_ids, rows=[5, 0, 3, 9, 70_000, 1])
    alone = masked(np.pad(token_ids[[4, 2]], ((0, 0), (0, 9))), rows=[70_000, 3])
    np.testing.assert_array_equal(alone[0][:, :100], found[[4, 2]])
    np.testing.assert_array_equal(alone[1][:, :100], chosen[[4, 2]])
    for other in ({"seed": 2}, {"epoch": 3}, {"epoch": "validation"}):
        assert (masked(token_ids, **other)[1] != masked(token_ids)[1]).mean() == pytest.approx(0.255, abs=0.08)
    assert all(np.array_equal(a, b) for a, b in zip(masked(token_ids), masked(token_ids), strict=True))
    # Of a short row nothing may be chosen.
    assert not masked([[7]] * 5, rows=range(5), share=1e-9)[1].any()


def test_masked_tokens_stay_what_they_were():
    # A checkpoint holds the position only: other tokens for the same arguments would break its resume.
    found, chosen = masked(np.full((3, 12), 7), rows=[0, 1, 100_000], share=0.5, seed=17, epoch=1)
    shown = np.where(chosen, np.where(found == 7, "=", found.astype(str)), "_")
    assert ["".join(row) for row in shown] == ["__2222__2__2", "___22__22_59", "2_2_92__2___"]


def test_hash_is_splitmix64():
    # The first numbers of SplitMix64 from state 0, as in the reference implementation's tests.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert batches._hash(np.arange(1, 4, dtype=np.uint64)).tolist() == expected


def test_derive_seed_is_blake2b_of_seed_and_name():
    # python3 -c "import hashlib; print(hashlib.blake2b(b'17/batches/1', digest_size=4).hexdigest())"
    assert derive_seed(17, "batches/1") == 0x4035F662
    assert derive_seed(17, "batches/1") != derive_seed(18, "batches/1") != derive_seed(17, "batches/2")


@pytest.mark.parametrize("batch_tokens", [512, 2048])
def test_few_batches_of_short_texts_are_padded_little(batch_tokens):
    # Questions of 3 to 38 tokens.
    lengths = np.clip(np.random.default_rng(0).lognormal(2.3, 0.35, 4900).astype(int), 3, 38)
    plan = batches.epoch_plan(lengths, batch_tokens, seed=1, epoch=0)
    assert padded_share(plan, lengths) < 0.06
    padded = [len(rows) * lengths[rows].max() for rows in plan]
    assert np.mean(np.array(padded) >= 0.4 * batch_tokens) > 0.9  # and still batches, not crumbs


@pytest.mark.parametrize("batch_tokens", [512, 4096])
def test_batches_have_few_shapes(batch_tokens):
    shapes = set()
    for epoch in range(4):
        plan = batches.epoch_plan(REALISTIC, batch_tokens, 17, epoch)
        shapes |= {(len(rows), padded_length(REALISTIC[rows].max())) for rows in plan}
    assert len(shapes) < 130  # of 1,500 or 30,000 batches

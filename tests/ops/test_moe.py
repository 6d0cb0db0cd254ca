"""Routing with ties, groups and refusals worked out by hand; both forms of the expert products against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msds_ops.moe import (
    block_shape,
    count_chosen,
    count_chosen_numpy,
    expert_of_rows,
    moe_experts,
    moe_experts_numpy,
    moe_experts_sorted,
    moe_experts_sorted_numpy,
    place_pairs,
    rank_descending,
    scores_from_logits,
    select_groups,
    top_experts,
)


class TestRouting:
    def test_rank_of_ties_is_by_index(self, run, rng):
        def ranks(batch):
            return rank_descending(batch["scores"])

        scores = np.round(rng.normal(size=(40, 12)), 0).astype(np.float32)  # few values, so most rows have ties
        scores[0] = 1.0
        scores[1, 4:8] = -np.inf
        got = run(ranks, {"scores": scores})
        order = np.argsort(-scores, axis=-1, kind="stable")
        want = np.empty_like(order)
        np.put_along_axis(want, order, np.arange(12)[None].repeat(40, 0), axis=-1)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == np.int32

    def test_scoring_functions(self, run):
        def scores(batch):
            return scores_from_logits(batch["x"], "sigmoid"), scores_from_logits(batch["x"], "softmax")

        x = np.array([[0, np.log(3), -np.log(4)]], np.float32)
        sigmoid, softmax = run(scores, {"x": x})
        np.testing.assert_allclose(sigmoid, [[0.5, 0.75, 0.2]], rtol=1e-6)
        np.testing.assert_allclose(softmax, np.array([[1, 3, 0.25]]) / 4.25, rtol=1e-5)

    @pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
    def test_a_token_that_is_not_finite_still_names_experts_that_exist(self, run, scoring_func):
        """Ranks of NaN name experts beyond the last, and an index error ends the step for every sequence in it."""

        def routed(batch):
            scores = scores_from_logits(batch["logits"], scoring_func)
            choice = select_groups(scores, 4, 2, by_top2=True)
            return top_experts(choice, scores, 3)

        logits = np.zeros((4, 16), np.float32)
        logits[0], logits[1, 5], logits[2, 7] = np.nan, np.nan, np.inf
        idx, weights = run(routed, {"logits": logits})
        assert idx.dtype == np.int32
        assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 16 for row in idx.tolist())
        assert np.isfinite(weights).all()

    def test_chosen_experts_are_counted_without_padding(self, run, rng):
        def counted(batch):
            return count_chosen(batch["idx"], 6)

        idx = rng.integers(0, 5, (9, 3)).astype(np.int32)  # nobody chooses expert 5
        idx[::3] = 6
        got = run(counted, {"idx": idx})
        np.testing.assert_array_equal(got, count_chosen_numpy(idx, 6))
        assert got.dtype == np.int32
        assert got.sum() == 6 * 3

    def test_group_score_is_the_sum_of_two_or_the_best(self, run):
        def selected(batch):
            by_sum = select_groups(batch["choice"], 2, 1, by_top2=True)
            return by_sum, select_groups(batch["choice"], 2, 1, by_top2=False)

        choice = np.array(
            [
                [0.9, 0.1, 0.1, 0.1, 0.6, 0.5, 0.3, 0.1],  # 1.0 against 1.1; 0.9 against 0.6
                [0.5, 0.5, 0.5, 0.5, 0.6, 0.5, 0.0, 0.0],  # the third of a group does not count
                [0.3, 0.3, 0.0, 0.0, 0.3, 0.3, 0.2, 0.1],  # equal groups: the first
                [-0.1, -0.9, -0.9, -0.9, -0.4, -0.4, -0.5, -0.5],  # below zero the rules are the same
            ],
            np.float32,
        )
        by_sum, by_best = run(selected, {"choice": choice})
        for row, (summed, best) in enumerate([(1, 0), (1, 1), (0, 0), (1, 0)]):
            for got, kept in ((by_sum[row], summed), (by_best[row], best)):
                inside = slice(4 * kept, 4 * kept + 4)
                np.testing.assert_array_equal(got[inside], choice[row, inside])
                assert np.isneginf(np.delete(got, np.arange(8)[inside])).all()

    def test_groups_of_one_expert(self, run):
        def selected(batch):
            return select_groups(batch["choice"], 4, 2, by_top2=True)

        got = run(selected, {"choice": np.array([[1, 4, 2, 3]], np.float32)})
        np.testing.assert_array_equal(got, [[-np.inf, 4, -np.inf, 3]])

    def test_top_experts_are_ranked_by_choice_and_weighed_by_scores(self, run):
        def top(batch):
            return top_experts(batch["choice"], batch["scores"], 3)

        choice = np.array([[0, 5, 5, 7, -np.inf], [-3, -1, -1, -1, -2]], np.float32)
        scores = np.array([[0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.2, 0.1]], np.float32)
        idx, weights = run(top, {"choice": choice, "scores": scores})
        np.testing.assert_array_equal(idx, [[3, 1, 2], [1, 2, 3]])
        np.testing.assert_allclose(weights, [[0.4, 0.2, 0.3], [0.4, 0.3, 0.2]])


# T, K, E: pairs below, at and above the number of experts; the last has blocks of 8 rows
GRID = [(1, 1, 1), (1, 2, 4), (5, 2, 16), (8, 2, 16), (3, 4, 4), (40, 2, 16), (64, 3, 16), (64, 1, 8)]


def routings(rng, tokens, chosen, experts):
    """Chosen experts [T, K] for: chance, all to the same few, all but the first expert, one expert apart."""
    first = np.tile(np.arange(chosen), (tokens, 1))
    random = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)])
    last = np.tile(experts - 1 - np.arange(chosen), (tokens, 1))
    lonely = first.copy()
    lonely[tokens // 2, 0] = experts - 1 if chosen < experts else 0
    return [idx.astype(np.int32) for idx in (random, first, last, lonely)]


class TestExperts:
    @pytest.mark.parametrize(("tokens", "chosen", "experts"), GRID)
    def test_both_forms_equal_the_reference(self, rng, tokens, chosen, experts):
        """Skewed loads included: all tokens on the same experts, and experts that nobody chose."""
        from msds_graphs.compile import compile

        def step(node, donated, batch):
            x, idx, weights = batch["x"], batch["idx"], batch["weights"]
            dense = moe_experts(x, idx, weights, node, "reference")
            return {"dense": dense, "chosen": moe_experts(x, idx, weights, node, "portable")}, donated

        shapes = {"gate_proj": (experts, 6, 8), "up_proj": (experts, 6, 8), "down_proj": (experts, 8, 6)}
        node = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        batch = {
            "x": rng.normal(size=(tokens, 8)).astype(np.float32),
            "weights": rng.random((tokens, chosen)).astype(np.float32),
        }
        loads = routings(rng, tokens, chosen, experts)
        compiled = compile(step, bound=node, batch=batch | {"idx": loads[0]})
        for idx in loads:
            got = compiled(batch | {"idx": idx})
            want = moe_experts_numpy(batch["x"], idx, batch["weights"], *node.values())
            for form, values in got.items():
                assert values.shape == (tokens, 8)
                np.testing.assert_allclose(values, want, atol=1e-5 * np.abs(want).max(), err_msg=form)

    @pytest.mark.parametrize(("tokens", "chosen", "experts"), [(2, 3, 8), (40, 2, 4)])
    def test_parts_of_the_experts_add_up(self, rng, tokens, chosen, experts):
        """Pairs of other ranks add nothing, even where what they would be computed with is infinite."""
        from msds_graphs.compile import compile

        def step(node, donated, batch):
            x, idx, weights = batch["x"], batch["idx"], batch["weights"]
            dense = moe_experts(x, idx, weights, node, "reference", True)
            return {"dense": dense, "chosen": moe_experts(x, idx, weights, node, "portable", True)}, donated

        shapes = {"gate_proj": (experts, 6, 8), "up_proj": (experts, 6, 8), "down_proj": (experts, 8, 6)}
        node = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        x = rng.normal(size=(tokens, 8)).astype(np.float32)
        weights = rng.random((tokens, chosen)).astype(np.float32)
        held = experts // 2
        batch = {"x": x, "weights": weights, "idx": np.zeros((tokens, chosen), np.int32)}
        parts = []
        for first in (0, held):
            part = {name: np.ascontiguousarray(values[first : first + held]) for name, values in node.items()}
            parts.append((first, compile(step, bound=part, batch=batch)))
        for idx in routings(rng, tokens, chosen, experts):
            want = moe_experts_numpy(x, idx, weights, *node.values())
            total = {"dense": np.zeros_like(want), "chosen": np.zeros_like(want)}
            for first, compiled in parts:
                slots = np.where((idx >= first) & (idx < first + held), idx - first, held).astype(np.int32)
                for form, values in compiled(batch | {"idx": slots}).items():
                    total[form] += values
            for form, values in total.items():
                np.testing.assert_allclose(values, want, atol=1e-5 * np.abs(want).max(), err_msg=form)
        broken = np.array(x)
        broken[0] = 1e30  # overflows in every expert
        slots = np.full((tokens, chosen), held, np.int32)
        for _, compiled in parts:
            assert (compiled(batch | {"x": broken, "idx": slots})["chosen"] == 0).all()

    @pytest.mark.parametrize(("rows", "experts"), [(5, 8), (24, 4), (7, 1)])
    def test_sorted_rows_equal_the_reference(self, rng, rows, experts):
        """Experts without rows, all rows of one, none at all; what stands behind the counted rows is not a number."""
        from msds_graphs.compile import compile
        from msds_graphs.specs import ArraySpec

        def step(node, donated, batch):
            x, counts = batch["x"], batch["counts"]
            dense = moe_experts_sorted(x, counts, node, "reference")
            blocked = moe_experts_sorted(x, counts, node, "portable")
            return {"dense": dense, "blocked": blocked, "expert": expert_of_rows(counts, x.shape[0])}, donated

        shapes = {"gate_proj": (experts, 6, 8), "up_proj": (experts, 6, 8), "down_proj": (experts, 8, 6)}
        node = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        x = rng.normal(size=(rows, 8)).astype(np.float32)
        compiled = compile(step, bound=node, batch={"x": x, "counts": ArraySpec((experts,), "int64")})
        some = np.bincount(rng.integers(0, experts, rows - 2), minlength=experts)
        one = np.eye(experts, dtype=np.int64)[-1]
        for counts in (some, rows * one, (rows - 1) * one[::-1], 0 * one):
            total = counts.sum()
            x[total:] = np.nan
            got = compiled({"x": np.array(x), "counts": counts.astype(np.int64)})
            want = moe_experts_sorted_numpy(x, counts, *node.values())
            for form in ("dense", "blocked"):
                np.testing.assert_allclose(got[form][:total], want, atol=1e-5 * np.abs(want).max(initial=1))
            np.testing.assert_array_equal(got["expert"], np.repeat(np.arange(experts + 1), [*counts, rows - total]))
            x = rng.normal(size=(rows, 8)).astype(np.float32)

    def test_sorted_rows_are_what_pairs_are(self, rng):
        """The two references agree: pairs sorted by expert, computed and put back."""
        gate, up, down = (rng.normal(size=shape) for shape in ((4, 6, 8), (4, 6, 8), (4, 8, 6)))
        x, weights = rng.normal(size=(5, 8)), rng.random((5, 2))
        idx = np.stack([rng.permutation(4)[:2] for _ in range(5)])
        order = np.argsort(idx.reshape(-1), kind="stable")
        counts = np.bincount(idx.reshape(-1), minlength=4)
        pairs = np.empty((10, 8))
        pairs[order] = moe_experts_sorted_numpy(x[order // 2], counts, gate, up, down)
        want = moe_experts_numpy(x, idx, weights, gate, up, down)
        np.testing.assert_allclose((pairs.reshape(5, 2, 8) * weights[..., None]).sum(1), want)

    def test_grid_has_every_block_height(self):
        heights = {block_shape(tokens * chosen, experts)[0] for tokens, chosen, experts in GRID}
        assert heights == {1, 2, 4, 8}

    @given(st.integers(1, 600), st.integers(1, 64), st.data())
    def test_blocks_suffice_for_every_routing(self, pairs, experts, data):
        """The worst case is many experts that each start a block: any load of any expert must find room."""
        block_rows, num_blocks = block_shape(pairs, experts)
        cuts = sorted(data.draw(st.lists(st.integers(0, pairs), min_size=experts - 1, max_size=experts - 1)))
        loads = np.diff([0, *cuts, pairs])
        if block_rows > 1:
            assert -(-loads // block_rows) @ np.ones(experts) <= num_blocks
        assert num_blocks * block_rows >= pairs
        assert block_rows == 1 or block_rows * experts <= pairs

    @pytest.mark.parametrize(("pairs", "experts"), [(64, 16), (64, 4), (130, 16)])
    def test_places_are_distinct_and_in_blocks_of_their_expert(self, run, rng, pairs, experts):
        block_rows, num_blocks = block_shape(pairs, experts)

        def placed(batch):
            uneven, same = batch["uneven"], batch["same"]
            return (
                place_pairs(uneven, experts, block_rows, num_blocks),
                place_pairs(same, experts, block_rows, num_blocks),
            )

        uneven = np.minimum(rng.integers(0, experts, pairs), rng.integers(0, experts, pairs)).astype(np.int32)
        same = np.full(pairs, experts - 1, np.int32)
        for expert_of_pair, (place, block_expert) in zip(
            (uneven, same), run(placed, {"uneven": uneven, "same": same}), strict=True
        ):
            assert len(set(place.tolist())) == pairs
            assert place.min() >= 0
            assert place.max() < block_rows * num_blocks
            np.testing.assert_array_equal(block_expert[place // block_rows], expert_of_pair)
            assert block_expert.max() < experts
            assert place.dtype == block_expert.dtype == np.int32
            for expert in range(experts):  # stable: pairs of one expert stay in order
                assert (np.diff(place[expert_of_pair == expert]) > 0).all()

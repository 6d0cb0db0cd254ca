"""The paged cache: both writers against NumPy, and what a broken token may not do to others."""

import numpy as np
import pytest

from msds_ops.attention import attend_latent, attention_bias
from msds_ops.cache import cache_add, cache_read, cache_write, cache_write_numpy, context_mask, context_slots, head_rows


@pytest.fixture(scope="module")
def writers():
    """Per implementation: write(values, rows) on a cache [12, 4] that lives as long as the module."""
    from msds_graphs.compile import compile

    def make(impl):
        def step(bound, cache, batch):
            written = cache_write(cache, batch["values"], batch["rows"], impl)
            return {"seen": cache_read(written, batch["read"])}, written

        batch = {
            "values": np.zeros((2, 3, 4), np.float32),
            "rows": np.zeros((2, 3), np.int32),
            "read": np.zeros((5, 2), np.int32),
        }
        cache = np.arange(48, dtype=np.float32).reshape(12, 4)
        return compile(step, bound=(), donated=cache, batch=batch, in_place=impl == "portable")

    return {impl: make(impl) for impl in ("reference", "portable")}


@pytest.mark.parametrize("impl", ["reference", "portable"])
def test_rows_are_added_to(impl):
    from msds_graphs.compile import compile

    def step(bound, cache, batch):
        added = cache_add(cache, batch["values"], 1, impl)
        return added + 0, cache_add(added, batch["values"], 0, impl)

    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    counts = np.full((4, 3), 100, np.int32)
    compiled = compile(step, bound=(), donated=counts, batch={"values": values}, in_place=impl == "portable")
    want = np.full((4, 3), 100)
    for _ in range(2):
        want[1:3] += values
        np.testing.assert_array_equal(compiled({"values": values})[:1], want[:1])
        want[0:2] += values
        np.testing.assert_array_equal(compiled.donated.asnumpy(), want)


def fresh(step):
    from msds_graphs.binding import assign

    assign(step.donated, np.arange(48, dtype=np.float32).reshape(12, 4))


@pytest.mark.parametrize("impl", ["reference", "portable"])
class TestWrite:
    READ = np.array([[3, 11], [0, 5], [5, 5], [7, 8], [1, 2]], np.int32)
    ROWS = np.array([[3, 11, 5], [7, 8, 1]], np.int32)

    def test_rows_go_where_they_should_and_nowhere_else(self, writers, impl, rng):
        step, values = writers[impl], rng.normal(size=(2, 3, 4)).astype(np.float32)
        fresh(step)
        seen = step({"values": values, "rows": self.ROWS, "read": self.READ})["seen"]
        before = np.arange(48, dtype=np.float32).reshape(12, 4)
        want = cache_write_numpy(before, values.reshape(-1, 4), self.ROWS.reshape(-1))
        np.testing.assert_array_equal(step.donated.asnumpy(), want)
        np.testing.assert_array_equal(seen, want[self.READ])

    def test_the_next_call_sees_what_this_one_wrote(self, writers, impl):
        step = writers[impl]
        fresh(step)
        ones = np.ones((2, 3, 4), np.float32)
        step({"values": ones, "rows": self.ROWS, "read": self.READ})
        seen = step({"values": 0 * ones, "rows": np.zeros((2, 3), np.int32), "read": self.READ})["seen"]
        np.testing.assert_array_equal(seen[0], 1)

    def test_a_value_that_is_not_finite_is_written_as_zero(self, writers, impl):
        step, values = writers[impl], np.ones((2, 3, 4), np.float32)
        values[0, 0], values[0, 1, 1], values[1, 2, 3] = np.nan, np.inf, -np.inf
        fresh(step)
        step({"values": values, "rows": self.ROWS, "read": self.READ})
        cache = step.donated.asnumpy()
        assert np.isfinite(cache).all()
        np.testing.assert_array_equal(cache[3], 0)
        np.testing.assert_array_equal(cache[11], [1, 0, 1, 1])
        np.testing.assert_array_equal(cache[1], [1, 1, 1, 0])


def test_the_promise_of_the_in_place_writer(writers, rng):
    """What `portable` returns is the bound array itself, bit for bit."""
    values = rng.normal(size=(2, 3, 4)).astype(np.float32)
    writers["portable"].check_in_place({"values": values, "rows": TestWrite.ROWS, "read": TestWrite.READ})


@pytest.mark.parametrize(("blocks", "block_size"), [((3, 1), 4), ((2,), 1), ((5, 4, 7), 2)])
def test_context_slots(run, blocks, block_size):
    def slots(batch):
        return context_slots(batch["tables"], block_size)

    tables = np.array([blocks, [0] * len(blocks)], np.int32)
    got = run(slots, {"tables": tables})
    want = [[block * block_size + place for block in row for place in range(block_size)] for row in tables]
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.int32


def test_head_rows(run):
    def rows(batch):
        return head_rows(batch["slots"], 3, 100)

    got = run(rows, {"slots": np.array([[4, 7], [0, 99]], np.int32)})
    np.testing.assert_array_equal(got, [[[4, 7], [104, 107], [204, 207]], [[0, 99], [100, 199], [200, 299]]])


def test_context_mask(run):
    def mask(batch):
        return context_mask(batch["positions"], 5)

    got = run(mask, {"positions": np.array([[2, 3], [4, 0]], np.int32)})
    want = [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]]
    np.testing.assert_array_equal(got, np.array(want, bool))


def test_context_mask_of_a_cache_without_its_first_entries(run):
    """Positions 2 and 4 see from position 1 on; one that lies before sees itself alone."""

    def mask(batch):
        return context_mask(batch["positions"], 5, 1)

    got = run(mask, {"positions": np.array([[2, 4, 1, 0]], np.int32)})
    want = [[[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]]
    np.testing.assert_array_equal(got, np.array(want, bool))


def test_an_overflow_of_one_sequence_never_reaches_another(run, rng):
    """A block that held NaN is freed and reused: its unused slots are masked, but 0 x NaN is NaN under any mask."""

    def step(batch):
        cache = cache_write(batch["cache"], batch["broken"], batch["old_rows"], "reference")
        cache = cache_write(cache, batch["values"], batch["rows"], "reference")
        context = cache_read(cache, batch["slots"])
        return attend_latent(batch["q"], context, attention_bias(context_mask(batch["positions"], 4), 1), 1.0)

    batch = {
        "cache": np.zeros((8, 4), np.float32),
        "broken": np.full((4, 4), np.nan, np.float32),
        "old_rows": np.arange(4, 8, dtype=np.int32),
        "values": rng.normal(size=(2, 4)).astype(np.float32),
        "rows": np.array([4, 5], np.int32),
        "slots": np.array([[4, 5, 6, 7]], np.int32),
        "q": rng.normal(size=(1, 1, 1, 4)).astype(np.float32),
        "positions": np.array([[1]], np.int32),
    }
    after_nan = run(step, batch)
    clean = run(step, batch | {"broken": np.zeros((4, 4), np.float32)})
    assert np.isfinite(after_nan).all()
    np.testing.assert_array_equal(after_nan, clean)

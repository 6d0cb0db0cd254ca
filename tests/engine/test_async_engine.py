"""AsyncEngine over a tiny model: answers, early ends, weights that change under way, and the end of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msds
from msds.engine.async_engine import AsyncEngine, EngineStoppedError
from msds.errors import CheckpointError, OptionError, PromptError
from msds_graphs import count_compiles, tree_map

Tiny = Callable[..., Path]
GREEDY = msds.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> msds.LLM:
    return msds.LLM(tiny("llama_base"), max_model_len=128, max_num_seqs=4, prefill_chunk=16)


def other_weights(llm: msds.LLM, seed: int) -> Any:
    """A canonical tree of noise that fits the model."""
    rng = np.random.default_rng(seed)
    spec = llm.model.functions.spec(llm.model.config)
    return tree_map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), spec)


def with_engine(llm: msds.LLM, work: Callable[[AsyncEngine], Any]) -> Any:
    """Run `work` on a started engine, and stop it."""

    async def main() -> Any:
        engine = AsyncEngine(llm.engine, update=llm.update_weights)
        engine.start()
        try:
            return await work(engine)
        finally:
            await engine.stop()

    return asyncio.run(main())


async def collect(engine: AsyncEngine, ids: list[int], params: msds.SamplingParams = GREEDY) -> list[int]:
    return [delta.token_id async for _, delta in engine.generate(ids, params) if delta.token_id is not None]


def test_many_requests_at_once_answer_as_generate_does(llm: msds.LLM) -> None:
    prompts = [[index + 2, 7, 9] * (1 + index % 4) for index in range(9)]
    want = [list(output.token_ids) for output in llm.generate(prompts, GREEDY)]

    async def work(engine: AsyncEngine) -> list[list[int]]:
        return list(await asyncio.gather(*(collect(engine, prompt) for prompt in prompts)))

    assert with_engine(llm, work) == want


def test_an_event_loop_is_woken_once_for_all_tokens_of_a_step(llm: msds.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    step = llm.engine.step

    def counted() -> bool:
        nonlocal steps
        did = step()
        steps += did
        return did

    monkeypatch.setattr(llm.engine, "step", counted)

    async def work(engine: AsyncEngine) -> tuple[int, int]:
        loop, wakes = asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def noted(*args: Any, **options: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return wake(*args, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
        tokens = await asyncio.gather(*(collect(engine, [index + 2, 7, 9]) for index in range(4)))
        return wakes, sum(map(len, tokens))

    wakes, num_tokens = with_engine(llm, work)
    assert num_tokens == 32
    assert wakes <= steps + 4 + 1, "one for each step, one for each request that was added, one for the end"


def test_closing_early_frees_everything(llm: msds.LLM) -> None:
    async def work(engine: AsyncEngine) -> None:
        long = msds.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, n=3)
        updates = engine.generate([2, 3, 4], long)
        await anext(updates)
        await updates.aclose()
        for _ in range(500):
            if not engine.engine.has_work:
                break
            await asyncio.sleep(0.01)
        assert engine.stats.referenced_blocks == 0

    with_engine(llm, work)


def test_what_add_refuses_is_raised_to_the_caller(llm: msds.LLM) -> None:
    async def work(engine: AsyncEngine) -> None:
        with pytest.raises(PromptError, match="max_model_len"):
            await collect(engine, [2] * 128)
        assert len(await collect(engine, [2, 3])) == 8

    with_engine(llm, work)


def test_requests_that_are_ended_say_why_and_the_engine_goes_on(llm: msds.LLM) -> None:
    async def work(engine: AsyncEngine) -> None:
        params = msds.SamplingParams(max_tokens=100, ignore_eos=True)
        updates = engine.generate([2, 3], params)
        await anext(updates)
        engine.end_requests("the server stops")
        with pytest.raises(EngineStoppedError, match="the server stops"):
            async for _ in updates:
                pass
        assert len(await collect(engine, [2, 3])) == 8

    with_engine(llm, work)


def test_new_weights_take_over_without_compiling(tiny: Tiny, llm: msds.LLM) -> None:
    """Tokens after the update are those of the new weights over everything said so far; nothing compiles."""
    tree = other_weights(llm, 1)
    old = tree_map(lambda leaf: leaf.asnumpy().copy(), llm.model.params)  # llama: derived tree = canonical tree
    prompt = [5, 6, 7, 8]
    want_before = list(llm.generate([prompt], GREEDY)[0].token_ids)
    llm.engine.runner.warm_up(None)

    async def work(engine: AsyncEngine) -> tuple[list[int], int, list[int]]:
        long = msds.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        running, at = [], 0
        async for _, delta in engine.generate(prompt, long):
            running.append(delta.token_id)
            if len(running) == 5:
                await engine.update_weights(tree)
                at = len(running)
        return running, at, await collect(engine, prompt)

    with count_compiles() as seen:
        running, at, fresh = with_engine(llm, work)
        assert running[:5] == want_before[:5]
        # tokens that were on their way while the update was asked for may still be old; the last ones cannot be
        tail = running[-20:]
        again = llm.generate(
            [prompt + running[:-20]], msds.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        )
        assert list(again[0].token_ids) == tail
        assert fresh == list(llm.generate([prompt], GREEDY)[0].token_ids) != want_before
        assert at == 5
        llm.update_weights(old)
        assert list(llm.generate([prompt], GREEDY)[0].token_ids) == want_before
    assert seen.count == 0


def test_new_weights_under_many_streams(llm: msds.LLM) -> None:
    """32 answers over 4 places: none is dropped, nothing compiles, and all go on with the new weights."""
    tree = other_weights(llm, 3)
    old = tree_map(lambda leaf: leaf.asnumpy().copy(), llm.model.params)
    prompts = [[index + 2, 7, 9 + index] for index in range(32)]
    params = msds.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want_old = {tuple(prompt): list(llm.generate([prompt], params)[0].token_ids) for prompt in prompts[:1]}
    llm.engine.runner.warm_up(None)

    async def work(engine: AsyncEngine) -> tuple[list[list[int]], list[list[int]]]:
        answers: list[list[int]] = [[] for _ in prompts]
        at_update: list[list[int]] = []

        async def run(index: int) -> None:
            async for _, delta in engine.generate(prompts[index], params):
                assert delta.finish_reason in (None, "length")
                answers[index].append(delta.token_id)

        async def update() -> None:
            while sum(map(len, answers)) < 100:
                await asyncio.sleep(0)
            await engine.update_weights(tree)
            at_update.extend(list(answer) for answer in answers)

        await asyncio.gather(update(), *(run(index) for index in range(32)))
        return answers, at_update

    with count_compiles() as seen:
        answers, at_update = with_engine(llm, work)
        assert [len(answer) for answer in answers] == [12] * 32
        assert answers[0] == want_old[tuple(prompts[0])]  # over before the update, or not touched by it
        running = [i for i in range(32) if 0 < len(at_update[i]) < 12]
        fresh = [i for i in range(32) if not at_update[i]]
        assert running
        assert fresh
        for index in running + fresh:
            known = answers[index][: len(at_update[index]) + 2]  # the last may have been on their way to us
            if len(known) < 12:
                left = msds.SamplingParams(temperature=0, max_tokens=12 - len(known), ignore_eos=True)
                again = llm.generate([prompts[index] + known], left)[0].token_ids
                assert answers[index][len(known) :] == list(again), index
    llm.update_weights(old)
    assert seen.count == 0
    assert llm.engine.stats.referenced_blocks == 0


def test_weights_that_do_not_fit_change_nothing(llm: msds.LLM) -> None:
    prompt = [9, 8, 7]
    before = llm.generate([prompt], GREEDY)[0].token_ids
    tree = other_weights(llm, 2)
    broken = tree | {"norm": {"weight": np.ones(3, np.float32)}}
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        llm.update_weights(broken)
    poisoned = tree | {"norm": {"weight": np.full_like(tree["norm"]["weight"], np.nan)}}
    with pytest.raises(CheckpointError, match="not finite"):
        llm.update_weights(poisoned)
    with pytest.raises(CheckpointError, match="do not fit"):
        llm.update_weights({"norm": tree["norm"]})
    assert llm.generate([prompt], GREEDY)[0].token_ids == before


def test_a_stopped_engine_tells_those_who_wait(llm: msds.LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        engine.start()
        long = msds.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        updates = engine.generate([2, 3, 4], long)
        await anext(updates)
        await engine.stop()
        with pytest.raises(EngineStoppedError):
            async for _ in updates:
                pass
        with pytest.raises(EngineStoppedError):
            await collect(engine, [2, 3])

    asyncio.run(main())


def test_a_bad_prompt_fails_alone(llm: msds.LLM) -> None:
    async def work(engine: AsyncEngine) -> list[Any]:
        prompts = [[2, 7], [2, 8], [0, 99_999], [0, -1], [], [2, 9]]
        return list(await asyncio.gather(*(collect(engine, ids) for ids in prompts), return_exceptions=True))

    answers = with_engine(llm, work)
    assert [len(answer) for answer in (answers[0], answers[1], answers[5])] == [8, 8, 8]
    assert all(isinstance(answer, PromptError) for answer in answers[2:5])


def test_an_engine_has_one_driver(llm: msds.LLM) -> None:
    async def work(engine: AsyncEngine) -> list[int]:
        with pytest.raises(OptionError, match="an AsyncEngine has it"):
            llm.generate([[2, 7]], GREEDY)
        with pytest.raises(OptionError, match="driven by another AsyncEngine"):
            AsyncEngine(llm.engine).start()
        return await collect(engine, [2, 7])

    assert len(with_engine(llm, work)) == 8
    assert llm.generate([[2, 7]], GREEDY)[0].token_ids  # free again

    async def twice() -> None:
        engine = AsyncEngine(llm.engine)
        engine.start()
        await engine.stop()
        with pytest.raises(RuntimeError, match="threads can only be started once"):
            engine.start()

    asyncio.run(twice())
    assert llm.generate([[2, 7]], GREEDY)[0].token_ids

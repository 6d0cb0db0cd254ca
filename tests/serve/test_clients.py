"""The official client, and a plain one, against a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.serve.conftest import KEY, Rigged, mesh_of
from tests.serve.rigged import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR, byte_tokens, wait_until

openai = pytest.importorskip("openai")

HEADERS = {"Authorization": f"Bearer {KEY}"}
USER: list[Any] = [{"role": "user", "content": "what?"}]
FREE: Any = {"ignore_eos": True}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def rigged(rig: Callable[..., Rigged]) -> Rigged:
    return rig(api_keys=(KEY,))


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> str:
    """A service that asks for KEY: that of --mesh, or a rigged one."""
    service = request.getfixturevalue("on_ranks" if mesh_of(request) else "rigged")
    return str(service.url)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def long(request: pytest.FixtureRequest) -> int:
    """Tokens of an answer that is under way for a while."""
    return 100 if mesh_of(request) else 600  # what is rigged answers at once


def said(message: Any) -> str:
    """All that a message or a part of it says, thinking included."""
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


def gauge(url: str, name: str) -> float:
    lines = requests.get(f"{url}/metrics", headers=HEADERS, timeout=20).text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


def idle(url: str) -> None:
    wait_until(lambda: not gauge(url, "msds_requests_running") and not gauge(url, "msds_requests_waiting"))
    assert gauge(url, "msds_cache_usage_ratio") == 0


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_chat_whole_and_streamed(client: Any) -> None:
    asked = {"model": "tiny", "messages": USER, "max_tokens": 9, "n": 3, "seed": 5, "extra_body": FREE}
    whole = client.chat.completions.create(**asked)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3
    assert len({said(choice.message) for choice in whole.choices}) == 3
    texts = ["", "", ""]
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += said(choice.delta)
    assert texts == [said(choice.message) for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens == 27
    other = client.chat.completions.create(**(asked | {"seed": 6}))
    assert said(other.choices[0].message) != texts[0]


def test_completions_with_stop_and_echo(client: Any, rigged: Rigged) -> None:
    rigged.runner.script([7, 8], byte_tokens(rigged.service.llm.model, b"one two three"))
    asked = {"model": "tiny", "prompt": [7, 8], "max_tokens": 30, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == "one two three"
    (choice,) = client.completions.create(**asked, stop=["o t", "th"]).choices
    assert (choice.text, choice.finish_reason) == ("one tw", "stop")
    prompt = client.completions.create(**asked, echo=True).choices[0].text.removesuffix("one two three")
    assert prompt
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed == "one two three"


def test_logprobs_in_both_shapes(client: Any) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3, extra_body=FREE
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode(errors="backslashreplace") == entry.token
    legacy = client.completions.create(
        model="tiny", prompt=[7, 9, 11], max_tokens=2, temperature=0, logprobs=2, echo=True, extra_body=FREE
    )
    logprobs = legacy.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 5
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_tools(client: Any, rigged: Rigged) -> None:
    call = f"function{SEPARATOR}get_weather\n```json\n" + '{"city": "北京"}' + f"\n```{CALL_END}"
    prompt = rigged.service.chat.encode(USER, tools=TOOLS)
    text = f"Look.{CALLS_BEGIN}{CALL_BEGIN}{call}{CALLS_END}"
    rigged.runner.script(prompt, byte_tokens(rigged.service.llm.model, text.encode()))
    (choice,) = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    (made,) = choice.message.tool_calls
    assert (made.function.name, made.function.arguments) == ("get_weather", '{"city": "北京"}')
    assert choice.message.content == "Look."
    answered: list[Any] = [
        *USER,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": made.id, "content": "12"},
    ]
    final = client.chat.completions.create(model="tiny", messages=answered, tools=TOOLS, max_tokens=3)
    assert final.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": -1}, "BadRequestError", "temperature"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"max_tokens": 5000}, "BadRequestError", "max_tokens"),
        ({"n": 500}, "BadRequestError", "n"),
        ({"model": "other"}, "NotFoundError", "model"),
        ({"logit_bias": {"99999": 1}}, "BadRequestError", "logit_bias"),
        ({"extra_body": {"best_of": 3}}, "BadRequestError", "best_of"),
    ],
)
def test_errors(client: Any, fields: dict[str, Any], error: str, param: str) -> None:
    with pytest.raises(getattr(openai, error)) as caught:
        client.chat.completions.create(**({"model": "tiny", "messages": USER, "max_tokens": 2} | fields))
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_wrong_key(url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_leaving_in_mid_stream(client: Any, url: str, long: int) -> None:
    for create, asked in (
        (client.chat.completions.create, {"messages": USER, "n": 2}),
        (client.completions.create, {"prompt": ["a", "b"], "n": 2}),
    ):
        stream = create(model="tiny", max_tokens=long, stream=True, extra_body=FREE, **asked)
        next(iter(stream))
        stream.close()
        idle(url)


def test_async_client_and_cancellation(url: str, long: int) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:

            async def ask(seed: int, max_tokens: int = 5) -> str:
                answer = await client.chat.completions.create(
                    model="tiny", messages=USER, max_tokens=max_tokens, seed=seed, extra_body=FREE
                )
                return said(answer.choices[0].message)

            texts = await asyncio.gather(*(ask(seed) for seed in (1, 2, 1)))
            assert texts[0] == texts[2] != texts[1]
            task = asyncio.create_task(ask(1, max_tokens=long))
            while not await asyncio.to_thread(gauge, url, "msds_requests_running"):
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(idle, url)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_twenty_plain_clients_at_once(url: str) -> None:
    def ask(number: int) -> requests.Response:
        body = {"model": "tiny", "messages": USER, "max_tokens": 8, "seed": number, "ignore_eos": True}
        return requests.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS, timeout=60)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    assert [answer.status_code for answer in answers] == [200] * 20
    assert all(answer.json()["usage"]["completion_tokens"] == 8 for answer in answers)
    idle(url)

"""Other people's clients, unmodified. litellm is 200 MB and is tried where somebody has installed it."""

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine
from tests.runtime.served import Served, serving
from tests.runtime.test_server_tools import CALL, USER, scripted
from tests.runtime.test_server_tools import tokenizer as tokenizer

KEY = SecretStr("none")


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served[FakeEngine]]:
    with serving(FakeEngine(num_blocks=512, max_context=2000), tokenizer) as found:
        yield found


class City(BaseModel):
    """A city."""

    name: str
    population: int


def chat(served: Served[Any], **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="model", base_url=f"{served.url}/v1", api_key=KEY, temperature=0, max_retries=0, **options
    )


def test_langchain_chats_streamed_or_not_and_counts_tokens(served: Served[FakeEngine]) -> None:
    asking = chat(served, max_tokens=12, stream_usage=True)
    whole = asking.invoke([HumanMessage("Hi")])
    parts = list(asking.stream([HumanMessage("Hi")]))
    assert "".join(str(part.content) for part in parts) == whole.content != ""
    assert isinstance(whole.usage_metadata, dict)
    assert whole.usage_metadata["output_tokens"] == 12
    assert sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts) == 12
    many = asking.batch(["Hi", "Ho", "Ha"])
    assert many[0].content == whole.content


def test_langchain_completes(served: Served[FakeEngine]) -> None:
    asking = OpenAI(model="model", base_url=f"{served.url}/v1", api_key=KEY, max_tokens=5, temperature=0)
    assert asking.invoke("Once") == "".join(asking.stream("Once")) != ""


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_objects_from_a_model_without_sense(method: Any, served: Served[FakeEngine]) -> None:
    asking = chat(served, max_tokens=1500, seed=3).with_structured_output(City, method=method)
    found = asking.invoke("Paris")
    assert isinstance(found, City)


def test_langchain_reads_calls_of_tools(tokenizer: Tokenizer) -> None:
    def weather(city: str, days: int) -> str:
        """Forecast."""
        return f"{city} {days}"

    with serving(scripted(CALL, tokenizer), tokenizer) as served:
        for strict in (None, True):
            found = chat(served).bind_tools([weather], strict=strict).invoke("What will it be like?")
            (call,) = found.tool_calls
            assert (call["name"], call["args"]) == ("weather", {"city": "Paris", "days": 3})


@pytest.mark.filterwarnings("ignore")  # its own, of its dependencies
def test_litellm_chats_and_completes(served: Served[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked = {"api_base": f"{served.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 8}
    whole = litellm.completion(model="openai/model", messages=USER, **asked)
    stream = litellm.completion(model="openai/model", messages=USER, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content != ""
    done = litellm.text_completion(model="text-completion-openai/model", prompt="Once", **asked)
    assert done.choices[0].text

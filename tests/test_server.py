"""`vllm serve --speculative-model [lookahead]` answers what plain `vllm serve` answers.

The tiny model's text is garbage, so a wrong token has nowhere to hide.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving import MODEL_NAME, Server, refused, serving
from vllm_lookahead.config import AUTO_DRAFT_LENGTH

# Without it, grammars let a random model write white space up to max_tokens.
COMPACT_JSON = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'

PROMPT = "one two three, one two three, one two"
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
SAMPLING = {"greedy": GREEDY, "seeded": SEEDED}


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_llama, tmp_path_factory.mktemp("plain"), COMPACT_JSON) as server:
        yield server


@pytest.fixture(scope="module")
def lookahead(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tiny_llama,
        tmp_path_factory.mktemp("lookahead"),
        COMPACT_JSON,
        "--speculative-model",
        "[lookahead]",
    ) as server:
        yield server


@dataclass(frozen=True)
class Answer:
    """What a client gets; lists have an entry per choice."""

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    stop_reasons: list[str | int | None]
    usage: tuple[int, int, int]


def usage_of(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def arguments(request: dict[str, Any]) -> dict[str, Any]:
    """``request`` with what all requests of these tests have in common."""
    extra = {"return_token_ids": True, **request.pop("extra_body", {})}
    return {"model": MODEL_NAME, "max_tokens": 64, "extra_body": extra, **request}


def answer(response: Any, text_of: Callable[[Any], str]) -> Answer:
    choices = response.choices
    assert [choice.index for choice in choices] == list(range(len(choices)))
    return Answer(
        texts=[text_of(choice) for choice in choices],
        token_ids=[choice.token_ids for choice in choices],
        finish_reasons=[choice.finish_reason for choice in choices],
        stop_reasons=[choice.stop_reason for choice in choices],
        usage=usage_of(response.usage),
    )


def joined(stream: Any, text_of: Callable[[Any], str | None], choices: int) -> Answer:
    """A stream's parts put together."""
    texts, finish_reasons, usage = [""] * choices, [""] * choices, None
    token_ids: list[list[int]] = [[] for _ in range(choices)]
    stop_reasons: list[str | int | None] = [None] * choices
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            assert finish_reasons[part.index] == "", "a part came after the last one"
            texts[part.index] += text_of(part) or ""
            token_ids[part.index] += getattr(part, "token_ids", None) or []
            finish_reasons[part.index] = part.finish_reason or ""
            stop_reasons[part.index] = getattr(part, "stop_reason", None)
    return Answer(texts, token_ids, finish_reasons, stop_reasons, usage_of(usage))


def complete(server: Server, prompt: str = PROMPT, **request: Any) -> Answer:
    response = server.client.completions.create(prompt=prompt, **arguments(request))
    return answer(response, lambda choice: choice.text)


def stream_completion(server: Server, prompt: str = PROMPT, **request: Any) -> Answer:
    with server.client.completions.create(
        prompt=prompt, stream=True, stream_options={"include_usage": True}, **arguments(request)
    ) as stream:
        return joined(stream, lambda part: part.text, request.get("n", 1))


def messages(prompt: str) -> Any:
    return [{"role": "system", "content": "Count."}, {"role": "user", "content": prompt}]


def chat(server: Server, prompt: str = PROMPT, **request: Any) -> Answer:
    response = server.client.chat.completions.create(
        messages=messages(prompt), **arguments(request)
    )
    return answer(response, lambda choice: choice.message.content)


def stream_chat(server: Server, prompt: str = PROMPT, **request: Any) -> Answer:
    with server.client.chat.completions.create(
        messages=messages(prompt),
        stream=True,
        stream_options={"include_usage": True},
        **arguments(request),
    ) as stream:
        return joined(stream, lambda part: part.delta.content, request.get("n", 1))


Ask = Callable[..., Answer]

# Same answers


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("ask", [complete, stream_completion, chat, stream_chat])
def test_answer_is_that_of_the_plain_server(
    plain: Server, lookahead: Server, ask: Ask, sampling: dict[str, Any]
) -> None:
    expected = ask(plain, **sampling)
    assert len(expected.token_ids[0]) == expected.usage[1] > 1
    assert ask(lookahead, **sampling) == expected


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize(
    ("whole", "streamed"), [(complete, stream_completion), (chat, stream_chat)]
)
def test_stream_adds_up_to_the_whole_answer(
    lookahead: Server, whole: Ask, streamed: Ask, sampling: dict[str, Any]
) -> None:
    assert streamed(lookahead, **sampling) == whole(lookahead, **sampling)


@pytest.mark.parametrize("ask", [complete, stream_completion, chat])
def test_each_of_two_choices_is_that_of_the_plain_server(
    plain: Server, lookahead: Server, ask: Ask
) -> None:
    expected = ask(plain, n=2, **SEEDED)
    assert expected.token_ids[0] != expected.token_ids[1]
    assert ask(lookahead, n=2, **SEEDED) == expected


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("ask", [complete, stream_completion])
def test_max_tokens_ends_the_answer_at_that_token(
    plain: Server, lookahead: Server, ask: Ask, max_tokens: int
) -> None:
    expected = complete(plain, max_tokens=64, **GREEDY).token_ids[0][:max_tokens]
    actual = ask(lookahead, max_tokens=max_tokens, **GREEDY)
    assert actual.token_ids == [expected]
    assert actual.finish_reasons == ["length"]
    assert actual.usage == (len(PROMPT), max_tokens, len(PROMPT) + max_tokens)


def printable_pair(text: str) -> str:
    """Two characters that no part of ``text`` up to its tenth character has."""
    pairs = (text[i : i + 2] for i in range(10, len(text) - 1))
    printable = set(string.ascii_letters + string.digits + string.punctuation)
    return next(pair for pair in pairs if set(pair) <= printable and pair not in text[:11])


@pytest.mark.parametrize("ask", [complete, stream_completion, chat, stream_chat])
def test_stop_string_ends_the_answer_before_it(plain: Server, lookahead: Server, ask: Ask) -> None:
    [text] = ask(plain, **GREEDY).texts
    stop = printable_pair(text)
    expected = ask(plain, stop=stop, **GREEDY)
    assert expected.texts == [text.partition(stop)[0]]
    actual = ask(lookahead, stop=stop, **GREEDY)
    assert actual == expected
    assert actual.finish_reasons == ["stop"]


def test_stop_token_ends_the_answer_at_it(plain: Server, lookahead: Server) -> None:
    token = complete(plain, **GREEDY).token_ids[0][20]
    stop = {"stop_token_ids": [token]}
    expected = complete(plain, extra_body=stop, **GREEDY)
    assert expected.stop_reasons == [token]
    assert complete(lookahead, extra_body=stop, **GREEDY) == expected


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_logprobs_are_those_of_the_plain_server(
    plain: Server, lookahead: Server, sampling: dict[str, Any]
) -> None:
    def logprobs(server: Server) -> Any:
        request = arguments({"prompt": PROMPT, "logprobs": 2, **sampling})
        return server.client.completions.create(**request).choices[0].logprobs

    expected, actual = logprobs(plain), logprobs(lookahead)
    assert actual.tokens == expected.tokens
    assert actual.text_offset == expected.text_offset
    assert actual.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-4)
    assert actual.top_logprobs == [
        pytest.approx(alternatives, abs=1e-4) for alternatives in expected.top_logprobs
    ]


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "is_new"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("ask", [chat, stream_chat])
def test_structured_output_is_valid_and_that_of_the_plain_server(
    plain: Server, lookahead: Server, ask: Ask, sampling: dict[str, Any]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    # A similar text in the prompt gives the pool n-grams, of which the grammar allows a part.
    prompt = 'Like {"colour":"red","sizes":[1,1,9],"is_new":maybe}'
    expected = ask(plain, prompt, response_format=form, max_tokens=100, **sampling)
    actual = ask(lookahead, prompt, response_format=form, max_tokens=100, **sampling)
    assert actual == expected
    thing = json.loads(actual.texts[0])
    assert thing["colour"] in {"red", "green", "blue"}
    assert len(thing["sizes"]) == 3
    assert {*thing["sizes"]} <= {1, 2, 3}
    assert isinstance(thing["is_new"], bool)
    assert actual.finish_reasons == ["stop"]


# Traffic


def mixed_requests() -> list[dict[str, Any]]:
    """Eight requests of different prompts, lengths and sampling."""
    return [
        {
            "prompt": f"request {i}: " + f"{i} {i + 1} " * (3 * i + 1),
            "max_tokens": 40 + 5 * i,
            **(GREEDY if i % 2 else {"temperature": 0.8, "seed": i}),
        }
        for i in range(8)
    ]


def test_eight_requests_at_once_get_the_answers_that_each_gets_alone(
    plain: Server, lookahead: Server
) -> None:
    requests = mixed_requests()
    expected = [complete(plain, **request) for request in requests]
    asks = [complete, stream_completion] * 4
    with ThreadPoolExecutor(len(requests)) as threads:
        futures = [
            threads.submit(ask, lookahead, **request)
            for ask, request in zip(asks, requests, strict=True)
        ]
        assert [future.result(timeout=120) for future in futures] == expected


def test_request_after_an_aborted_stream_is_answered_as_before(
    plain: Server, lookahead: Server
) -> None:
    expected = complete(plain, **GREEDY)
    # Eight long choices, so that most of the work is still to do when the client leaves.
    choices, length = 8, 400
    request = arguments(
        {**SEEDED, "n": choices, "max_tokens": length, "extra_body": {"ignore_eos": True}}
    )
    before = lookahead.counters()["vllm:generation_tokens_total"]
    with lookahead.client.completions.create(prompt=PROMPT, stream=True, **request) as stream:
        next(stream)
    lookahead.wait_until_idle()
    emitted = lookahead.counters()["vllm:generation_tokens_total"] - before
    assert 0 < emitted < choices * length
    assert complete(lookahead, **GREEDY) == expected


# Metrics and messages


def test_metrics_count_drafts(lookahead: Server) -> None:
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    before = lookahead.counters()
    emitted = requests = 0
    accepted = 0.0
    # The tiny model's steps are so short that drafts may not be worth making for a while.
    while not accepted and requests < 20:
        emitted += complete(lookahead, max_tokens=200, **GREEDY).usage[1]
        requests += 1
        lookahead.wait_until_idle()
        after = lookahead.counters()
        drafts, draft_tokens, accepted, accepted_per_position = (
            after[name] - before[name]
            for name in (f"vllm:spec_decode_num_{x}_total" for x in names)
        )
    assert 0 < accepted <= draft_tokens <= AUTO_DRAFT_LENGTH * drafts
    assert accepted_per_position == accepted
    # A prefill yields a token and each draft one more than it has accepted tokens; a last draft
    # may reach beyond max_tokens.
    assert drafts + accepted <= emitted + requests * (AUTO_DRAFT_LENGTH - 1)


def test_log_says_once_that_lookahead_is_active(plain: Server, lookahead: Server) -> None:
    message = "Lookahead decoding is active"
    assert lookahead.log.read_text().count(message) == 1
    assert plain.log.read_text().count(message) == 0


@pytest.mark.parametrize(
    "extra", [{"min_p": 0.1}, {"logit_bias": {"65": 5.0}}], ids=["min_p", "logit_bias"]
)
def test_parameter_that_vllm_refuses_with_other_drafts_is_answered_equally(
    plain: Server, lookahead: Server, extra: dict[str, Any]
) -> None:
    assert complete(lookahead, extra_body=extra, **SEEDED) == complete(
        plain, extra_body=extra, **SEEDED
    )


def test_request_may_lower_sizes_over_http(plain: Server, lookahead: Server) -> None:
    extra = {"vllm_xargs": {"lookahead": '{"window_size": 2, "verification_set_size": 1}'}}
    assert complete(lookahead, extra_body=extra, **SEEDED) == complete(plain, **SEEDED)


def test_bad_value_of_a_request_is_its_clients_error(lookahead: Server) -> None:
    extra = {"vllm_xargs": {"lookahead": '{"window_size": 1000}'}}
    with pytest.raises(openai.BadRequestError, match=r"window_size .* from 0 to 7, the engine's"):
        complete(lookahead, extra_body=extra, **SEEDED)
    assert complete(lookahead, **SEEDED) == complete(lookahead, **SEEDED)


# Refused at start-up


def test_misspelt_key_stops_the_server_before_weights_load(
    tiny_llama: Path,
) -> None:
    spec = '{"method": "lookahead", "window_sise": 7}'
    status, output = refused(tiny_llama, "--speculative-config", spec)
    assert status != 0
    assert "unknown lookahead parameter 'window_sise'; did you mean 'window_size'?" in output
    assert "Loading" not in output


def test_ngram_as_speculative_model_stops_the_server_with_the_modern_spelling(
    tiny_llama: Path,
) -> None:
    status, output = refused(tiny_llama, "--speculative-model", "[ngram]")
    assert status == 2
    modern = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    assert f"--speculative-config '{modern}'" in output

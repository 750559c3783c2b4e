"""Prompts with images, videos or sounds beside plain ones: answers are those of plain vLLM."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm import LLM, ModelRegistry, RequestOutput

from tests.engine import scripted
from tests.engine.harness import (
    counter,
    drain,
    engine,
    full_blocks,
    greedy,
    runner,
    seeded,
    stats,
)
from tests.tiny_multimodal import (
    PLACEHOLDER,
    PLACEHOLDER_ID,
    VIDEO_PLACEHOLDER,
    FramesProcessor,
    random_audio,
    random_image,
    random_video,
    save_idefics3,
    save_paddleocr_vl,
    save_qwen2_audio,
    save_qwen2_vl,
)

LOOKAHEAD = {"window_size": 4, "ngram_size": 4, "verification_set_size": 4}
SCRIPTED = {**LOOKAHEAD, "sources": [scripted.NAME, "window", "output", "prompt"]}
CHUNK = {"max_num_batched_tokens": 80}
"""Fewer tokens per step than an image prompt has. Plain vLLM for CPUs can't take a seeded
request's prompt in chunks (it rewinds a generator that can't be), so it gets them whole."""

LONG_TEXT = "the quick brown fox jumps over the lazy dog, again and again. " * 2
REQUESTS: list[Any] = [
    {"prompt": f"ab{PLACEHOLDER}what is this", "multi_modal_data": {"image": random_image(70, 40)}},
    {"prompt": "hello there"},
    # The same text as the first, another image.
    {
        "prompt": f"ab{PLACEHOLDER}what is this",
        "multi_modal_data": {"image": random_image(70, 40, seed=1)},
    },
    {
        "prompt": f"{LONG_TEXT}{PLACEHOLDER}{PLACEHOLDER}",
        "multi_modal_data": {"image": [random_image(220, 200), random_image(60, 180)]},
    },
    {"prompt": LONG_TEXT},
    {
        "prompt": f"{PLACEHOLDER}{LONG_TEXT}",
        "multi_modal_data": {"image": random_image(224, 224)},
    },
]
PARAMS = [greedy(60), seeded(1, 60), seeded(2, 60), greedy(60), greedy(60), seeded(3, 60)]


def answers(llm: LLM, params: Any = PARAMS) -> list[RequestOutput]:
    return llm.generate(REQUESTS, params, use_tqdm=False)


def token_ids(done: list[RequestOutput]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in done]


def script(done: list[RequestOutput]) -> None:
    texts = [[*(one.prompt_token_ids or ()), *one.outputs[0].token_ids] for one in done]
    scripted.ScriptedSource.script(texts, scripted.changing)


@pytest.fixture(params=[save_idefics3, save_paddleocr_vl])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Image models with RoPE and with M-RoPE positions."""
    save: Callable[[Path], Path] = request.param
    return save(tmp_path)


def test_image_prompts_in_chunks_beside_text_prompts(model: Path) -> None:
    with engine(model) as llm:
        done = answers(llm)
        plain = token_ids(done)
    assert sum(len(one.prompt_token_ids or ()) > 80 for one in done) >= 3
    # The images must matter, or nothing is tested.
    assert plain[0] != plain[2]
    script(done)
    with engine(model, SCRIPTED, **CHUNK) as llm:
        assert token_ids(answers(llm)) == plain
        assert stats(llm)["tokens"] > stats(llm)["steps"]
        assert stats(llm)["off_primary"] > 10
        # Again, with prompts from the prefix cache.
        assert token_ids(answers(llm)) == plain


def test_preempted_image_prompts_start_over_and_end_equal(model: Path) -> None:
    requests = [request for request in REQUESTS if "multi_modal_data" in request]
    params = [greedy(150), seeded(1, 150), greedy(150), seeded(2, 150)]
    with engine(model) as llm:
        done = llm.generate(requests, params, use_tqdm=False)
        plain = token_ids(done)
        assert counter(llm, "vllm:num_preemptions") == 0
    script(done)
    with engine(model, SCRIPTED, num_gpu_blocks_override=24) as llm:
        assert token_ids(llm.generate(requests, params, use_tqdm=False)) == plain
        assert counter(llm, "vllm:num_preemptions") > 0
        assert stats(llm)["off_primary"] > 10
        drain(llm)
        assert stats(llm)["sequences"] == 0


@pytest.fixture
def video_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Qwen2-VL that sees videos without torchvision.

    transformers imports it for resizing beside what vLLM needs, and there is none for every torch.
    """
    with monkeypatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            missing = ModuleType("torchvision.transforms.v2")
            missing.functional = None  # type: ignore[attr-defined]
            for name in ("torchvision", "torchvision.transforms", missing.__name__):
                patch.setitem(sys.modules, name, missing)
        qwen2_vl = importlib.import_module("vllm.model_executor.models.qwen2_vl")
    monkeypatch.setattr(qwen2_vl, "Qwen2VLProcessor", FramesProcessor)
    # By its class: a name would have vLLM import it in another process.
    architecture = "Qwen2VLForConditionalGeneration"
    ModelRegistry.register_model(architecture, getattr(qwen2_vl, architecture))
    return save_qwen2_vl(tmp_path)


def test_video_prompts_in_chunks_beside_image_and_text_prompts(video_model: Path) -> None:
    prompt = f"ab{VIDEO_PLACEHOLDER}what is this"
    videos = [random_video(6, 84, 56), random_video(6, 84, 56, seed=1), random_video(8, 140, 140)]
    seen = {"image": random_image(60, 180), "video": random_video(2, 56, 56)}
    requests: list[Any] = [
        *({"prompt": prompt, "multi_modal_data": {"video": video}} for video in videos),
        {"prompt": f"{PLACEHOLDER}and{VIDEO_PLACEHOLDER}{LONG_TEXT}", "multi_modal_data": seen},
        {"prompt": LONG_TEXT},
    ]
    params = [greedy(60), greedy(60), greedy(60), seeded(1, 60), greedy(60)]
    with engine(video_model) as llm:
        done = llm.generate(requests, params, use_tqdm=False)
        plain = token_ids(done)
    # (8 / 2) * (140 / 28)^2 embeddings, more than a step takes, and 14 letters.
    assert len(done[2].prompt_token_ids or ()) == 114
    # The videos must matter, or nothing is tested.
    assert plain[0] != plain[1]
    script(done)
    with engine(video_model, SCRIPTED, **CHUNK) as llm:
        assert token_ids(llm.generate(requests, params, use_tqdm=False)) == plain
        assert stats(llm)["off_primary"] > 10


def test_kv_cache_after_a_video_is_that_of_a_prefill(video_model: Path) -> None:
    video = {"video": random_video(6, 84, 56)}
    prompt = f"ab{VIDEO_PLACEHOLDER}what is this"
    params = greedy(130, bad_words=[PLACEHOLDER, VIDEO_PLACEHOLDER])
    with engine(video_model) as off:
        request: Any = {"prompt": prompt, "multi_modal_data": video}
        [plain] = off.generate([request], params, use_tqdm=False)
        output = list(plain.outputs[0].token_ids)
        size = len(plain.prompt_token_ids or ()) + len(output) - 1
        again = off.get_tokenizer().encode(prompt) + output[:-1]
        whole: Any = {"prompt_token_ids": again, "multi_modal_data": video}
        off.reset_prefix_cache()
        off.generate([whole], greedy(1), use_tqdm=False)
        prefilled = full_blocks(off, size)
    script([plain])
    with engine(video_model, SCRIPTED) as on:
        [walked] = on.generate([request], params, use_tqdm=False)
        assert list(walked.outputs[0].token_ids) == output
        cached = full_blocks(on, size)
    assert len(cached[0]) == 5
    for one, other in zip(cached, prefilled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_audio_prompts_beside_text_prompts(tmp_path: Path) -> None:
    model = save_qwen2_audio(tmp_path)
    hearing: list[Any] = [
        {"prompt": f"{PLACEHOLDER}say it", "multi_modal_data": {"audio": random_audio(1.0, seed)}}
        for seed in (0, 1)
    ]
    requests = [*hearing, {"prompt": LONG_TEXT}, {"prompt": "hello there"}]
    params = [greedy(60), greedy(60), seeded(1, 60), greedy(60)]
    with engine(model) as llm:
        done = llm.generate(requests, params, use_tqdm=False)
        plain = token_ids(done)
    assert plain[0] != plain[1]
    script(done)
    with engine(model, SCRIPTED, **CHUNK) as llm:
        assert token_ids(llm.generate(requests, params, use_tqdm=False)) == plain
        assert stats(llm)["off_primary"] > 10


def test_without_help_of_the_script_tokens_are_accepted_too(model: Path) -> None:
    # A model that repeats itself is easy to look ahead of.
    params = [greedy(60, logit_bias={65: 6.0, 66: 6.0}), seeded(2, 60, temperature=0.1)] * 3
    with engine(model) as llm:
        plain = token_ids(answers(llm, params))
    with engine(model, LOOKAHEAD, **CHUNK) as llm:
        assert token_ids(answers(llm, params)) == plain
        assert stats(llm)["tokens"] > stats(llm)["steps"]


def test_placeholder_token_that_was_sampled_is_an_ordinary_token(model: Path) -> None:
    params = [greedy(60, logit_bias={PLACEHOLDER_ID: 4.0})] * len(REQUESTS)
    with engine(model) as llm:
        plain = token_ids(answers(llm, params))
    assert sum(ids.count(PLACEHOLDER_ID) for ids in plain) > 10
    with engine(model, LOOKAHEAD) as llm:
        assert token_ids(answers(llm, params)) == plain
        assert stats(llm)["tokens"] > stats(llm)["steps"]


def test_positions_survive_being_reckoned_again_for_pruned_videos(tmp_path: Path) -> None:
    model = save_paddleocr_vl(tmp_path)
    with engine(model) as llm:
        plain = token_ids(answers(llm))
    prompts: list[list[int]] = []

    def recompute_mrope_positions(
        input_ids: list[int], multimodal_embeddings: Any, mrope_positions: Any, **_: Any
    ) -> tuple[Any, Any, int]:
        """Nothing is pruned, so nothing moves."""
        prompts.append(input_ids)
        delta = int(mrope_positions.max()) + 1 - len(input_ids)
        return multimodal_embeddings, mrope_positions, delta

    with engine(model, LOOKAHEAD) as llm:
        runner(llm).is_multimodal_pruning_enabled = True
        runner(llm).model.recompute_mrope_positions = recompute_mrope_positions
        assert token_ids(answers(llm)) == plain
        assert prompts
        assert stats(llm)["tokens"] > stats(llm)["steps"]


def test_placeholder_outside_of_the_vocabulary_is_never_fed_outside_of_prompts(
    tmp_path: Path,
) -> None:
    model = save_idefics3(tmp_path, knows_image_token=False)
    found = []
    for lookahead in (None, LOOKAHEAD):
        with engine(model, lookahead) as llm:
            # What models with such placeholders do when they are made.
            runner(llm).model.configure_mm_token_handling(PLACEHOLDER_ID, [PLACEHOLDER_ID])
            prompt = answers(llm, greedy(1))[0].prompt_token_ids or []
            # A root after which the prompt has placeholders.
            before = prompt[prompt.index(PLACEHOLDER_ID) - 1]
            params = [greedy(60, logit_bias={before: 6.0})] * len(REQUESTS)
            found.append(token_ids(answers(llm, params)))
    assert found[1] == found[0]
    assert any(before in ids for ids in found[0])

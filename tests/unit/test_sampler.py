"""Tree sampling with vLLM's own sampler, against the same sampler decoding plainly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from tests.trees import Path, path_of
from vllm_lookahead.core.tree import TokenTree, build_tree, linear_tree
from vllm_lookahead.core.verify import Walk
from vllm_lookahead.engine.sampler import (
    is_plain_greedy,
    to_sampler_output,
    walk_greedy,
    walk_in_rounds,
)

VOCABULARY = 6
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def without_compiling() -> Iterator[None]:
    """vLLM's sampler compiles one helper of its log-probabilities, which takes seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


@cache
def model(path: Path) -> np.ndarray:
    """Logits of the token that follows ``path``: any, but always the same."""
    return np.random.default_rng([17, *path]).normal(scale=1.2, size=VOCABULARY)


def logits_of(trees: Sequence[TokenTree]) -> torch.Tensor:
    """The model's logits at all nodes of all trees, rooted where the path is empty."""
    rows = [model(path_of(tree, node)) for tree in trees for node in range(tree.size)]
    return torch.tensor(np.stack(rows), dtype=torch.float32)


def first_rows_of(trees: Sequence[TokenTree]) -> list[int]:
    return np.cumsum([0, *(tree.size for tree in trees[:-1])]).tolist()


def make_metadata(num_reqs: int, temperature: float = 1.0, **fields: Any) -> SamplingMetadata:
    """Metadata of requests that ask for nothing but a temperature."""
    greedy = temperature == 0
    return replace(
        SamplingMetadata(
            temperature=None if greedy else torch.full((num_reqs,), temperature),
            all_greedy=greedy,
            all_random=not greedy,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=torch.zeros(num_reqs),
            presence_penalties=torch.zeros(num_reqs),
            repetition_penalties=torch.ones(num_reqs),
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        ),
        **fields,
    )


def sample_trees(
    trees: Sequence[TokenTree],
    metadata: SamplingMetadata,
    silent: Sequence[int] = (),
    outputs: Sequence[list[int] | None] | None = None,
) -> tuple[list[Walk], LogprobsTensors | None]:
    walks = [Walk(tree) for tree in trees]
    logprobs = walk_in_rounds(
        walks,
        first_rows_of(trees),
        logits_of(trees),
        Sampler(),
        metadata,
        silent,
        [None] * len(trees) if outputs is None else outputs,
    )
    return walks, logprobs


def decode_plainly(
    count: int, metadata: SamplingMetadata, outputs: list[int] | None = None
) -> list[int]:
    """One request's first ``count`` tokens, a sampler call each."""
    tokens: list[int] = []
    for _ in range(count):
        logits = torch.tensor(model(tuple(tokens))[None], dtype=torch.float32)
        token = int(Sampler()(logits, metadata).sampled_token_ids)
        tokens.append(token)
        if outputs is not None:
            outputs.append(token)
    return tokens


def full_tree(depth: int) -> TokenTree:
    """All texts of ``depth`` tokens: whatever is drawn is accepted."""
    chains = [list(each) for each in np.ndindex(*[VOCABULARY] * depth)]
    return build_tree(0, chains[0], chains[1:], max_nodes=1000, max_depth=depth, max_branches=1000)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unlikely_draft(length: int) -> list[int]:
    return [int(model(()).argmin())] * length


# Seeds

TREES = [full_tree(2), linear_tree([]), full_tree(1), linear_tree(unlikely_draft(2))]
EMITTED = [3, 1, 2, 1]
"""Tokens per walk: the full trees accept everything, the unlikely draft is never drawn."""


@pytest.mark.parametrize("seed", range(5))
def test_seeded_requests_emit_what_plain_decoding_emits(seed: int) -> None:
    generators = {index: seeded(10 * seed + index) for index in range(4)}
    walks, _ = sample_trees(TREES, make_metadata(4, generators=generators))
    assert [len(walk.tokens) for walk in walks] == EMITTED
    for index, walk in enumerate(walks):
        alone = make_metadata(1, generators={0: seeded(10 * seed + index)})
        assert walk.tokens == decode_plainly(EMITTED[index], alone)


def test_seeded_generator_draws_once_per_emitted_token() -> None:
    generators = {index: seeded(index) for index in range(4)}
    walks, _ = sample_trees(TREES, make_metadata(4, generators=generators))
    for index, walk in enumerate(walks):
        plain = seeded(index)
        decode_plainly(len(walk.tokens), make_metadata(1, generators={0: plain}))
        assert torch.equal(generators[index].get_state(), plain.get_state())


def test_unseeded_neighbours_do_not_disturb_a_seeded_request() -> None:
    torch.manual_seed(1)
    alone, _ = sample_trees([full_tree(2)], make_metadata(1, generators={0: seeded(3)}))
    torch.manual_seed(2)
    trees = [full_tree(1), full_tree(2), linear_tree([])]
    among, _ = sample_trees(trees, make_metadata(3, generators={1: seeded(3)}))
    assert among[1].tokens == alone[0].tokens


def test_silent_request_draws_nothing_and_its_output_stays() -> None:
    generators = {0: seeded(0), 1: seeded(1)}
    outputs: list[list[int] | None] = [[4], [5]]
    before = generators[0].get_state()
    walks, _ = sample_trees(
        [linear_tree([]), full_tree(2)],
        make_metadata(2, generators=generators),
        silent=[0],
        outputs=outputs,
    )
    assert torch.equal(generators[0].get_state(), before)
    assert outputs == [[4], [5]]
    assert walks[0].finished
    assert walks[1].tokens == decode_plainly(3, make_metadata(1, generators={0: seeded(1)}))


def test_metadata_keeps_its_generators() -> None:
    metadata = make_metadata(2, generators={0: seeded(0), 1: seeded(1)})
    sample_trees([linear_tree([]), full_tree(2)], metadata, silent=[0])
    assert set(metadata.generators) == {0, 1}


# Greedy requests, penalties and processors


def greedy_text(count: int) -> list[int]:
    text: list[int] = []
    while len(text) < count:
        text.append(int(model(tuple(text)).argmax()))
    return text


def test_greedy_walk_takes_the_argmax_of_its_own_rows() -> None:
    text = greedy_text(3)
    trees = [linear_tree(text[:2]), linear_tree([text[0], unlikely_draft(1)[0]])]
    walks = [Walk(tree) for tree in trees]
    walk_greedy(walks, [0, 3], logits_of(trees).argmax(dim=-1).tolist())
    assert [walk.tokens for walk in walks] == [text, text[:2]]


def test_greedy_request_among_random_ones_takes_the_argmax() -> None:
    temperature = torch.tensor([1.0, 0.0])
    metadata = make_metadata(2, temperature=1.0)
    metadata = replace(metadata, temperature=temperature, all_random=False)
    walks, _ = sample_trees([full_tree(1), full_tree(2)], metadata)
    assert walks[1].tokens == greedy_text(3)


def test_penalties_count_the_tokens_emitted_while_walking() -> None:
    def penalised(outputs: list[int]) -> SamplingMetadata:
        return make_metadata(
            1,
            temperature=0,
            no_penalties=False,
            prompt_token_ids=torch.tensor([[VOCABULARY]]),  # padding only
            frequency_penalties=torch.tensor([2.5]),
            presence_penalties=torch.tensor([1.5]),
            output_token_ids=[outputs],
        )

    first = greedy_text(1)[0]
    outputs, plain_outputs = [first], [first]
    walks, _ = sample_trees([full_tree(3)], penalised(outputs), outputs=[outputs])
    plain = decode_plainly(4, penalised(plain_outputs), plain_outputs)
    assert walks[0].tokens == plain
    # The penalties matter: without counting what was emitted on the way, the text is another.
    unaware = [first]
    assert decode_plainly(4, penalised(unaware)) != plain
    assert outputs == [first]


def test_min_tokens_end_where_plain_decoding_ends_them() -> None:
    stop = greedy_text(1)[0]

    def at_least_two(outputs: list[int]) -> SamplingMetadata:
        processor = MinTokensLogitsProcessor(None, CPU, False)
        params = SamplingParams(min_tokens=2, stop_token_ids=[stop])
        processor.update_state(BatchUpdate(1, [], [(0, params, None, outputs)], []))
        biased = LogitBiasLogitsProcessor(None, CPU, False)
        params = SamplingParams(logit_bias={stop: 100.0})
        biased.update_state(BatchUpdate(1, [], [(0, params, None, outputs)], []))
        # The bias comes first, so that the stop token is drawn as soon as it may be.
        return make_metadata(1, temperature=0, logitsprocs=LogitsProcessors([biased, processor]))

    outputs: list[int] = []
    walks, _ = sample_trees([full_tree(3)], at_least_two(outputs), outputs=[outputs])
    assert [token == stop for token in walks[0].tokens] == [False, False, True, True]
    assert outputs == []


def test_outputs_are_restored_when_the_sampler_fails() -> None:
    class FailingSampler(Sampler):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("no more")
            return super().forward(*args, **kwargs)

    outputs = [1, 2]
    tree = full_tree(2)
    with pytest.raises(RuntimeError, match="no more"):
        walk_in_rounds(
            [Walk(tree)], [0], logits_of([tree]), FailingSampler(), make_metadata(1), [], [outputs]
        )
    assert outputs == [1, 2]


def test_logits_are_left_unchanged() -> None:
    tree = full_tree(2)
    logits = logits_of([tree])
    before = logits.clone()
    metadata = make_metadata(1, temperature=0.5, top_k=torch.tensor([2]))
    walk_in_rounds([Walk(tree)], [0], logits, Sampler(), metadata, [], [None])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"all_greedy": False}, False),
        ({"no_penalties": False}, False),
        ({"max_num_logprobs": 0}, False),
        ({"logprob_token_ids": {0: [1]}}, False),
        ({"allowed_token_ids_mask": torch.zeros(1, VOCABULARY, dtype=torch.bool)}, False),
        ({"bad_words_token_ids": {0: [[1]]}}, False),
    ],
)
def test_plain_greedy_is_argmax_and_nothing_else(changes: dict[str, Any], expected: bool) -> None:
    assert is_plain_greedy(make_metadata(1, temperature=0, **changes)) is expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), True),
        (SamplingParams(min_p=0.5), True),  # never moves the argmax
        (SamplingParams(logit_bias={1: 2.0}), False),
        (SamplingParams(min_tokens=1, stop_token_ids=[1]), False),
    ],
)
def test_builtin_processors_count_against_plain_greedy_only_while_in_use(
    params: SamplingParams, expected: bool
) -> None:
    config: Any = type("Config", (), {"scheduler_config": type("C", (), {"max_num_seqs": 1})})
    processors = [
        make(config, CPU, False)
        for make in (MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor)
    ]
    for processor in processors:
        processor.update_state(BatchUpdate(1, [], [(0, params, None, [])], []))
    metadata = make_metadata(1, temperature=0, logitsprocs=LogitsProcessors(processors))
    assert is_plain_greedy(metadata) is expected


# Output


def test_emitted_tokens_are_padded_with_vllms_placeholder() -> None:
    walks = [Walk(linear_tree([])) for _ in range(2)]
    walks[0].tokens, walks[1].tokens = [7], [8, 9, 1]
    output = to_sampler_output(walks, None, CPU)
    assert output.sampled_token_ids.tolist() == [[7, -1, -1], [8, 9, 1]]
    tokens, logprobs = RejectionSampler.parse_output(output.sampled_token_ids, 10)
    assert (tokens, logprobs) == ([[7], [8, 9, 1]], None)


def test_vllm_reads_each_tokens_own_logprobs() -> None:
    generators = {index: seeded(index) for index in range(4)}
    metadata = make_metadata(4, generators=generators, max_num_logprobs=2)
    walks, logprobs = sample_trees(TREES, metadata)
    output = to_sampler_output(walks, logprobs, CPU)
    tokens, parsed = RejectionSampler.parse_output(
        output.sampled_token_ids, VOCABULARY, logprobs_tensors=output.logprobs_tensors
    )
    assert tokens == [walk.tokens for walk in walks]
    assert parsed is not None
    row = 0
    for walk in walks:
        for index, token in enumerate(walk.tokens):
            logits = model(tuple(walk.tokens[:index]))
            expected = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logits)[:2]
            assert parsed.logprob_token_ids[row].tolist() == [token, *best]
            np.testing.assert_allclose(
                parsed.logprobs[row], expected[[token, *best]], rtol=1e-5, atol=1e-5
            )
            assert parsed.sampled_token_ranks[row] == 1 + np.sum(logits > logits[token])
            row += 1
    assert row == len(parsed.logprobs)


# Distribution

TOP_K = 4
TEMPERATURE = 0.9
DRAWS = 20_000
BATCH = 5_000


def likeliest(path: Path, rank: int) -> int:
    return int(np.argsort(-model(path))[rank])


def chain(*ranks: int) -> list[int]:
    """The text that takes the token of each rank in turn, 0 for the likeliest."""
    text: list[int] = []
    for rank in ranks:
        text.append(likeliest(tuple(text), rank))
    return text


CHAINS = [chain(0, 0), chain(0, 1), chain(0, 0), chain(1, 0), chain(1, 0), chain(3, 5)]
"""Shared prefixes, duplicates, and a token that top-k never lets through."""


@cache
def probabilities(path: Path) -> dict[int, float]:
    """The distribution that temperature and top-k make of the model's."""
    kept = np.argsort(-model(path))[:TOP_K]
    weights = np.exp(model(path)[kept] / TEMPERATURE)
    return dict(zip(kept.tolist(), (weights / weights.sum()).tolist(), strict=True))


def expected_prefixes(position: int) -> dict[Path, float]:
    """Probability of each text of ``position`` tokens that a walk can emit."""
    reached: dict[Path, float] = {(): 1.0}
    accepted = {tuple(each[:size]) for each in CHAINS for size in range(len(each) + 1)}
    for _ in range(position):
        reached = {
            (*path, token): share * probability
            for path, share in reached.items()
            if path in accepted
            for token, probability in probabilities(path).items()
        }
    return reached


def draw(merge: bool) -> list[list[int]]:
    """What ``DRAWS`` requests with the same tree emit."""
    torch.manual_seed(0)
    tree = build_tree(
        0, CHAINS[0], CHAINS[1:], max_nodes=99, max_depth=2, max_branches=99, merge=merge
    )
    emitted: list[list[int]] = []
    for _ in range(DRAWS // BATCH):
        walks = [Walk(tree) for _ in range(BATCH)]
        # All requests have the same logits, so one copy of the rows serves them all.
        walk_in_rounds(
            walks,
            [0] * BATCH,
            logits_of([tree]),
            Sampler(),
            make_metadata(BATCH, TEMPERATURE, top_k=torch.full((BATCH,), TOP_K)),
            [],
            [None] * BATCH,
        )
        emitted += [walk.tokens for walk in walks]
    return emitted


@pytest.fixture(scope="module", params=[True, False], ids=["merged", "unmerged"])
def emitted(request: pytest.FixtureRequest) -> list[list[int]]:
    return draw(request.param)


def chi_square_p(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Probability of a deviation at least as large, if the expected counts are right."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    half_freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2).double()))


@pytest.mark.parametrize(
    ("statistic", "freedom", "p"), [(3.841, 1, 0.05), (11.345, 3, 0.01), (18.307, 10, 0.05)]
)
def test_chi_square_p_agrees_with_the_printed_tables(
    statistic: float, freedom: int, p: float
) -> None:
    # One cell takes the whole deviation: (o - e)^2 / e = statistic for e = 1.
    observed = [1 + statistic**0.5, *[1.0] * freedom]
    assert chi_square_p(observed, [1.0] * (freedom + 1)) == pytest.approx(p, abs=1e-4)


@pytest.mark.parametrize("position", [1, 2, 3])
def test_texts_are_emitted_as_often_as_the_model_has_them(
    emitted: list[list[int]], position: int
) -> None:
    counts = Counter(tuple(tokens[:position]) for tokens in emitted if len(tokens) >= position)
    shares = expected_prefixes(position)
    assert set(counts) <= set(shares)
    observed = [counts[path] for path in shares]
    expected = [share * DRAWS for share in shares.values()]
    assert min(expected) >= 5
    if position > 1:  # walks that ended before
        observed.append(DRAWS - sum(observed))
        expected.append(DRAWS - sum(expected))
    assert chi_square_p(observed, expected) > 0.01


def test_filtered_tokens_are_never_emitted(emitted: list[list[int]]) -> None:
    for tokens in emitted:
        for index, token in enumerate(tokens):
            assert token in probabilities(tuple(tokens[:index]))

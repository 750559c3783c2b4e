"""vLLM's model runner with token trees: plans, widens and narrows each step."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_lookahead.attention.branches import BranchBatch, PlacedTree
from vllm_lookahead.core.tree import TokenTree, linear_tree
from vllm_lookahead.core.verify import Walk
from vllm_lookahead.engine.argmax import argmax_rows
from vllm_lookahead.engine.costs import EngineCosts
from vllm_lookahead.engine.grammar import (
    CandidateDraftTokenIds,
    acceptable_drafts,
    widen_bitmask,
)
from vllm_lookahead.engine.metrics import LookaheadStats
from vllm_lookahead.engine.model_text import model_text
from vllm_lookahead.engine.proposer import LookaheadProposer
from vllm_lookahead.engine.sampler import (
    is_plain_greedy,
    plain_logits_processors,
    plain_thinking_budgets,
    to_sampler_output,
    walk_greedy,
    walk_in_rounds,
    without_custom_processors,
)
from vllm_lookahead.engine.scheduler import SaltedSchedulerOutput
from vllm_lookahead.engine.scratch import (
    CacheBlocks,
    ScratchSize,
    with_extra_blocks,
)
from vllm_lookahead.engine.scratch_cache import ScratchCache
from vllm_lookahead.engine.speculative import LookaheadSpeculativeConfig
from vllm_lookahead.engine.step import EMPTY_PLAN, StepLimits, StepPlan, plan_step
from vllm_lookahead.engine.step_cost import Broadcast

_UNUSED = torch.empty(0, dtype=torch.int32)


class LookaheadCPUModelRunner(CPUModelRunner):
    """The order of a step: plan, widen, feed (base class), walk, keep, propose."""

    drafter: LookaheadProposer
    speculative_config: LookaheadSpeculativeConfig | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        with without_custom_processors(vllm_config.model_config):
            super().__init__(vllm_config, device)
        self.input_batch.logitsprocs = plain_logits_processors(vllm_config, device)
        self.input_batch.logitsprocs_need_output_token_ids = bool(
            vllm_config.model_config.logits_processors
        )
        self.stats = LookaheadStats()
        self.costs = EngineCosts(self)
        self._cache_salts: dict[str, str | None] = {}
        # Filled by execute_model for the step.
        self._plan: StepPlan = EMPTY_PLAN
        self._scheduled: SchedulerOutput | None = None
        # Filled by _build_attention_metadata, one per KV cache group.
        self._branches: list[BranchBatch] = []
        # Filled by _sample.
        self._walks: list[Walk] = []
        self._grammar_limits: dict[str, int] = {}
        self._argmax: np.ndarray = np.empty(0, dtype=np.int64)
        self._first_rows: list[int] = []

    # ---- memory ----------------------------------------------------------------------------

    def scratch_size(self) -> ScratchSize:
        """Scratch blocks that the configuration asks for."""
        return ScratchSize.of(
            self.drafter.limits, self.get_kv_cache_spec().values(), self.max_num_reqs
        )

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> None:
        groups = kv_cache_config.kv_cache_groups
        num_blocks = self.scratch_size().num_blocks(
            kv_cache_config.num_blocks, len(groups), self.drafter.config.scratch_fraction
        )
        self._limits = StepLimits(
            max_tokens=self.max_num_tokens,
            max_model_len=self.max_model_len,
            scratch_blocks=num_blocks,
            block_size=min(group.kv_cache_spec.block_size for group in groups),
        )
        super().initialize_kv_cache(
            with_extra_blocks(kv_cache_config, len(groups) * num_blocks),
            is_profiling,
            kv_cache_allocation_context,
        )
        # The base class has just made its final input batch.
        self.input_batch.thinking_budget_state_holder = plain_thinking_budgets(
            self.vllm_config, self.device
        )
        context = self.compilation_config.static_forward_context
        self.scratch = ScratchCache(
            [kv_cache_config.num_blocks + gid * num_blocks for gid in range(len(groups))],
            [
                CacheBlocks([context[name].kv_cache for name in group.layer_names])
                for group in self.kv_cache_config.kv_cache_groups
            ],
        )

    # ---- plan and widen ----------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        for req_id in scheduler_output.preempted_req_ids or ():
            self.drafter.release(req_id)
        if isinstance(scheduler_output, SaltedSchedulerOutput):
            self._cache_salts.update(scheduler_output.cache_salts)
        self._scheduled = scheduler_output
        self._plan = plan_step(scheduler_output, self.drafter, self._limits)
        widened = self._plan.widen(scheduler_output)
        self.costs.begin_step(self._plan, widened)
        return super().execute_model(widened, *args, **kwargs)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # Request state, the block table and the token buffers know the primary candidate only.
        assert self._scheduled is not None
        return super()._update_states(self._scheduled)

    def _on_request_state_removed(self, req_id: str, req_state: CachedRequestState | None) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.drafter.finish(req_id)
        self._cache_salts.pop(req_id, None)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        if not scheduler_output.scheduled_spec_decode_tokens:
            return self._prepare_inputs_plainly(scheduler_output, num_scheduled_tokens)
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if not self._plan.trees:
            return prepared
        starts = self.query_start_loc.np
        for index, placed in enumerate(self._placed_trees()):
            if placed is None:
                continue
            tree, row = placed.tree, int(starts[index])
            self.input_ids.np[row : row + tree.size] = tree.token_ids
            self.positions[row : row + tree.size] = torch.from_numpy(placed.positions)
            if self.enable_prompt_embeds:
                self.is_token_ids.np[row : row + tree.size] = True
        return prepared

    def _prepare_inputs_plainly(self, *args: Any) -> Any:
        # Without drafts a row is a request. The base class tells by its configuration whether
        # there may be any, and would look for them.
        config, self.speculative_config = self.speculative_config, None
        try:
            return super()._prepare_inputs(*args)
        finally:
            self.speculative_config = config

    def _calc_mrope_positions(self, scheduler_output: SchedulerOutput) -> None:
        # Text has one position in all dimensions. Called by `_prepare_inputs`, and once more
        # where videos are pruned.
        super()._calc_mrope_positions(scheduler_output)
        if not self._plan.trees:
            return
        row = 0
        for req_id, placed in zip(self.input_batch.req_ids, self._placed_trees(), strict=True):
            if placed is not None:
                delta = self.requests[req_id].mrope_position_delta
                columns = slice(row, row + placed.tree.size)
                self.mrope_positions.np[:, columns] = placed.positions + delta
            row += scheduler_output.num_scheduled_tokens[req_id]

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        # What vLLM's rejection sampler would want beside the rows of logits isn't made. These are
        # the last rows of each request, one after the other.
        rows_per_request = num_draft_tokens + 1
        ends = np.cumsum(rows_per_request)
        rows = np.arange(ends[-1])
        if ends[-1] != cu_num_scheduled_tokens[-1]:
            rows += np.repeat(cu_num_scheduled_tokens - ends, rows_per_request)
        return SpecDecodeMetadata(
            draft_token_ids=_UNUSED,
            num_draft_tokens=num_draft_tokens.tolist(),
            cu_num_draft_tokens=_UNUSED,
            cu_num_sampled_tokens=_UNUSED,
            target_logits_indices=_UNUSED,
            bonus_logits_indices=_UNUSED,
            logits_indices=torch.from_numpy(rows.astype(np.int32)),
        )

    def _placed_trees(self) -> list[PlacedTree | None]:
        return [self._plan.trees.get(req_id) for req_id in self.input_batch.req_ids]

    # ---- what drafts go by -------------------------------------------------------------------

    def prepare_drafts(self, broadcast: Broadcast, is_first: bool) -> None:
        """Before the first request: what steps cost, and text that the model writes.

        Arguments as in `measured_points`.
        """
        self.costs.prepare(broadcast, is_first)
        if self.drafter.config.uses_model_text:
            self.drafter.use_model_text(model_text(self, broadcast, is_first))

    # ---- feed --------------------------------------------------------------------------------

    def _build_attention_metadata(self, num_reqs: int, **kwargs: Any) -> Any:
        self._branches = self._expand(num_reqs) if self._plan.needs_branches else []
        for gid, groups in enumerate(self.attn_groups):
            for group in groups:
                branches = self._branches[gid] if self._branches else None
                group.get_metadata_builder().branches = branches
        return super()._build_attention_metadata(num_reqs=num_reqs, **kwargs)

    def _expand(self, num_reqs: int) -> list[BranchBatch]:
        return self.scratch.expand(
            self.input_batch.block_table.block_tables,
            np.diff(self.query_start_loc.np[: num_reqs + 1]).tolist(),
            self.input_batch.num_computed_tokens_cpu[:num_reqs].tolist(),
            self._placed_trees(),
        )

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        branches, self._branches = self._branches, []
        if branches:
            self.scratch.fill(branches)
        return super()._model_forward(*args, **kwargs)

    # ---- walk and keep -----------------------------------------------------------------------

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        self._grammar_limits = {}
        if grammar_output is not None and self._scheduled is not None:
            self._grammar_limits = acceptable_drafts(grammar_output)
            grammar_output = widen_bitmask(grammar_output, self._scheduled, self._plan)
        return super().sample_tokens(grammar_output)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        batch = self.input_batch
        metadata = batch.sampling_metadata
        if spec_decode_metadata is None:
            self._first_rows = list(range(batch.num_reqs))
        else:
            counts = spec_decode_metadata.num_draft_tokens
            self._first_rows = list(accumulate([1 + count for count in counts[:-1]], initial=0))
        self._walks = [Walk(self._tree(req_id)) for req_id in batch.req_ids]
        self._argmax = argmax_rows(logits)
        logprobs = None
        if is_plain_greedy(metadata):
            walk_greedy(self._walks, self._first_rows, self._argmax.tolist())
        else:
            logprobs = walk_in_rounds(
                self._walks,
                self._first_rows,
                logits,
                self.sampler,
                metadata,
                self._dropped_requests(),
                batch.req_output_token_ids,
            )
        self._keep_accepted()
        return to_sampler_output(self._walks, logprobs, logits.device)

    def _dropped_requests(self) -> list[int]:
        # In the middle of their prompt: vLLM drops what they sample.
        return np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()

    def _tree(self, req_id: str) -> TokenTree:
        placed = self._plan.trees.get(req_id)
        if placed is not None:
            tree = placed.tree
        elif req_id in self._plan.linear:
            tree = self._plan.linear[req_id]
        else:
            # A request that is new or resumed, with the scheduler's placeholder drafts or none.
            assert self._scheduled is not None
            tree = linear_tree(self._scheduled.scheduled_spec_decode_tokens.get(req_id, ()))
        limit = self._grammar_limits.get(req_id)
        return tree if limit is None else tree.accepting_primary(limit)

    def _keep_accepted(self) -> None:
        if self._plan.trees:
            tables = self.input_batch.block_table.block_tables
            self.scratch.keep_accepted(tables, self._walks, self._placed_trees())
        for req_id, walk in zip(self.input_batch.req_ids, self._walks, strict=True):
            if self._plan.has(req_id):
                tree = walk.tree
                off_primary = walk.node > tree.primary_size
                window = len(tree.window_leaves) > 0
                self.stats.observe(len(walk.tokens), tree.size, off_primary, window)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # Requests whose token is dropped drew nothing, so there is no draw to take back (which
        # a CPU generator couldn't).
        generators = self.input_batch.generators
        if not generators:
            return super()._bookkeeping_sync(*args, **kwargs)
        held = {i: generators.pop(i) for i in self._dropped_requests() if i in generators}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(held)

    # ---- propose -----------------------------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # Trees are cut to the model's length request by request; one that nears it must not
        # cost the others their drafts.
        return True

    def propose_draft_token_ids(
        self, scheduler_output: SchedulerOutput, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        begin = time.perf_counter()
        drafting = []
        for index, req_id in enumerate(self.input_batch.req_ids):
            if sampled_token_ids[index] and not self.drafter.is_plain(req_id):
                self._commit(index, req_id)
                drafting.append(req_id)
        num_others = self.input_batch.num_reqs - len(drafting)
        drafts = self.drafter.draft(drafting, num_others)
        if drafts:
            self.costs.drafted(time.perf_counter() - begin, len(drafting))
        return [drafts.get(req_id, []) for req_id in self.input_batch.req_ids]

    def _commit(self, index: int, req_id: str) -> None:
        length = int(self.input_batch.num_tokens_no_spec[index])
        state = self.drafter.get(req_id)
        if state is None or not self._plan.has(req_id):
            self.drafter.start(
                req_id,
                self.input_batch.token_ids_cpu[index, :length].tolist(),
                int(self.input_batch.num_prompt_tokens[index]),
                self.requests[req_id].sampling_params,
                self._shared_key(req_id),
            )
            return
        walk = self._walks[index]
        new_row = leaves = walk.tree.window_leaves
        if len(leaves):
            new_row = self._argmax[self._first_rows[index] + leaves]
        state.commit(walk, new_row)
        if state.num_tokens != length:
            raise RuntimeError(
                f"request {req_id}: lookahead has {state.num_tokens} tokens, vLLM {length}"
            )

    def _shared_key(self, req_id: str) -> tuple[str | None, str | None]:
        # What keeps requests apart in vLLM's prefix cache keeps them apart here.
        lora = self.requests[req_id].lora_request
        return None if lora is None else lora.lora_name, self._cache_salts.get(req_id)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts = super().take_draft_token_ids()
        if drafts is None or not any(drafts.draft_token_ids):
            # The scheduler has used up what it had.
            return None
        candidates = {}
        for req_id in drafts.req_ids:
            params = self.requests[req_id].sampling_params
            if params is not None and params.structured_outputs is not None:
                candidates[req_id] = self.drafter.candidates(req_id)
        return CandidateDraftTokenIds(drafts.req_ids, drafts.draft_token_ids, candidates)

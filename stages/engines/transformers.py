"""Generation and scoring with transformers: the engines that run anywhere torch does."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.config.schema import Config
from pipeline.run.schemas import FinishReason
from stages.engines.base import (
    CannotAdapt,
    Generator,
    Request,
    Response,
    Sampling,
    Scorer,
    SequenceLimits,
    Stopped,
    Turns,
    takes_adapters,
)
from stages.engines.decoding import Decoding, Written, can_go_on, decode, of_prompts, padded
from stages.engines.in_place import Unused, can_take, load_in_place
from stages.engines.layouts import ModelLayout, layout_of
from stages.engines.padding import Batching, batching_of, in_batches, scoring_batching_of
from stages.engines.routes import RouteNotes, switch_off_router_logits
from stages.logs import log
from stages.models.adapters import merge_into, read_adapter
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import load_causal_lm, load_reward_model
from stages.models.passes import PassedTokens, count_pass
from stages.models.routing import Routing, routing_of
from stages.ppo.splitting import budgeted


@takes_adapters
def make_generator(config: Config, directory: str, adapter: str | None = None) -> Generator:
    """Load the policy of ``directory``, or that and an adapter, which is merged into its weights in memory.

    Raises:
        CannotAdapt: the merged weights would be other numbers than those of a merged model that is loaded.
    """
    rollout, model = config.rollout, config.model
    precision = config.rollout_precision
    if adapter and precision is not config.update.precision:
        raise CannotAdapt(f"it generates in {precision}, and was trained in {config.update.precision}")
    loaded = load_causal_lm(directory, precision, model.trust_remote_code, rollout.device_map)
    hide_unknown_ids(loaded, config)
    routing = routing_of(loaded) if config.algorithm.router_replay else None
    generator = TransformersGenerator(loaded, rollout.tokens_per_batch, model.context_length, routing)
    generator.is_like(directory, merges=precision is config.update.precision)
    if adapter:
        merge_into(loaded, read_adapter(Path(adapter)))
    return generator


def make_scorer(config: Config, directory: str) -> Scorer:
    """Load the reward model of ``directory``."""
    reward, trust = config.reward, config.model.trust_remote_code
    loaded = load_reward_model(directory, config.reward_precision, trust, reward.device_map)
    return TransformersScorer(loaded, reward.tokens_per_batch)


def limits_of(described: PreTrainedConfig, context: int | None = None) -> SequenceLimits:
    """Return the limits of a model; a given context is taken instead of its own."""
    settings = described.get_text_config()
    own = getattr(settings, "max_position_embeddings", None)
    return SequenceLimits(context or own or SequenceLimits.NONE, settings.vocab_size)


class TransformersGenerator(Generator):
    """Batched generation with a KV cache; requests are sorted by length and batched under a token budget.

    Prompts are padded on the left, unless the model answers differently then: see
    :mod:`stages.engines.padding`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        token_budget: int,
        context: int | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Args:
        routing: routers whose choices responses have.
        """
        self._model = model
        self._routing = routing
        self._token_budget = token_budget
        self._own_stop_ids = end_of_sequence_ids(model.config, getattr(model, "generation_config", None))
        self.limits = limits_of(model.config, context)
        # generate() fills what a request leaves open from the model's own settings, which may penalise,
        # suppress or force tokens: a blank one leaves the distribution alone.
        model.generation_config = GenerationConfig()
        switch_off_router_logits(model)
        self._unused = Unused.of(model)
        self._layout: ModelLayout | None = None
        self._merges = False
        self._batching: Batching | None = None
        self._goes_on = False

    def is_like(self, directory: str, merges: bool) -> None:
        """Note the directory that the model is from, so that it can take the weights of others like it.

        Args:
            merges: whether adapters may be merged into it.
        """
        self._layout, self._merges = layout_of(Path(directory)), merges

    def reset(self) -> bool:
        self._unused.restore()
        return True

    def reload(self, directory: str, adapter: str | None = None) -> bool:
        """Load weights into the model, if the directory is like that which the model is from."""
        found = layout_of(Path(directory))
        if found is None or found != self._layout or not can_take(self._model, found):
            return False
        if adapter and not self._merges:
            return False
        load_in_place(self._model, Path(directory))
        if adapter:
            merge_into(self._model, read_adapter(Path(adapter)))
        self._batching = None
        return True

    def plan(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the batches, in the order in which they are generated."""
        return self._batches(dict(enumerate(requests)))

    def _batches(self, requests: Mapping[int, Request]) -> list[list[int]]:
        fit = [i for i, request in requests.items() if self._takes(request)]
        lengths = [(len(requests[i].prompt_tokens), self.room(requests[i])) for i in fit]
        batching = self.batching() if len(fit) > 1 else Batching.ALONE
        groups = batching.groups([prompt for prompt, _ in lengths])
        batches = [batch for group in groups for batch in budgeted(lengths, group, self._token_budget)]
        return [[fit[place] for place in batch] for batch in batches]

    def batching(self) -> Batching:
        """Return how rows may be batched: tried once, with the weights that there are."""
        if self._batching is None:
            self._batching = batching_of(self._model, self.limits)
            self._goes_on = self._batching is Batching.PADDED and can_go_on(self._model, self.limits)
            self._unused.restore()
            if self._batching is not Batching.PADDED:
                log.info(
                    f"{type(self._model).__name__} answers differently in padded batches: it generates "
                    f"{self._batching}, which is exact and slower"
                )
        return self._batching

    def _stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Collection[int],
        should_stop: Callable[[], bool],
        turns: Turns,
    ) -> Iterator[Mapping[int, Response]]:
        """Yield one item per batch that is not done."""
        for batch in self.plan(requests):
            if all(i in done for i in batch):
                continue
            yield self._converse({i: requests[i] for i in batch}, sampling, should_stop, turns)

    def _converse(
        self,
        requests: Mapping[int, Request],
        sampling: Sampling,
        should_stop: Callable[[], bool],
        turns: Turns,
    ) -> dict[int, Response]:
        """Return the last response of each conversation of a group. Conversations wait for each other after
        each turn, so that what is computed together follows from the group alone."""
        last: dict[int, Response] = {}
        passed = PassedTokens()
        while requests:
            assert all(map(self._takes, requests.values())), "a request that nothing would answer"
            for batch in self._batches(requests):
                asked = [requests[i] for i in batch]
                found, taken = self._generate_batch(asked, sampling, should_stop)
                passed = passed.plus(taken)
                for i, response in zip(batch, found, strict=True):
                    last[i] = response
                    turns.ended(i, response)
            following: dict[int, Request | None] = {}
            while len(following) < len(requests):
                _check(should_stop)
                following |= turns.due(wait=True)
            requests = {i: request for i in requests if (request := following[i]) is not None}
        count_pass(passed.tokens, passed.positions)  # of whole groups: others are generated again
        return last

    @torch.inference_mode()
    def _generate_batch(
        self, requests: Sequence[Request], sampling: Sampling, should_stop: Callable[[], bool]
    ) -> tuple[list[Response], PassedTokens]:
        """Generate one batch. Raises Stopped as soon as ``should_stop`` holds before a token."""
        _check(should_stop)
        stop_ids = sorted({*self._own_stop_ids, *sampling.stop_token_ids})
        sampler = SeededSampler(requests, sampling, self._model.device)
        rooms, prompts = list(map(self.room, requests)), [request.prompt_tokens for request in requests]
        notes = RouteNotes(self._model, self._routing, prompts, max(rooms))

        def keep(places: Tensor) -> None:
            sampler.keep(places)
            notes.keep(places)

        how = Decoding(LogitsProcessorList([StopCheck(should_stop), sampler]), keep, rooms, stop_ids)
        goes_on = len(requests) > 1 and self._goes_on
        with notes.taken():
            written = decode(self._model, prompts, how) if goes_on else self._generate_whole(prompts, how)
        rows = zip(rooms, written.tokens, sampler.log_probs.tolist(), strict=True)
        found = [_cut(room, row, scores, stop_ids) for room, row, scores in rows]
        return notes.with_routes(found), written.passed.plus(
            PassedTokens(sum(len(one.tokens) for one in found), 0)
        )

    def _generate_whole(self, prompts: Sequence[Sequence[int]], how: Decoding) -> Written:
        """Answer a batch of which all rows are computed until the last of them has ended."""
        input_ids, attention_mask = (part.to(self._model.device) for part in padded(prompts, "left", 0))
        output: Tensor = self._model.generate(  # type: ignore[operator]
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_processor=how.processors,
            generation_config=how.settings(max(how.limits)),
        )
        new = output[:, input_ids.shape[1] :]
        return Written(new.tolist(), of_prompts(prompts).plus(PassedTokens(0, new.numel())))


def _check(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Stopped


class StopCheck(LogitsProcessor):
    """A logits processor that changes nothing, but leaves ``generate`` between token steps by an exception.

    A stopping criterion would do the same, but return rows that look like finished ones.
    """

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        _check(self._should_stop)
        return scores


class SeededSampler(LogitsProcessor):
    """A logits processor that chooses each row's next token, greedily or by its own seed, and notes its
    log-probability.

    Each sampled row draws its uniform numbers from a generator of its own and inverts the cumulative
    distribution, so that a response does not depend on what it was batched with. The choice is handed to
    ``generate`` as the only finite logit.
    """

    def __init__(self, requests: Sequence[Request], sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._num_greedy = sum(request.greedy for request in requests)
        self._is_greedy = torch.tensor([request.greedy for request in requests]).to(device)
        self._uniform = _uniform_numbers(requests).to(device)
        self._rows, self._step = torch.arange(len(requests), device=device), 0
        self.log_probs = torch.zeros(self._uniform.shape, device=device)
        """Log-probabilities of the chosen tokens, [B, longest response]."""

    def keep(self, places: Tensor) -> None:
        """Go on with some of the rows."""
        places = places.to(self._rows.device)
        self._rows, self._is_greedy = self._rows[places], self._is_greedy[places]
        self._num_greedy = int(self._is_greedy.sum())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        temperature = torch.where(self._is_greedy, 1.0, self._sampling.temperature)
        logits = scores.float() / temperature.unsqueeze(-1)
        choice = self._choose(input_ids, scores, logits)
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, choice.unsqueeze(-1))
        self.log_probs[self._rows, self._step] = chosen.squeeze(-1)
        self._step += 1
        only = torch.full_like(scores, -torch.inf)
        return only.scatter(-1, choice.unsqueeze(-1), 0.0)

    def _choose(self, input_ids: Tensor, scores: Tensor, logits: Tensor) -> Tensor:
        """Return [B], the likeliest token of greedy rows, a sample of the others."""
        if self._num_greedy == 0:
            return self._sample(input_ids, logits)
        if self._num_greedy == len(logits):
            return scores.argmax(dim=-1)
        return torch.where(self._is_greedy, scores.argmax(dim=-1), self._sample(input_ids, logits))

    def _sample(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        if self._sampling.top_k:
            logits = TopKLogitsWarper(self._sampling.top_k)(input_ids, logits)
        if self._sampling.top_p < 1.0:
            logits = TopPLogitsWarper(self._sampling.top_p)(input_ids, logits)
        cumulative = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
        point = self._uniform[self._rows, self._step].unsqueeze(-1) * cumulative[:, -1:]
        # right=True: the first token whose cumulative probability exceeds the point, never one of weight 0
        choice = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
        return choice.clamp(max=logits.shape[-1] - 1)


class TransformersScorer(Scorer):
    """A sequence-classification model over length-sorted batches under a token budget.

    Rows are padded on the right, unless the model gives them other scores then: see
    :mod:`stages.engines.padding`.
    """

    def __init__(self, model: PreTrainedModel, token_budget: int) -> None:
        self._model = model
        self._token_budget = token_budget
        self.limits = limits_of(model.config)
        self._pad = setting_of(model.config, "pad_token_id")
        self._unused = Unused.of(model)
        # The head reads the last token that is not padding; without an id only single rows are safe.
        self._batching = Batching.ALONE if self._pad is None else None

    def reset(self) -> bool:
        self._unused.restore()
        return True

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        batching = self.batching() if len(sequences) > 1 else Batching.ALONE
        return in_batches(sequences, batching, self._token_budget, self._score_batch)

    @torch.inference_mode()
    def _score_batch(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        input_ids, attention_mask = padded(sequences, "right", self._pad or 0)
        device = self._model.device
        output = self._model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device))
        scores: list[float] = output.logits.squeeze(-1).float().tolist()
        return scores

    def batching(self) -> Batching:
        """Return how rows may be batched: tried once."""
        if self._batching is None:
            ends, pad = sorted(end_of_sequence_ids(self._model.config, None)), self._pad
            end = next((id_ for id_ in ends if id_ != pad), None)
            self._batching = scoring_batching_of(
                self._score_batch, self.limits, self._model.dtype, end, {pad, *ends}
            )
            self._unused.restore()
            if self._batching is not Batching.PADDED:
                log.info(
                    f"{type(self._model).__name__} gives other scores in padded batches: it scores "
                    f"{self._batching}, which is exact and slower"
                )
        return self._batching


def setting_of(described: PreTrainedConfig, name: str) -> Any:
    """Return a setting of a model's description, or else of its text model's, if it describes several."""
    own = getattr(described, name, None)
    return own if own is not None else getattr(described.get_text_config(), name, None)


def end_of_sequence_ids(described: PreTrainedConfig, settings: GenerationConfig | None) -> set[int]:
    """Return the end-of-sequence ids of a model's description and of its generation settings."""
    found: set[int] = set()
    for ids in (setting_of(described, "eos_token_id"), settings.eos_token_id if settings else None):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return found


def _uniform_numbers(requests: Sequence[Request]) -> Tensor:
    """Return [B, longest response] numbers in [0, 1), each row from its own seed."""
    longest = max(request.max_new_tokens for request in requests)
    generators = [torch.Generator().manual_seed(request.seed) for request in requests]
    return torch.stack([torch.rand(longest, generator=one, dtype=torch.float64) for one in generators])


def _cut(limit: int, tokens: list[int], log_probs: list[float], stop_ids: list[int]) -> Response:
    """End a row at its first stop token or at its own length."""
    stop = next((i for i, token in enumerate(tokens[:limit]) if token in stop_ids), None)
    end = limit if stop is None else stop + 1
    reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
    return Response(tokens[:end], log_probs[:end], reason)

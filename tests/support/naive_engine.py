"""The least that an engine of a user's own has to have: one token of one sequence at a time.

``rollout.engine=tests.support.naive_engine:make_generator``, and ``make_scorer`` for ``reward.engine``.
"""

import torch

from pipeline.config.update import Precision
from pipeline.run.schemas import FinishReason
from stages.engines.base import Generator, Response, Scorer
from stages.engines.transformers import end_of_sequence_ids, limits_of
from stages.models.loading import load_causal_lm, load_reward_model


def make_generator(config, directory):
    return NaiveGenerator(load_causal_lm(directory, Precision.FP32, False), config.model.context_length)


def make_scorer(config, directory):
    return NaiveScorer(load_reward_model(directory, Precision.FP32, False))


class NaiveGenerator(Generator):
    def __init__(self, model, context):
        self._model = model
        self.limits = limits_of(model.config, context)

    def _stream(self, requests, sampling, done, should_stop, turns):
        for index, request in enumerate(requests):
            while index not in done and request is not None:
                response = self._respond(request, sampling, should_stop)
                if response is None:
                    return
                turns.ended(index, response)
                request = turns.due(wait=True)[index]
                if request is None:
                    yield {index: response}

    @torch.inference_mode()
    def _respond(self, request, sampling, should_stop):
        own = end_of_sequence_ids(self._model.config, self._model.generation_config)
        stops = own.union(sampling.stop_token_ids)
        draw = torch.Generator().manual_seed(request.seed)
        tokens, log_probs = [], []
        while len(tokens) < self.room(request) and not stops.union(sampling.stop_token_ids).intersection(
            tokens
        ):
            if should_stop():
                return None
            logits = self._model(torch.tensor([[*request.prompt_tokens, *tokens]])).logits[0, -1].float()
            spread = torch.log_softmax(logits / (1.0 if request.greedy else sampling.temperature), dim=-1)
            sample = torch.multinomial(spread.exp(), 1, generator=draw)
            tokens.append(int(logits.argmax() if request.greedy else sample))
            log_probs.append(float(spread[tokens[-1]]))
        stopped = tokens[-1] in stops
        return Response(tokens, log_probs, FinishReason.STOP if stopped else FinishReason.LENGTH)


class NaiveScorer(Scorer):
    def __init__(self, model):
        self._model = model
        self.limits = limits_of(model.config)

    @torch.inference_mode()
    def _score(self, sequences):
        return [float(self._model(torch.tensor([list(s)])).logits[0, 0]) for s in sequences]

"""Engines of a user's own that break, within a shard or when they are closed, or that refuse some prompts."""

from pathlib import Path

from stages.engines import transformers
from tests.support import naive_engine


def breaks_once(config, directory):
    made = naive_engine.make_generator(config, directory)
    made.__class__ = BreaksOnce
    made.marker = Path(config.run_dir) / "broken"
    return made


class BreaksOnce(naive_engine.NaiveGenerator):
    marker: Path

    def _stream(self, *arguments):
        for count, part in enumerate(super()._stream(*arguments)):
            if count == 3 and not self.marker.exists():
                self.marker.touch()
                raise RuntimeError("the engine's worker process is gone")
            yield part


def cannot_be_closed(config, directory):
    made = naive_engine.make_generator(config, directory)
    made.__class__ = CannotBeClosed
    return made


class CannotBeClosed(naive_engine.NaiveGenerator):
    def close(self):
        raise OSError("the cache's folder is gone")


def no_engine(config, directory):
    return None


LONGEST = 8


class RefusingGenerator(transformers.TransformersGenerator):
    def problem_with(self, request):
        if len(request.prompt_tokens) > LONGEST:
            return "it is too long for this engine"
        return super().problem_with(request)


def make_refusing_generator(config, directory):
    made = transformers.make_generator(config, directory)
    made.__class__ = RefusingGenerator
    return made

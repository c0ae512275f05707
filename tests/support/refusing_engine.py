"""An engine of the user's that takes fewer prompts than prepare does.

``rollout.engine=tests.support.refusing_engine:make_generator``
"""

from stages.engines import transformers

LONGEST = 8


class RefusingGenerator(transformers.TransformersGenerator):
    def problem_with(self, request):
        if len(request.prompt_tokens) > LONGEST:
            return "it is too long for this engine"
        return super().problem_with(request)


def make_generator(config, directory):
    made = transformers.make_generator(config, directory)
    made.__class__ = RefusingGenerator
    return made

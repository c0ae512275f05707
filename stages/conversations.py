"""The conversation that a scheduler of the user's is given, under the name that its annotations use."""

from stages.generation.conversations import Conversation as Conversation

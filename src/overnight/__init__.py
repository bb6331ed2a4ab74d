"""Run a file of OpenAI requests through any inference engine: every answer, in order, once."""

__version__ = "0.1.0"

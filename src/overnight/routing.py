"""Which requests the engine is asked, and what is answered in its place. Pure."""

from collections.abc import Collection, Iterable

from .endpoints import ENDPOINTS
from .records import INVALID_URL, MODEL_NOT_FOUND, STREAMING_UNSUPPORTED, Answer, Request, error_answer


class Router:
    """Judges each request against what an engine serves.

    `models` are the names that requests may ask for; None takes any. `any_path` says that the engine knows
    paths beyond the table (a server).
    """

    def __init__(self, endpoints: Iterable[str], models: Collection[str] | None, *, any_path: bool = False) -> None:
        self._endpoints = frozenset(endpoints)
        self._models = None if models is None else frozenset(models)
        self._any_path = any_path

    def refuse(self, request: Request) -> Answer | None:
        """The answer that the runner gives itself, as a server would; None where the engine is to answer."""
        if request.is_streamed:
            message = "Requests cannot be streamed in a batch: remove body.stream"
            return error_answer(400, message, code=STREAMING_UNSUPPORTED, param="stream")
        if not self._any_path:
            if request.endpoint is None:
                known = ", ".join(ENDPOINTS)
                message = f"URL {request.url} is not a supported endpoint. Supported endpoints: {known}"
                return error_answer(404, message, code=INVALID_URL, param="url")
            if request.endpoint not in self._endpoints:
                message = f"Model does not support endpoint: {request.url}"
                return error_answer(400, message, code=INVALID_URL, param="url")
        if self._models is not None and request.model is not None and request.model not in self._models:
            message = f"The model {request.model!r} does not exist. Served here: {', '.join(sorted(self._models))}"
            return error_answer(404, message, code=MODEL_NOT_FOUND, param="model")
        return None

"""A batch line as a pydantic model, its body a chat request: the fields that most requests use.

Servers that read batch files through pydantic models (vLLM's run_batch is one) have more fields and validators of
their own in Python, which cost more than this; none of them is here.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12


class TextPart(TypedDict):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageUrl(TypedDict, total=False):
    """Where an image is."""

    url: str
    detail: Literal["auto", "low", "high"]


class ImagePart(TypedDict):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Function(TypedDict):
    """A function that the model called."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call in an assistant's message."""

    id: str
    type: Literal["function"]
    function: Function


class SystemMessage(TypedDict, total=False):
    """What the application says."""

    role: Literal["system", "developer"]
    content: str | list[TextPart]
    name: str


class UserMessage(TypedDict, total=False):
    """What the user says."""

    role: Literal["user"]
    content: str | list[TextPart | ImagePart]
    name: str


class AssistantMessage(TypedDict, total=False):
    """What the model said."""

    role: Literal["assistant"]
    content: str | list[TextPart] | None
    name: str
    tool_calls: list[ToolCall]


class ToolMessage(TypedDict, total=False):
    """What a tool gave."""

    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: str


Message = SystemMessage | UserMessage | AssistantMessage | ToolMessage


class Model(BaseModel):
    """Further keys are kept, as servers with parameters of their own do."""

    model_config = ConfigDict(extra="allow")


class ToolFunction(Model):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Model):
    """A tool that may be called."""

    type: Literal["function"] = "function"
    function: ToolFunction


class ResponseFormat(Model):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(Model):
    """The main fields of a chat request."""

    messages: list[Message]
    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    response_format: ResponseFormat | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    user: str | None = None


class BatchRequestInput(Model):
    """One line."""

    custom_id: str
    method: str
    url: str
    body: ChatRequest

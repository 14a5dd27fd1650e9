"""The messages of a chat request, as OpenAI writes them: what is known is allowed, everything else is refused.

Fields that responses carry (`refusal`, `annotations`, `reasoning`, …) are allowed on assistant messages, so that a
caller can append a response's message to the next request as it is.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from schemas.fields import Asked, Count

Text = Annotated[str, Field(max_length=64 * 1024 * 1024)]
Name = Annotated[str, Field(min_length=1, max_length=64)]


class MediaUrl(Asked):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class InputAudio(Asked):
    data: str
    format: Annotated[str, Field(max_length=16)]


class TextPart(Asked):
    type: Literal["text"]
    text: Text


class RefusalPart(Asked):
    type: Literal["refusal"]
    refusal: Text


class ImagePart(Asked):
    type: Literal["image_url"]
    image_url: MediaUrl


class AudioUrlPart(Asked):
    type: Literal["audio_url"]
    audio_url: MediaUrl


class VideoUrlPart(Asked):
    type: Literal["video_url"]
    video_url: MediaUrl


class InputAudioPart(Asked):
    type: Literal["input_audio"]
    input_audio: InputAudio


# Part types that hold a URL, which the engine would fetch.
URL_PARTS = ("image_url", "audio_url", "video_url")

Part = Annotated[
    TextPart | RefusalPart | ImagePart | AudioUrlPart | VideoUrlPart | InputAudioPart, Field(discriminator="type")
]


def _content_kind(value: Any) -> str:
    return "parts" if isinstance(value, list) else "plain"


Content = Annotated[
    Annotated[Text, Tag("plain")] | Annotated[list[Part], Field(min_length=1), Tag("parts")],
    Discriminator(_content_kind),
]


class CalledFunction(Asked):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class Call(Asked):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Count | None = None


class SystemMessage(Asked):
    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Asked):
    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(Asked):
    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: list[Call] | None = None
    refusal: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("needs content or tool_calls")
        return self


class ToolMessage(Asked):
    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Name | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]

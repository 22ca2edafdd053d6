"""From conversations to examples: what the chat template writes before the response, and with it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from refusion_jax.config import DataConfig
from refusion_jax.data.chat import check_messages, render_chatml
from refusion_jax.data.examples import DataError, Example
from refusion_jax.data.tokenizers import Tokenizer


class Render(Protocol):
    """`Tokenizer.render`."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, enable_thinking: bool
    ) -> str: ...


@dataclasses.dataclass(frozen=True)
class Conversations:
    """How conversations, and pairs where they are taken for such, become examples.

    Attributes:
      render: writes a conversation.
      whole: whether prompt and response are one text, not two.
      pairs: whether a prompt and a response that are no conversation become one of two turns.
      turns: whether the response is the "last" turn of the assistant, or each in "all" examples.
      enable_thinking: what the template is told.
    """

    render: Render
    whole: bool
    pairs: bool
    turns: str
    enable_thinking: bool

    @classmethod
    def of(cls, config: DataConfig, tokenizer: Tokenizer | None) -> "Conversations":
        """As `config.template` says, by the chat template of a tokenizer, or without one in ChatML.

        ChatML is whole only when that is asked for: nothing there says that a tokenizer has its marks as tokens.
        """
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        return cls(
            _render_chatml if tokenizer is None else tokenizer.render,
            whole=config.template == "whole" or (config.template == "auto" and has_template),
            pairs=config.template != "auto",
            turns=config.turns,
            enable_thinking=config.enable_thinking,
        )

    def examples(self, messages: Any, place: str, first: int = 0) -> list[Example]:
        """Returns the examples of a conversation; each has a turn of the assistant as its response.

        Args:
          messages: see `check_messages`.
          place: where the conversation comes from, for messages.
          first: turns before this one are no responses.

        Raises:
          DataError: for a conversation that is wrong, that the template refuses, or without a turn of the assistant.
        """
        checked = check_messages(messages, place)
        ends = [end for end, turn in enumerate(checked, 1) if end > first and turn["role"] == "assistant"]
        if not ends:
            raise DataError(f"{place}: none of the {len(checked) - first} messages is from the assistant.")
        try:
            return [self._example(checked[:end], place) for end in (ends if self.turns == "all" else ends[-1:])]
        except DataError as error:
            raise DataError(f"{place}: {error}") from error

    def pair(self, prompt: str, response: str, place: str) -> Example:
        """Returns the example of a prompt and a response.

        Raises:
          DataError: when it is to be a conversation and the template refuses it.
        """
        if not self.pairs or not prompt.strip():  # blank ones are counted, not trained on
            return Example(prompt, response)
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return self.examples(turns, place)[0]

    def _example(self, turns: list[dict[str, Any]], place: str) -> Example:
        prompt = self.render(turns[:-1], add_generation_prompt=True, enable_thinking=self.enable_thinking)
        if not self.whole:
            return Example(prompt, turns[-1]["content"])
        rendered = self.render(turns, add_generation_prompt=False, enable_thinking=self.enable_thinking)
        return Example(prompt, turns[-1]["content"], rendered, place)


def _render_chatml(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, enable_thinking: bool) -> str:
    return render_chatml(messages, add_generation_prompt=add_generation_prompt)

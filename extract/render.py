"""From a conversation to token ids and loss mask, through the target's own chat template.

The mask is found on the final rendering of the whole conversation, so templates that rewrite earlier turns are handled:
what is stored is what was tokenised. Turn markers are learned from the template itself by rendering a probe. Knows
nothing of files or of the target's weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .data import DataError, Row

_PROBE = [
    {"role": "user", "content": "qzfirstquestion"},
    {"role": "assistant", "content": "qzfirstanswer"},
    {"role": "user", "content": "qzsecondquestion"},
    {"role": "assistant", "content": "qzsecondanswer"},
]


@dataclass(frozen=True)
class Markers:
    """How a template delimits assistant turns.

    Attributes:
        header: text that opens every assistant turn.
        opening: what the generation prompt adds after the header (an empty think block, say): the target is given it,
            so it is not supervised where a turn begins with it.
        end: text that closes a turn, supervised with it.
    """

    header: str
    opening: str
    end: str


class Renderer:
    """Renders conversations with one tokenizer in one mode.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        thinking: passed to the template as `enable_thinking`.

    Raises:
        DataError: the tokenizer has no chat template, or the template's assistant turns cannot be told apart.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool) -> None:
        if not tokenizer.chat_template:
            raise DataError(f"the target's tokenizer ({tokenizer.name_or_path}) has no chat template")
        if not tokenizer.is_fast:
            raise DataError(
                f"the target's tokenizer ({tokenizer.name_or_path}) has no tokenizer.json: export it as one"
            )
        self._tokenizer = tokenizer
        self._thinking = thinking
        self.mode = f"enable_thinking={str(thinking).lower()}"
        self.markers = self._learn_markers()

    @property
    def fingerprint(self) -> list[str]:
        """Everything that decides what a conversation becomes: the tokenizer, its template and the mode."""
        tokenizer: Any = self._tokenizer
        special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)  # templates may print these
        return [tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), special, self.mode]

    def ids_and_mask(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """Token ids `[n]` int32 and loss mask `[n]` bool of one conversation.

        Raises:
            DataError: the template refuses the conversation, or its turns cannot be found in the rendering.
        """
        assert row.messages is not None
        try:
            text = self._render(row.messages, tools=row.tools)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{row.place}: the chat template refuses this conversation ({error})") from None
        spans = self.spans(text)
        turns = sum(message["role"] == "assistant" for message in row.messages)
        for message in row.messages:
            if self.markers.end in message["content"]:
                raise DataError(f"{row.place}: a turn holds {self.markers.end!r}, with which the template ends turns")
        if len(spans) != turns:
            raise DataError(
                f"{row.place}: {turns} assistant turns, but the rendering has {len(spans)} that open with "
                f"{self.markers.header!r}; it begins {text[:300]!r}"
            )
        try:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except (TypeError, ValueError):
            raise DataError(f"{row.place}: this text cannot be tokenised (is it valid Unicode?)") from None
        starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
        mask = np.zeros(len(starts), bool)
        for start, stop in spans:
            mask |= (starts >= start) & (starts < stop)
        return np.array(encoded["input_ids"], np.int32), mask

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation that awaits the assistant: what a server would be given."""
        text = self._render(messages, add_generation_prompt=True)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Character ranges of what the assistant said in a rendering, end markers included."""
        header, opening, end = self.markers.header, self.markers.opening, self.markers.end
        found = []
        at = text.find(header)
        while at >= 0:
            start = at + len(header)
            if opening and text.startswith(opening, start):
                start += len(opening)
            close = text.find(end, start)
            stop = close + len(end) if close >= 0 else len(text)
            found.append((start, stop))
            at = text.find(header, stop)
        return found

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=self._thinking, **options)
        assert isinstance(text, str)
        return text

    def _learn_markers(self) -> Markers:
        name = self._tokenizer.name_or_path
        try:
            text = self._render(_PROBE)
            question = self._render(_PROBE[:1])
            prompt = self._render(_PROBE[:1], add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"the chat template of {name} cannot render a plain conversation ({error})") from None
        q1, a1, q2, a2 = (text.find(turn["content"]) for turn in _PROBE)
        failure = DataError(
            f"cannot tell what the assistant says in the chat template of {name}: "
            f"no marker opens and closes its turns. Rendered example: {text!r}"
        )
        if not 0 <= q1 < a1 < q2 < a2 or not prompt.startswith(question):
            raise failure
        generation = prompt[len(question) :]
        after_q1, after_q2 = q1 + len(_PROBE[0]["content"]), q2 + len(_PROBE[2]["content"])
        after_a1, after_a2 = a1 + len(_PROBE[1]["content"]), a2 + len(_PROBE[3]["content"])
        # The longest opening that the generation prompt and both turns share; the user's own closing stands before it.
        header = generation
        for between in (text[after_q1:a1], text[after_q2:a2]):
            while header and header not in between:
                header = header[:-1]
        end = _common_prefix(text[after_a1:q2], text[after_a2:]).strip()
        if not header.strip() or not end or header in text[:after_q1]:
            raise failure
        return Markers(header, generation[len(header) :], end)


def _common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]

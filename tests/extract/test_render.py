"""The loss mask, on the rendering that is stored: every assistant turn, whatever the template does to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import BUNDLED
from transformers import PreTrainedTokenizerBase

from dflash_offline.extract.data import DataError, Row
from dflash_offline.extract.render import Renderer
from dflash_offline.extract.target import load_tokenizer

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_MARKERS = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(BUNDLED / "target")


def row(*said: str) -> Row:
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return Row("data.jsonl, line 1", "tag", None, messages=messages)


def supervised_texts(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The supervised runs, decoded."""
    found, run = [], []
    for token, flag in [*zip(ids.tolist(), mask.tolist(), strict=True), (0, False)]:
        if flag:
            run.append(token)
        elif run:
            found.append(str(tokenizer.decode(run)))
            run = []
    return found


def test_what_the_assistant_said_and_how_it_ended(tokenizer: PreTrainedTokenizerBase) -> None:
    ids, mask = Renderer(tokenizer, thinking=False).ids_and_mask(row("a question", "an answer", "more?", "no\n\nmore"))
    assert supervised_texts(tokenizer, ids, mask) == ["an answer<|im_end|>", "no\n\nmore<|im_end|>"]


def test_a_turn_begins_where_a_server_would_begin_to_decode(tokenizer: PreTrainedTokenizerBase) -> None:
    for thinking in (False, True):
        renderer = Renderer(tokenizer, thinking)
        said = row("a question", "<think>\nhm\n</think>\n\nan answer" if thinking else "an answer")
        assert said.messages is not None
        ids, mask = renderer.ids_and_mask(said)
        prompt = renderer.prompt_ids(said.messages[:1])
        assert ids[: len(prompt)].tolist() == prompt
        assert not mask[: len(prompt)].any()
        assert mask[len(prompt)]


def test_thinking_is_supervised_where_the_template_keeps_it(tokenizer: PreTrainedTokenizerBase) -> None:
    said = row("q", "<think>\nfirst\n</think>\n\na", "q", "<think>\nsecond\n</think>\n\nb")
    ids, mask = Renderer(tokenizer, thinking=True).ids_and_mask(said)
    # The template drops the thoughts of the earlier turn: they are neither stored nor supervised.
    assert supervised_texts(tokenizer, ids, mask) == ["a<|im_end|>", "second\n</think>\n\nb<|im_end|>"]
    assert "first" not in str(tokenizer.decode(ids))


def test_ten_turns_are_one_document_with_ten_supervised_runs(tokenizer: PreTrainedTokenizerBase) -> None:
    said = [text for n in range(10) for text in (f"question {n}", f"answer {n}")]
    ids, mask = Renderer(tokenizer, thinking=False).ids_and_mask(row(*said))
    assert supervised_texts(tokenizer, ids, mask) == [f"answer {n}<|im_end|>" for n in range(10)]


def test_a_template_that_strips_text(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = PLAIN
    ids, mask = Renderer(tokenizer, thinking=False).ids_and_mask(row("q", "   spaced out   "))
    assert supervised_texts(tokenizer, ids, mask) == ["spaced out<|im_end|>"]


def test_text_in_several_bytes_a_character(tokenizer: PreTrainedTokenizerBase) -> None:
    ids, mask = Renderer(tokenizer, thinking=False).ids_and_mask(row("日本", "héllo → 世界 🎉"))
    assert supervised_texts(tokenizer, ids, mask) == ["héllo → 世界 🎉<|im_end|>"]


def test_a_template_without_markers_is_refused_with_an_example(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = NO_MARKERS
    with pytest.raises(DataError, match="cannot tell what the assistant says") as caught:
        Renderer(tokenizer, thinking=False)
    assert "qzfirstanswer" in str(caught.value)
    assert str(BUNDLED / "target") in str(caught.value)


def test_a_target_without_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Renderer(tokenizer, thinking=False)


def test_text_that_holds_the_markers_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = Renderer(tokenizer, thinking=False)
    with pytest.raises(DataError, match=r"line 1: 1 assistant turns, but the rendering has 2"):
        renderer.ids_and_mask(row("say <|im_start|>assistant\nme", "no"))
    with pytest.raises(DataError, match=r"line 1: a turn holds '<\|im_end\|>'"):
        renderer.ids_and_mask(row("q", "an answer<|im_end|> that goes on"))
    with pytest.raises(DataError, match=r"line 1: this text cannot be tokenised"):
        renderer.ids_and_mask(row("q", "half a surrogate \ud800"))


def test_what_the_template_refuses_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    said = Row(
        "d, line 7", "t", None, messages=[{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]
    )
    with pytest.raises(DataError, match=r"d, line 7: the chat template refuses"):
        Renderer(tokenizer, thinking=False).ids_and_mask(said)

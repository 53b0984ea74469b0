"""Text to token ids and back, with a checkpoint folder's tokenizer. Without PyTorch and without the network."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specfold_jax.models.checkpoint import resolve_folder
from specfold_jax.values import conforming, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DIGITS = 10  # of an int32
_OTHER_FILES = ("tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(name: str | os.PathLike[str]) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint folder, or of a model inside the package ("tiny"). Raises ValueError if it holds none."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch, which tokenizers do not need
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds, and decoding does without

    folder = resolve_folder(name)
    try:
        if (folder / "tokenizer.json").is_file():  # not by AutoTokenizer, which has to know the config.json
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        if any((folder / file).is_file() for file in _OTHER_FILES):
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises many kinds, the Rust side bare Exceptions
        raise ValueError(f"{folder}: the tokenizer cannot be loaded ({str(error).strip().splitlines()[0]})") from error
    raise ValueError(f"{folder}: no tokenizer; the folder must hold tokenizer.json, or prompts must be given as token ids")


def encode(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], raw: bool = False) -> list[list[int]]:
    """Token ids of each prompt. If the tokenizer has a chat template, a prompt becomes a user turn of it, unless `raw`.

    Raises ValueError naming a prompt that is empty or no text.
    """
    for index, prompt in enumerate(prompts):
        if not conforming(f"prompt {index}", prompt, str).strip():
            raise ValueError(f"prompt {index} is empty; it must hold text")
    if raw or not tokenizer.chat_template:
        return [list(tokenizer(prompt).input_ids) for prompt in prompts]
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    # One text gives one flat list. The stubs do not know that.
    return [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]  # type: ignore[arg-type]


def parse_ids(prompts: Sequence[str]) -> list[list[int]]:
    """Prompts that are token ids separated by white space. Raises ValueError naming the prompt and the word."""
    parsed = []
    for index, prompt in enumerate(prompts):
        if wrong := [word for word in prompt.split() if not word.isdecimal() or len(word) > _DIGITS]:
            raise ValueError(f"prompt {index}: {show(wrong[0])} must be a token id, a whole number from 0 with at most {_DIGITS} digits")
        parsed.append([int(word) for word in prompt.split()])
    return parsed


def decode_text(tokenizer: "PreTrainedTokenizerBase | None", ids: Sequence[int]) -> str:
    """The text of generated ids without special tokens. Without a tokenizer, the ids themselves."""
    if tokenizer is None:
        return " ".join(str(int(i)) for i in ids)
    return str(tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)).strip()

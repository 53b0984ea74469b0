"""The tiny model's tokenizer: byte-level BPE in which every digit is a token of its own. It is saved as a transformers folder."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, ANSWER, END, MASK = "<|pad|>", "<|answer|>", "<|end|>", "|<MASK>|"
VOCAB = 1536
# A user turn is the question and the separator; the model's turn is the answer and the stop token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['content'] -}}{{- '<|answer|>' if message['role'] == 'user' else '<|end|>' -}}"
    "{%- endfor -%}"
)


def train_tokenizer(texts: Iterable[str], vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Trains the tokenizer. Ids 0 .. 3 are pad, answer, end and mask. `vocab` counts these and the 256 bytes too.

    Raises ValueError if `texts` hold too few different words for `vocab` tokens, or if `vocab` is too small for the bytes.
    """
    if vocab < 260:
        raise ValueError(f"{vocab=} must be at least 260: four special tokens and the 256 bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, ANSWER, END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, {vocab=} needs more text (or must be smaller)")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[ANSWER],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode_plain(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, on all cores, without a template. The name of a special token becomes its id."""
    return [e.ids for e in tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

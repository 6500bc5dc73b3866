"""B11: text whose tokens are as many as asked for, with a tokenizer whose merges cross what was put together."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from harness.backends.http.prompt_text import text_of


def trained(bos: bool):
    """A byte-level BPE of 400 entries, trained on text with many repeated pairs."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteLevel()
    rng = random.Random(0)
    words = ["".join(rng.choice("abcde") for _ in range(rng.randint(1, 6))) for _ in range(400)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(rng.choices(words, k=40)) for _ in range(60)], trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>")


@pytest.mark.parametrize("bos", [True, False])
def test_b11_every_prompt_has_the_length_asked_for(bos):
    tokenizer, rng = trained(bos), random.Random(1)
    changed = 0
    for n in (1, 7, 32, 128):
        for _ in range(50):
            ids = [rng.randrange(1, 400) for _ in range(n)]
            text = text_of(tokenizer, ids)
            assert len(tokenizer(text)["input_ids"]) == n  # special tokens counted in
            changed += len(tokenizer(tokenizer.decode(ids))["input_ids"]) != n
    assert changed > 100  # without the search most would have had another length


def test_a_shared_beginning_stays_shared():
    """Of whole characters: a lone byte is decoded to a replacement mark of three."""
    tokenizer, rng = trained(bos=True), random.Random(2)
    shared = [rng.randrange(257, 400) for _ in range(40)]
    texts = [text_of(tokenizer, shared + [rng.randrange(257, 400) for _ in range(30)]) for _ in range(3)]
    start = tokenizer.decode(shared)[:-4]
    assert all(t.startswith(start) for t in texts)
    assert len(set(texts)) == 3


def test_a_tokenizer_that_cannot_says_so():
    class Stuck:
        def decode(self, ids, skip_special_tokens=False):
            return "x" * len(ids)

        def __call__(self, text):
            return {"input_ids": [0] * 3}

    with pytest.raises(ValueError, match="no text of 5 tokens"):
        text_of(Stuck(), [1, 2, 3, 4, 5])

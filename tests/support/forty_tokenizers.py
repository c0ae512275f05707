"""Forty tokenizers of every kind, and tiny models of them: WordPiece, Unigram, BPE and byte-level, each with
ten combinations of begin, end and padding tokens, stored settings and chat templates."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

KINDS = ("wordpiece", "unigram", "bpe", "bytes")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,"
CHATML = "{% for m in messages %}<turn>{{ m.role }} {{ m.content }}<over>{% endfor %}"
WITH_GENERATION_PROMPT = CHATML + "{% if add_generation_prompt %}<turn>assistant {% endif %}"
WITH_BEGIN = "<s>" + WITH_GENERATION_PROMPT
CONTEXT = 64


@dataclass(frozen=True)
class Variant:
    """What a tokenizer has beside its vocabulary."""

    begin: bool = True
    end: bool = True
    adds_begin: bool = False
    adds_end: bool = False
    pad: str | None = "<pad>"
    over_is_special: bool = True
    """Whether the tokenizer calls the token special that ends a turn of its template."""
    stores: bool = False
    """Whether tokenizer.json holds padding and truncation, of a call before it was saved."""
    template: str | None = WITH_GENERATION_PROMPT


VARIANTS = (
    Variant(),
    Variant(adds_begin=True),
    Variant(adds_begin=True, adds_end=True, over_is_special=False),
    Variant(adds_end=True, stores=True),
    Variant(begin=False, over_is_special=False, template=CHATML),
    Variant(begin=False, end=False, pad=None),
    Variant(adds_begin=True, pad="</s>", stores=True, template=WITH_BEGIN),
    Variant(end=False, adds_begin=True, over_is_special=False),
    Variant(adds_begin=True, adds_end=True, pad="</s>", stores=True, template=None),
    Variant(begin=False, adds_end=True, template=None, over_is_special=False),
)
CASES = {f"{kind}-{number}": (kind, variant) for kind in KINDS for number, variant in enumerate(VARIANTS)}


def base(kind: str) -> Tokenizer:
    """A tokenizer of single letters, with a few longer pieces."""
    words = ["<unk>", *LETTERS]
    if kind == "wordpiece":
        vocabulary = {
            token: i for i, token in enumerate([*words, *(f"##{sign}" for sign in LETTERS), "##an"])
        }
        made = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    elif kind == "unigram":
        scored = [*((token, -3.0) for token in words), ("\u2581", -2.0), ("an", -4.0)]
        made = Tokenizer(models.Unigram(scored, unk_id=0))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "bpe":
        vocabulary = {token: i for i, token in enumerate([*words, "\u2581", "an"])}
        made = Tokenizer(models.BPE(vocabulary, [("a", "n")], unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return made


def save_tokenizer(folder: Path, kind: str, variant: Variant) -> int:
    """Write the tokenizer's files. Returns the number of its ids."""
    folder.mkdir(parents=True, exist_ok=True)
    made = base(kind)
    named = {"bos_token": "<s>"} if variant.begin else {}
    named |= {"eos_token": "</s>"} if variant.end else {}
    named |= {"pad_token": variant.pad} if variant.pad else {}
    made.add_special_tokens([*dict.fromkeys([*named.values(), *(["<s>"] if variant.adds_begin else [])])])
    if variant.adds_end and not variant.end:
        made.add_special_tokens(["</s>"])
    if variant.template:
        made.add_tokens(
            [
                AddedToken("<turn>", special=False, normalized=False),
                AddedToken("<over>", special=variant.over_is_special, normalized=False),
            ]
        )
    _add_affixes(made, variant)
    if variant.stores:
        made.enable_padding(direction="left", pad_id=0, pad_token="<pad>")
        made.enable_truncation(max_length=3)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    settings |= {"chat_template": variant.template} if variant.template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made.get_vocab_size(with_added_tokens=True)


def _add_affixes(made: Tokenizer, variant: Variant) -> None:
    wanted = [*(["<s>"] if variant.adds_begin else []), *(["</s>"] if variant.adds_end else [])]
    if wanted:
        before, after = ("<s>:0 " * variant.adds_begin), (" </s>:0" * variant.adds_end)
        ids = [(token, made.token_to_id(token)) for token in wanted]
        made.post_processor = processors.TemplateProcessing(f"{before}$A:0{after}", None, ids)

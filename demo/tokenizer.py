"""o200k_harmony as tokenizer files for transformers and vLLM, from the vocabulary that oss-harmony carries.

Merges are recovered from the ranks as transformers' TikTokenConverter does: every way to split a token in two known
tokens, in the order of the parts' ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo.render import encoding

TEXT = 199_998
VOCABULARY = 201_088
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The word pattern of o200k_base, from tiktoken's public definition.
PATTERN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def alphabet() -> list[str]:
    """GPT-2's printable replacement for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def _bpe() -> tuple[dict[str, int], list[list[str]]]:
    letters = alphabet()
    decode = encoding()._inner.decode_bytes
    ranks = {bytes(decode([i])): i for i in range(TEXT)}
    spelled = {token: "".join([letters[b] for b in token]) for token in ranks}
    merges: list[list[str]] = []
    for token in ranks:
        splits = [
            (ranks[token[:i]], ranks[token[i:]], i)
            for i in range(1, len(token))
            if token[:i] in ranks and token[i:] in ranks
        ]
        merges += [[spelled[token[:i]], spelled[token[i:]]] for _, _, i in sorted(splits)]
    return {spelled[token]: rank for token, rank in ranks.items()}, merges


def _control() -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": i, "content": encoding().decode([i]), **flags} for i in range(TEXT, VOCABULARY)]


def tokenizer_json() -> str:
    """tokenizer.json, the same text every time."""
    vocabulary, merges = _bpe()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": True, "vocab": vocabulary, "merges": merges,
    }  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _control(), "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level, "decoder": level, "model": model,
    }  # fmt: skip
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def write(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json into `folder`."""
    folder.joinpath("tokenizer.json").write_text(tokenizer_json(), "utf-8")
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131_072,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    folder.joinpath("special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n", "utf-8")

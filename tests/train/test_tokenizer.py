"""Tokenizers: round trips, document ends, and files that are no tokenizers."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.train._corpus import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    load_corpus,
    load_tokenizer,
)
from fivefold.train._text_files import warning_of
from fivefold.train.config import DataConfig

texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture
def save(tmp_path):
    """Write a word-level tokenizer file by hand, as the library itself would."""

    def save_vocabulary(vocabulary, *, added=()):
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": number, "content": name, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False, "special": True}
                for name, number in added
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }  # fmt: skip
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(content))
        return path

    return save_vocabulary


@given(texts)
def test_bytes_round_trip_and_equal_utf8(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert np.array_equal(tokens, tokenizer.encode(text.encode()))
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, tokenizer.document_end]) == text


def test_no_text_has_the_document_end_of_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(bytes(range(256))).max() < tokenizer.document_end
    assert tokenizer.document_end == tokenizer.vocab_size - 1 == 256


def test_a_cut_character_decodes_to_the_replacement():
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


def test_a_tokenizers_file_is_read(save):
    path = save({"<unk>": 0, "red": 1, "blue": 2})
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("red blue red").tolist() == [1, 2, 1]
    assert tokenizer.encode(b"red green").tolist() == [1, 0]
    assert tokenizer.decode([1, tokenizer.document_end, 2]) == "red blue"
    # The file has no end token, so one is added after the last.
    assert (tokenizer.document_end, tokenizer.vocab_size) == (3, 4)
    assert load_tokenizer(str(path.parent)).fingerprint == tokenizer.fingerprint


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A tokenizer of bytes and their merges, trained by the library; and its text."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("byte_level")
    (folder / "text").mkdir()
    for number in range(8):
        line = f"the quick brown fox {number} jumps over the lazy dog.\n"
        (folder / "text" / f"{number}.txt").write_text(line * 60)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    made.train([str(path) for path in (folder / "text").iterdir()], trainer)
    return made, folder


def corpus_of(tokenizer, folder, cache):
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    data = DataConfig(
        path=str(folder / "text"), cache=str(cache), tokenizer=str(path), sequence_length=16
    )
    return load_corpus(data, load_tokenizer(str(path)))


def truncating(tokenizer):
    tokenizer.enable_truncation(16)


def padding(tokenizer):
    tokenizer.enable_padding(length=5000, pad_id=0)


def dropping(tokenizer):
    tokenizer.model.dropout = 0.5


@pytest.mark.parametrize("option", [truncating, padding, dropping])
def test_what_a_file_does_to_batches_does_not_reach_the_corpus(byte_level, tmp_path, option):
    tokenizer, folder = byte_level
    plain = corpus_of(tokenizer, folder, tmp_path)
    changed = type(tokenizer).from_str(tokenizer.to_str())
    option(changed)
    found = corpus_of(changed, folder, tmp_path)
    assert np.array_equal(found.train, plain.train)
    assert np.array_equal(found.validation, plain.validation)
    assert found.account["lost_in_tokens_bytes"] == 0
    assert found.fingerprint != plain.fingerprint  # no cache of before, which was cut or padded


def test_a_tokenizer_that_loses_text_is_counted_and_one_that_loses_most_refused(
    byte_level, tmp_path
):
    tokenizer, folder = byte_level
    lower = type(tokenizer).from_str(tokenizer.to_str())
    lower.normalizer = importlib.import_module("tokenizers").normalizers.Replace("fox", "")
    account = corpus_of(lower, folder, tmp_path).account
    assert account["lost_in_tokens_bytes"] == 8 * 60 * len("fox")
    assert "do not come back from their tokens" in warning_of(account)
    words = importlib.import_module("tokenizers")
    most = words.Tokenizer(words.models.WordLevel({"?": 0, "fox": 1}, "?"))
    most.pre_tokenizer = words.pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match="does not keep the text"):
        corpus_of(most, folder, tmp_path)


def test_the_end_token_of_the_file_is_used(save):
    path = save({"<unk>": 0, "red": 1}, added=[("<|endoftext|>", 2)])
    tokenizer = HuggingFaceTokenizer(path)
    assert (tokenizer.document_end, tokenizer.vocab_size) == (2, 3)
    assert tokenizer.decode([1, 2]) == "red"


def test_gaps_in_the_numbers_do_not_make_the_vocabulary_too_small(save):
    tokenizer = HuggingFaceTokenizer(save({"<unk>": 0, "red": 70}))
    assert tokenizer.encode("red").tolist() == [70]
    assert (tokenizer.document_end, tokenizer.vocab_size) == (71, 72)


def test_the_fingerprint_follows_the_content(save):
    first = HuggingFaceTokenizer(save({"<unk>": 0, "red": 1})).fingerprint
    second = HuggingFaceTokenizer(save({"<unk>": 0, "blue": 1})).fingerprint
    assert len({first, second, ByteTokenizer().fingerprint}) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"{not json", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"some": "thing"}', "not a file of the tokenizers library"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error_with_a_hint(tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as caught:
        load_tokenizer(str(path))
    assert "tokenizer.json" in caught.value.hint


def test_without_the_package_the_error_says_what_to_install(save, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match="needs the package 'tokenizers'") as caught:
        load_tokenizer(str(save({"<unk>": 0})))
    assert "fivefold[tokenizers]" in caught.value.hint

import json
import re

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from spec_jax.models.checkpoint import CheckpointError
from spec_jax.models.gguf_file import read_gguf
from spec_jax.models.gguf_tokenizer import build_tokenizer
from spec_jax.models.tokenizer import _BYTE_SPELLING, StreamDecoder, Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12:30; they'll pay $1,234.50 (or €9).",
    "  two  spaces   three    four\n\n\n  lines\r\n\tand\ttabs \t\n end  ",
    "a  1  22 333 4444 ١٢٣ ⅧⅨ ½",
    "naïve café ZÜRICH straße İstanbul — “quotes” … 日本語のテキスト 한국어 עברית हिन्दी ไทย",
    "😀👩‍👩‍👧‍👦🇩🇪 ✓ \U0001f9ff e\u0301 \u200b\ufeff\ufffd \x00\x07",
    "def f(x):\n    if x['a'] != 3:\n        return {**x}  # ok\n\treturn lambda y: y**2\n",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|> <|im_start|>x<|im_en<|endoftext|>|>",
    "\u2581under\u2581 <0x41> <unk> ĠĊ",
]


@pytest.fixture(scope="module")
def metadata(smollm2):
    """SmolLM2's metadata."""
    return read_gguf(smollm2).metadata


@pytest.fixture(scope="module")
def real(metadata):
    return build_tokenizer(metadata)


@pytest.fixture(scope="module")
def shortened(metadata):
    """The same with the first 2,000 merges only, and the tokens that they make."""
    merges = metadata["tokenizer.ggml.merges"][:2000]
    parts = {part for merge in merges for part in (*merge.split(" "), merge.replace(" ", ""))}
    kinds = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].tolist(), strict=True))
    kinds = {token: kind for token, kind in kinds.items() if kind == 3 or len(token) == 1 or token in parts}
    keys = {"model": "gpt2", "pre": "smollm", "bos_token_id": 1, "eos_token_id": 2, "merges": merges}
    keys |= {"tokens": list(kinds), "token_type": list(kinds.values())}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.fixture
def tokenizer(backend):
    return Tokenizer(backend, {"bos_token": "<|im_start|>"}, "{{ bos_token }}{{ messages[0]['content'] }}", (2,))


def _definition(metadata, text):
    """Ids by the definition: special tokens, digits apart, GPT-2's words, then the earliest merge, again and again."""
    regex = pytest.importorskip("regex", reason="Unicode classes")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    number = {token: i for i, token in enumerate(tokens)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {b: chr(b) for b in printable} | {
        b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)
    }
    special = "|".join(regex.escape(t) for t, kind in zip(tokens, types, strict=True) if kind == 3)
    words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    ids = []
    for part in regex.split(f"({special})", text):
        if regex.fullmatch(special, part):
            ids.append(number[part])
            continue
        for piece in regex.findall(r"\p{N}|\P{N}+", part):
            for word in words.findall(piece):
                symbols = [spelling[byte] for byte in word.encode()]
                while pairs := [(rank[p], i) for i, p in enumerate(zip(symbols, symbols[1:])) if p in rank]:  # noqa: B905
                    at = min(pairs)[1]
                    symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
                ids += [number[symbol] for symbol in symbols]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_follow_the_definition(text, real, metadata):
    ids = real.encode(text)
    assert ids == _definition(metadata, text)
    assert real.decode(ids) == text
    assert real.encode(text, special=False) == ids


def test_smollm2_ids_equal_those_of_transformers(real, metadata):
    transformers = pytest.importorskip("transformers", reason="the reference")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    reference = transformers.GPT2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges,
        additional_special_tokens=[token for token, kind in zip(tokens, types, strict=True) if kind == 3],
        chat_template=metadata["tokenizer.chat_template"],
    )  # fmt: skip
    for text in TEXTS:
        if not any(char.isnumeric() for char in text):  # in this vocabulary every digit stands alone, not in GPT-2's
            ids = real.encode(text)
            assert ids == reference(text)["input_ids"]
            assert real.decode(ids, skip_special=True) == reference.decode(ids, skip_special_tokens=True)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "x"},
    ]
    for prompt in (True, False):
        assert real.apply_chat(messages, prompt) == reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
    assert {text: real.token_id(text) for text in tokens} == reference.get_vocab()
    assert real.vocab_size == len(reference)


def test_byte_spelling_is_that_of_the_library():
    assert sorted(_BYTE_SPELLING.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for text in (*map(chr, range(128)), *"é✓😀\U00040000"):
        assert spell(text)[0][0] == "".join(_BYTE_SPELLING[byte] for byte in text.encode())


@hypothesis.given(st.text())
@hypothesis.example("\x04")
@hypothesis.example("\U00040000")
def test_smollm2_loses_nothing(real, text):
    """The vocabulary lacks some bytes; text with them is refused, any other comes back."""
    lost = [c for c in text if c in "\x04\x06\x13\x14\x16\x1d" or "\U00040000" <= c <= "\U000bffff"]
    if lost:
        with pytest.raises(ValueError, match=f"^text holds {re.escape(repr(lost[0]))}"):
            real.encode(text)
    else:
        assert real.decode(real.encode(text)) == text


def _build(metadata, **changes):
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    changes = {key: np.asarray(v) if isinstance(v, list) and type(v[0]) is int else v for key, v in changes.items()}
    tokenizer = build_tokenizer(metadata | changes)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_pre_tokenizers_cut_as_transformers_does(pre, write_gguf, shortened):
    transformers = pytest.importorskip("transformers", reason="the reference")
    pytest.importorskip("torch", reason="transformers reads GGUF with it")
    ours = _build(shortened, pre=pre, token_type=shortened["tokenizer.ggml.token_type"])
    path = write_gguf(metadata=shortened | {"tokenizer.ggml.pre": pre}, weights={})
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        if pre == "qwen2":
            text = text.replace("e\u0301", "é")  # ours composes characters as Qwen2's own tokenizer does
        if pre != "smollm" or not any(char.isnumeric() for char in text):
            assert ours.encode(text, special=False) == reference(text, add_special_tokens=False)["input_ids"]


def test_qwen2_composes_characters(metadata):
    tokenizer = _build(metadata, pre="qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_bos_and_eos_are_put_around_a_text(shortened):
    types = shortened["tokenizer.ggml.token_type"]
    ids = lambda **changes: _build(shortened, token_type=types, **changes).encode("!")  # noqa: E731
    assert ids() == ids(add_bos_token=False) == [17]
    assert ids(add_bos_token=True) == [1, 17]
    assert ids(add_bos_token=True, add_eos_token=True) == [1, 17, 2]
    assert ids(pre="llama-bpe") == [1, 17], "llama.cpp's default for this kind"


def _sentencepiece_metadata(pieces, scores, types):
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.asarray(scores, np.float32),
        "tokenizer.ggml.token_type": np.asarray(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture(scope="module")
def pieces():
    """A small SentencePiece vocabulary: control, bytes, then pieces whose scores fall with their number."""
    words = [
        "▁",
        *"abcdehilnorstw.,",
        "▁t",
        "he",
        "in",
        "▁the",
        "er",
        "▁a",
        "▁▁",
        "on",
        "▁in",
        "the",
        "▁▁▁▁",
        "hel",
        "lo",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, "hello", "▁hello"]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    return tokens, [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)], types


@pytest.fixture(scope="module")
def sentencepiece(pieces):
    return build_tokenizer(_sentencepiece_metadata(*pieces))


def test_sentencepiece_ids_equal_those_of_transformers(pieces, sentencepiece):
    transformers = pytest.importorskip("transformers", reason="the reference")
    tokens, scores, types = pieces
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = transformers.tokenization_utils_base.generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    reference = transformers.LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=False)
    for text in [text.strip() for text in TEXTS if "unk" not in text] + ["hello the other in", "the hello</s>"]:
        ids = sentencepiece.encode(text)
        assert ids == reference(text, add_special_tokens=False)["input_ids"]
        assert sentencepiece.decode(ids) == text == reference.decode(ids)


def test_sentencepiece_ids_equal_those_of_sentencepiece():
    spm = pytest.importorskip("sentencepiece", reason="the reference")
    import io

    corpus, model = [tokenizers.__doc__ or "", *(name * 3 for name in dir(np)), *TEXTS] * 4, io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=model, vocab_size=700, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    reference = spm.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = (reference.is_unknown, reference.is_control, reference.is_unused, reference.is_byte)
    numbers = range(reference.vocab_size())
    types = [next((t for t, kind in zip((2, 3, 5, 6), kinds, strict=True) if kind(i)), 1) for i in numbers]
    ours = build_tokenizer(
        _sentencepiece_metadata(
            [reference.id_to_piece(i) for i in numbers], [reference.get_score(i) for i in numbers], types
        )
    )
    assert ours is not None
    for text in [text for text in TEXTS if "<" not in text and "\0" not in text] + corpus[:300]:
        ids = ours.encode(text)
        assert ids == reference.encode(text)
        assert ours.decode(ids) == reference.decode(ids)


def test_sentencepiece_options(pieces):
    metadata = _sentencepiece_metadata(*pieces)
    build = lambda **changes: build_tokenizer(metadata | {f"tokenizer.ggml.{k}": v for k, v in changes.items()})  # noqa: E731
    plain, bare, framed = build(), build(add_space_prefix=False), build(add_bos_token=True, add_eos_token=True)
    assert plain and bare and framed
    assert plain.encode("the") == [plain.token_id("▁the")]
    assert plain.encode("the<s>the") == [plain.token_id("▁the"), 1, plain.token_id("▁the")], "as llama.cpp does"
    assert bare.encode("the") == [bare.token_id("the")]
    assert bare.decode(bare.encode(" the")) == " the"
    assert framed.encode("the") == [1, plain.token_id("▁the"), 2]
    for changes, words in (
        ({"scores": None}, "scores is None"),
        ({"scores": np.zeros(3, np.float32)}, "scores"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"tokens": [*pieces[0][:-1], "x" * 10**6]}, "at most 512 characters"),
        ({"tokens": [*pieces[0][:-1], "the"]}, "a token twice"),
    ):
        with pytest.raises(CheckpointError, match=words):
            build(**changes)


def test_metadata_without_a_tokenizer():
    assert build_tokenizer({}) is None
    assert build_tokenizer({"tokenizer.ggml.model": "no_vocab"}) is None


def test_unused_rows_are_no_tokens(shortened):
    tokens, types = shortened["tokenizer.ggml.tokens"], shortened["tokenizer.ggml.token_type"]
    plain = _build(shortened, token_type=types)
    padded = _build(shortened, tokens=[*tokens, "[PAD1]", "[PAD2]"], token_type=[*types, 5, 5])
    assert padded.vocab_size == plain.vocab_size == len(tokens)
    assert padded.fingerprint() == plain.fingerprint()
    assert padded.decode([17, len(tokens) + 1]) == "!"


def test_which_tokens_are_special(shortened):
    types = list(shortened["tokenizer.ggml.token_type"])
    types[0], types[19] = 1, 4
    tokenizer = _build(shortened, token_type=types, eos_token_id=0, padding_token_id=18, unknown_token_id=17)
    special = {i: token.special for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    assert special == dict.fromkeys(range(17), True) | {19: False}, "control, named as an end, user-defined"


def test_fingerprint(backend, tokenizer):
    again = Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str()))
    assert again.fingerprint() == tokenizer.fingerprint()
    again.backend.add_tokens(["new"])
    assert again.fingerprint() != tokenizer.fingerprint()
    swapped = lambda a, b: Tokenizer(tokenizers.Tokenizer(models.BPE({"a": a, "b": b}, []))).fingerprint()  # noqa: E731
    assert swapped(0, 1) != swapped(1, 0)


def test_token_id(tokenizer):
    assert tokenizer.token_id("<|im_end|>") == 2
    with pytest.raises(ValueError, match="'zebra', which is no token"):
        tokenizer.token_id("zebra")


def test_decode(tokenizer):
    ids = tokenizer.encode("<|im_start|>the tin<|im_end|>")
    assert tokenizer.decode(ids, skip_special=True) == "the tin"
    assert tokenizer.decode(np.asarray(ids)) == "<|im_start|>the tin<|im_end|>"
    with pytest.raises(ValueError, match="ids holds -1"):
        tokenizer.decode([3, -1])


def test_truncation_and_padding_of_a_saved_tokenizer_are_turned_off(backend):
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(Tokenizer(backend).encode("abcdef")) == 6


def _directory(tmp_path, backend, config=None, template=None):
    backend.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return Tokenizer.from_directory(tmp_path)


def test_from_directory(tmp_path, backend):
    assert _directory(tmp_path, backend).eos_token_ids == ()
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "chat_template": "{{ bos_token }}one",
    }
    tokenizer = _directory(tmp_path, backend, config)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.apply_chat([]) == "<|im_start|>one"
    assert tokenizer.encode("a") == [tokenizer.token_id("a")]
    framed = _directory(tmp_path, backend, config | {"add_bos_token": True, "add_eos_token": True})
    assert framed.encode("a") == [1, tokenizer.token_id("a"), 2]
    assert framed.encode("a", special=False) == [tokenizer.token_id("a")]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert _directory(tmp_path, backend, {"chat_template": named}).apply_chat([]) == "yes"
    assert _directory(tmp_path, backend, config, "two").apply_chat([]) == "two"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"eos_token": "<none>"}, "eos_token is '<none>', which tokenizer.json does not hold"),
        ({"eos_token": 7}, "eos_token is 7"),
        ({"pad_token": "\ud800"}, "pad_token is"),
        ({"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}, "token 5 is '<|im_end|>'"),
        ({"added_tokens_decoder": {"999": {"content": "<new>"}}}, "token 999 is '<new>'"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"0": 5}}, "added_tokens_decoder is 5"),
        ({"chat_template": 5}, "chat_template is 5"),
        ({"chat_template": [{"name": "tool_use"}, 3]}, "chat_template"),
    ],
)
def test_contradictory_files(config, words, tmp_path, backend):
    with pytest.raises(CheckpointError, match=words):
        _directory(tmp_path, backend, config)


def test_a_panic_of_the_library_is_an_error(tmp_path, backend):
    fields = json.loads(backend.to_str())
    fields["model"]["continuing_subword_prefix"] = "x" * 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="tokenizer.json: "):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_of_transformers_is_the_same_here(tmp_path, backend):
    transformers = pytest.importorskip("transformers", reason="the reference")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", add_bos_token=True,
        chat_template="{% for m in messages %}{{ bos_token + m.content | tojson }}{% endfor %}",
    )  # fmt: skip
    reference.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference(text)["input_ids"])
    messages = [{"role": "user", "content": 'é<"x">'}]
    assert tokenizer.apply_chat(messages) == reference.apply_chat_template(messages, tokenize=False)


def test_chat_templates(tokenizer, backend):
    assert tokenizer.apply_chat([{"role": "user", "content": "Hi"}]) == "<|im_start|>Hi"
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(backend).apply_chat([])
    with pytest.raises(TypeError, match="'role'"):
        tokenizer.apply_chat([{"content": "Hi"}])
    with pytest.raises(TypeError, match="'role'"):
        tokenizer.apply_chat([{"role": 3}])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", "a<b"),
        ("{{ messages | tojson(indent=None) }}", '[{"role": "user", "content": "a<b"}]'),
        ("{{ messages[0].nothing }}{{ extra }}{{ add_generation_prompt }}", "7True"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_what_templates_may_use(template, text, backend):
    tokenizer = Tokenizer(backend, chat_template=template)
    assert tokenizer.apply_chat([{"role": "user", "content": "a<b"}], extra=7) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__name__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ namespace(__html__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages[7].role.x }}",
        "{% for",
        "{{ raise_exception('only system messages') }}",
    ],
)
def test_what_templates_may_not_do(template, backend):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match="chat template failed"):
        Tokenizer(backend, chat_template=template).apply_chat(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def _streamed(tokenizer, ids, skip_special=False):
    decoder = StreamDecoder(tokenizer, skip_special)
    return [*(decoder.push([i]) for i in ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_has_whole_characters_only(text, real):
    for tokenizer_text in (text, text.replace("\ufffd", "")):
        pieces = _streamed(real, real.encode(tokenizer_text))
        assert "".join(pieces) == tokenizer_text
    assert not any("\ufffd" in piece for piece in pieces)


@hypothesis.given(st.lists(st.integers(0, 275) | st.just(49_200), max_size=40), st.booleans())
def test_a_stream_of_any_bytes_is_their_decoding(real, ids, skip_special):
    assert "".join(_streamed(real, ids, skip_special)) == real.decode(ids, skip_special)


@hypothesis.given(st.data(), st.booleans())
def test_a_sentencepiece_stream_is_the_decoding(sentencepiece, data, skip_special):
    tokenizer = sentencepiece
    spaces = [tokenizer.token_id(piece) for piece in ("▁", "▁▁", "▁the", "the")]
    some = st.one_of(
        st.integers(0, 2), st.integers(3, 258), st.integers(195, 258), st.just(10**6), st.sampled_from(spaces)
    )
    ids = data.draw(st.lists(some, max_size=30))
    assert "".join(_streamed(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


def test_a_stream_is_prompt_and_can_be_used_again(real):
    decoder = real.stream()
    ids = real.encode("Hello big world 😀!")
    assert [decoder.push([i]) for i in ids[:3]] == ["Hello", " big", " world"]
    assert decoder.push(ids[3:]) == " 😀!"
    assert decoder.flush() == ""
    assert decoder.push(ids[:2]) + decoder.flush() == "Hello big"
    assert decoder.push(real.encode("😀")[:1]) == ""
    assert decoder.flush() == "\ufffd"


def test_a_stream_keeps_spaces_between_words(backend):
    """The decoder strips the first space of a text, and must not strip one after a skipped special token."""
    vocab = {"<s>": 0, "▁Hi": 1, "▁there": 2, "▁": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    pieces = _streamed(Tokenizer(backend), [0, 1, 0, 2, 3, 3, 0, 2], skip_special=True)
    assert pieces == ["", "Hi", "", " there", " ", " ", "", " there", ""]

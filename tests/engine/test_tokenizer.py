"""Tokenizer, detokenizer and chat template, against transformers' tokenizer of the same directory."""

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny import BASE
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from tokenweave.engine.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}\n"
    "    {% if message['role'] == 'system' and not loop.first %}\n"
    "        {{ raise_exception('system message must come first') }}\n"
    "    {% endif %}\n"
    "<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "<|im_start|>assistant\n"
    "{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is <b>2 & 2</b>? 日本 😀 "},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": ""},
]
TEXTS = [
    "", " ", "Hello world", "  two  spaces ", "tabs\tnewlines\n\n", "12345", "héllo 日本語 😀👩\u200d👧",
    "<|im_start|>user\nhi<|im_end|>",
    "\x00", "don't", "\u00a0", "e\u0301", "𝔘𝔫𝔦", "x" * 577,
]  # fmt: skip


def byte_level(bos: bool = False) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(t, special=True) for t in ("<s>", "<|im_start|>", "<|im_end|>")],
    )  # fmt: skip
    backend.train_from_iterator(["the quick fox don't jump hello hello world user assistant 日本語 日本"] * 5, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentencepiece() -> Backend:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<s>": 256, "▁": 257, "h": 258, "i": 259, "▁h": 260}
    backend = Backend(models.BPE(vocab, [("▁", "h")], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return backend


def written(directory: Path, backend: Backend | None, template: str | None = CHATML, **config: Any) -> Path:
    model = {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(model))
    if backend is not None:
        backend.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
        settings |= config if template is None else {"chat_template": template} | config
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def theirs(directory: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("bos", [False, True])
def test_encode_and_decode(bos: bool, tmp_path: Path) -> None:
    path = written(tmp_path, byte_level(bos))
    ours, reference = Tokenizer(path), theirs(path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == reference(text)["input_ids"], text
        assert ours.encode(text, add_special=False) == reference(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == reference.decode(ids)
    assert ours.encode("x")[:1] == ([0] if bos else ours.encode("x", add_special=False)[:1])
    assert ours.decode([]) == ""


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        Tokenizer(written(tmp_path, byte_level(False))).encode("caf\udce9")


def test_ids_of_the_model(tmp_path: Path) -> None:
    path = written(tmp_path, None)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    tokenizer = Tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (7, 2))


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    plain = backend.encode("hello world " * 20).ids
    backend.enable_truncation(4)
    backend.enable_padding(length=500)
    assert Tokenizer(written(tmp_path, backend)).encode("hello world " * 20) == plain


TEMPLATES = {
    "chatml": CHATML,
    "bos": "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{{ '<é>' | tojson }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "no tools": "{% if tools is none and documents is none %}plain{% endif %}{{ pad_token }}{{ missing }}",
    "date": "{{ strftime_now('%Y') }}{{ messages[1:] | length }}{{ messages[0]['content'].split('.')[0] }}",
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat(template: str, prompt: bool, tmp_path: Path) -> None:
    path = written(tmp_path, byte_level(bos=True), template)
    ours, reference = Tokenizer(path), theirs(path)
    expected = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
    assert ours.render(MESSAGES, prompt) == expected
    ids = reference.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False)
    assert ours.chat(MESSAGES, prompt) == ids
    assert ours.has_chat_template


def test_beginning_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path, byte_level(bos=True), TEMPLATES["bos"]))
    assert tokenizer.chat(MESSAGES)[:2].count(0) == 1 and tokenizer.encode("x").count(0) == 1


def test_where_templates_and_names_are_kept(tmp_path: Path) -> None:
    """In a file of its own, which comes first; in a list by name; and token names as objects or in another file."""
    path = written(
        tmp_path,
        byte_level(),
        None,
        bos_token={"content": "<s>", "special": True},
        extra_token=3,
        chat_template=[{"name": "tool_use", "template": "x"}, {"name": "default", "template": "d{{ bos_token }}"}],
    )
    assert Tokenizer(path).render(MESSAGES) == "d<s>"
    (path / "chat_template.jinja").write_text("file {{ unk_token }}")
    (path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>", "bos_token": "<other>"}))
    assert Tokenizer(path).render(MESSAGES) == "file <unk>"


def test_date(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path, byte_level(), "{{ strftime_now('%d %B %Y') }}"))
    before = datetime.now()
    assert tokenizer.render([]) in {before.strftime("%d %B %Y"), datetime.now().strftime("%d %B %Y")}


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, [MESSAGES[1], MESSAGES[0]], "refuses these messages: system message must come first"),
        (CHATML, [{"content": "x"}], "a message must be like"),
        (CHATML, ["hello"], "a message must be like"),
        ("{{ messages[0].content + 1 }}", MESSAGES, "refuses these messages"),
        ("{{ messages[7].role.x }}", MESSAGES, "refuses these messages"),
        ("{{ 1 / 0 }}", MESSAGES, "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "refuses these messages"),
        ("{% set _ = messages.append(1) %}", MESSAGES, "refuses these messages"),
        ("{% for %}", MESSAGES, "is not valid"),
        (None, MESSAGES, "has no chat template; use a plain prompt"),
    ],
)
def test_refused_chats(template: str | None, messages: list[Any], message: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path, byte_level(), template))
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer.chat(messages)
    assert "\n" not in str(caught.value)
    assert tokenizer.has_chat_template == (template is not None)


def test_no_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path, None))
    assert not tokenizer.available and not tokenizer.has_chat_template
    for use in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([1]), lambda: tokenizer.stream().push(1)):
        with pytest.raises(ValueError, match="has no tokenizer.json; give prompts as token ids"):
            use()


def test_unreadable_tokenizer(tmp_path: Path) -> None:
    path = written(tmp_path, byte_level())
    (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text()[:1000])
    with pytest.raises(ValueError, match="tokenizer.json is not a readable tokenizer"):
        Tokenizer(path).encode("x")


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:20])
def test_stream_of_text(text: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path, byte_level()))
    ids = tokenizer.encode(text)
    for skip in (True, False):
        pieces = streamed(tokenizer, ids, skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip)
        assert not any("\ufffd" in piece for piece in pieces)


def test_stream_gives_each_character_once_it_is_whole(tmp_path: Path) -> None:
    """Bytes one by one: é is 2 of them, 日 is 3, 😀 is 4."""
    for backend, name in ((byte_level(), letter), (sentencepiece(), "<0x{:02X}>".format)):
        tokenizer = Tokenizer(written(tmp_path, backend))
        ids = [backend.token_to_id(name(byte)) for byte in "aé日😀b".encode()]
        assert streamed(tokenizer, ids) == ["a", "", "é", "", "", "日", "", "", "", "😀", "b", ""]


def letter(byte: int) -> str:
    """GPT-2's letter for a byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in shown else chr(256 + [b for b in range(256) if b not in shown].index(byte))


def test_stream_ends_in_half_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path, sentencepiece()))
    assert streamed(tokenizer, [ord("a"), 0xF0, 0x9F]) == ["a", "", "", "\ufffd\ufffd"]
    stream = tokenizer.stream()
    assert [stream.push(0xE6), stream.flush(), stream.flush(), stream.push(ord("b")), stream.flush()] == [
        "", "\ufffd", "", "b", "",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_stream_of_random_ids(seed: int, tmp_path: Path) -> None:
    """Broken bytes everywhere: still all of the text, in order, and no half characters before the end of a break."""
    tokenizer = Tokenizer(written(tmp_path, byte_level()))
    ids = random.Random(seed).choices(range(400), k=577)
    assert "".join(streamed(tokenizer, ids, False)) == tokenizer.decode(ids, False)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_stream_keeps_spaces_between_words(tmp_path: Path) -> None:
    """A sentencepiece decoder drops the first space of what it is given, which is only right at the very start."""
    tokenizer = Tokenizer(written(tmp_path, sentencepiece()))
    assert streamed(tokenizer, [260, 259, 260, 259, 257, 257, 258]) == ["h", "i", " h", "i", " ", " ", "h", ""]

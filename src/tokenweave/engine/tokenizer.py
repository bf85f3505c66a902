"""Text to token ids and back, and the chat template, from a checkpoint's directory."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenweave.config.foreign import read_config, read_json

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


class Tokenizer:
    """The tokenizer of a checkpoint's directory: tokenizer.json, tokenizer_config.json and the chat template.

    A directory without a tokenizer is fine until text is needed: then ValueError says so.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        config = read_config(self.directory)
        self.bos_token_id = config.bos_token_id
        self.eos_token_ids = config.eos_token_ids

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{self.directory} has no tokenizer.json; give prompts as token ids")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self.directory / "tokenizer_config.json"
        return read_json(path) if path.is_file() else {}

    @property
    def available(self) -> bool:
        """Whether the directory holds a tokenizer."""
        return (self.directory / "tokenizer.json").is_file()

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` and `chat` can work."""
        return self.available and self._template_source is not None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; with add_special also those that the tokenizer puts around a text, e.g. its first."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        except TypeError:  # half of a surrogate pair, which is what Python makes of bytes that are not UTF-8
            raise ValueError("the text is not valid Unicode; is it UTF-8?") from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`, by default without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> "Detokenizer":
        """A detokenizer for one sequence of ids that come one by one."""
        return Detokenizer(self, skip_special)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model was trained on, by the checkpoint's own chat template.

        Raises ValueError if there is no template or it refuses the messages.
        """
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f'a message must be like {{"role": "user", "content": "..."}}, got {message!r}')
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ValueError(f"the chat template of {self.directory} refuses these messages: {error}") from None

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the rendered conversation. The template writes the special tokens, so none are added."""
        if not messages:
            raise ValueError("there are no messages")
        return self.encode(self.render(messages, add_generation_prompt), add_special=False)

    @cached_property
    def _special_tokens(self) -> dict[str, Any]:
        """bos_token, eos_token, ... as text: what templates refer to."""
        path = self.directory / "special_tokens_map.json"
        given = (read_json(path) if path.is_file() else {}) | self._config
        return {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in given.items()
            if name.endswith("_token") and (isinstance(value, str) or isinstance(value, dict) and "content" in value)
        }

    @cached_property
    def _template_source(self) -> str | None:
        path = self.directory / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else self._config.get("chat_template")
        if isinstance(source, list):  # several by name, as older files have them
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        return source

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._template_source is None:
            raise ValueError(f"{self.directory} has no chat template; use a plain prompt")
        try:
            return _environment().from_string(self._template_source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self.directory} is not valid: {error}") from None


class Detokenizer:
    """Ids in, pieces of text out, one after another; together they are the text of all ids.

    A piece never ends in half a character: bytes of an unfinished one wait for their rest, at most until `flush`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []
        self._start = 0  # decoding begins here: one emitted token ahead, since a token's text depends on what precedes
        self._emitted = 0  # ids before this one have been emitted
        self._prefix = ""  # text of ids[start:emitted]

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith("\ufffd") or len(text) <= len(self._prefix):
            return ""
        piece = text[len(self._prefix) :]
        self._start, self._emitted = self._emitted, len(self._ids)
        self._prefix = self._decode()
        return piece

    def flush(self) -> str:
        """What is left at the end; a character that never came whole shows as U+FFFD."""
        piece = self._decode()[len(self._prefix) :]
        self._start = self._emitted = len(self._ids)
        self._prefix = ""
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids[self._start :], self._skip_special)


class _GenerationTag(Extension):
    """`{% generation %}`: marks what a model is trained on; here its body is just text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Templates come with checkpoints, so they run sandboxed, with what they are written to expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Without the escaping for HTML that Jinja's own filter does."""
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

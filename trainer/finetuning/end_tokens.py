"""Whether a model stops: the tokens that end what it learns, beside those at which generation ends.

    stops = stop_tokens("qwen2.5-7b-base", config)              # [151643]: of generate() of from_pretrained()
    new = not_stopping(stops, {"<|im_end|>": 151645})           # {"<|im_end|>": 151645}
    write(folder, config, stops, new)                           # into generation_config.json, config.json

A base model's files name the token that ends a document. A chat template ends turns with another one, which a model
that was trained on chats says, and then goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.manifest import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GENERATION = "generation_config.json"
KEY = "eos_token_id"


def stop_tokens(folder: str, config: PreTrainedConfig) -> list[int]:
    """Those of a folder's generation_config.json or, without that file, of its config.json, read as `config`."""
    file = Path(folder, GENERATION)
    if file.exists():
        ends = _read(file).get(KEY)
    else:
        ends = getattr(config.get_text_config(decoder=True), KEY, None)
    return [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]


def not_stopping(stops: list[int], learned: dict[str, int]) -> dict[str, int]:
    """The tokens that end what is learned, {text: id}, at which generation goes on."""
    return {text: token for text, token in learned.items() if token not in stops}


def in_words(new: dict[str, int]) -> str:
    """These tokens, for people."""
    return " and ".join(f"{text} ({token})" for text, token in new.items())


def call(stops: list[int], new: dict[str, int]) -> str:
    """What stops where the files do not say so."""
    return f"generate({KEY}={[*stops, *new.values()]})"


def write(folder: str, config: PreTrainedConfig, stops: list[int], new: dict[str, int]) -> None:
    """Puts tokens behind those of the files of a folder. The first stays, which pads where nothing else is named.
    config: config.json as transformers reads it."""
    from transformers import GenerationConfig

    ends = [*stops, *new.values()]
    file = Path(folder, "config.json")
    content = _read(file) | {KEY: ends}
    takes_list = True
    try:
        type(config).from_dict(dict(content))
        _write(file, content)
    except Exception:  # whatever a class has against a list: a few take one token alone
        takes_list = False
    file = Path(folder, GENERATION)
    if file.exists():
        _write(file, _read(file) | {KEY: ends})
    elif not takes_list:
        content = GenerationConfig.from_model_config(config).to_diff_dict()
        content.pop("_from_model_config", None)
        _write(file, content | {KEY: ends})


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}; correct or delete it") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: is not a JSON object; correct or delete it")
    return content


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""What can be refused before anything is taken: --model's folder, --data's files, memory. Imports no torch.

check_before_torch(config, world)           # on rank 0: ends the process with one line and exit code 2 or 3, or returns
check_paths_and_packages(config, world)     # on each rank: ValueError
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from trainer import checks
from trainer.checkpoint.manifest import check_directory
from trainer.finetuning.config import Config
from trainer.terminal.output import fail, regular
from trainer.terminal.text import counted

FILES = "model.safetensors", "pytorch_model.bin"  # the first that is there, or its index
# By --export.
COPIED = re.compile(r"(?!.*\.index\.json)(.*\.(json|jinja|model|txt)|(LICENSE|NOTICE).*)")
TEMPLATES = "additional_chat_templates"  # the only folder that is copied
# Above each id of any tokenizer: the largest vocabularies have a million.
TOKEN_IDS = 2**21
EXPORTED = "exported"  # in --save: after how many steps --export was written, and its `export_mark`


def weights_in(folder: str) -> str | None:
    """The path of the file of weights of a folder, which may have an index instead; None: there is none."""
    paths = (os.path.join(folder, name) for name in FILES)
    return next(
        (path for path in paths if os.path.exists(path) or os.path.exists(f"{path}.index.json")),
        None,
    )


def check_folder(folder: str, weights: bool = True) -> None:
    """DataError for a folder that lacks config.json, or weights, or files that its index names."""
    from trainer.data import DataError

    try:
        for path in (*Path(folder).iterdir(), *Path(folder, TEMPLATES).glob("*")):
            regular(path)
        if (
            Path(folder, "adapter_config.json").exists()
            and not Path(folder, "config.json").exists()
        ):
            raise DataError(
                f"{folder}: expected a model, found adapters (adapter_config.json); export it again with --merge"
            )
        config = json.loads(Path(folder, "config.json").read_bytes())
        if not isinstance(config, dict) or "model_type" not in config:
            raise DataError(
                f"{folder}/config.json: expected model_type, found none; use a folder that save_pretrained() wrote"
            )
        parts = config, config.get("text_config") or {}
        if quantised := next(
            filter(None, (part.get("quantization_config") for part in parts)), None
        ):
            how = str(quantised.get("quant_method")) + " in 4 bit" * bool(
                quantised.get("load_in_4bit")
            )
            expected = f"expected weights that are not quantised, found {how}"
            raise DataError(
                f"{folder}/config.json: {expected}; name the folder of the model before it was quantised"
            )
        path = weights_in(folder)
        if not weights:
            return
        if path is None:
            raise DataError(
                f"{folder}: expected {' or '.join(FILES)} or its index, found neither; download the "
                "weights, or add --random"
            )
        if not os.path.exists(path):
            named = set(json.loads(Path(f"{path}.index.json").read_bytes())["weight_map"].values())
            if absent := sorted(
                name for name in named if not os.path.exists(os.path.join(folder, name))
            ):
                raise DataError(
                    f"{path}.index.json: names {counted(len(absent), 'missing file')}: "
                    f"{', '.join(absent[:5])}; download them"
                )
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}; use a folder that save_pretrained() wrote"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{folder}: config.json or the index of its weights is damaged ({error}); download it again"
        ) from error


def check_token_ids(folder: str) -> None:
    """DataError for a tokenizer whose files name an id that no vocabulary has: the library would fill all ids below it,
    or hand it to us, who keep ids in 32 bits. A file that is no JSON is the library's to refuse."""
    from trainer.data import DataError

    for name in ("tokenizer.json", "added_tokens.json", "tokenizer_config.json", "vocab.json"):
        path = Path(folder, name)
        try:
            content = json.loads(regular(path).read_bytes()) if path.exists() else {}
        except (ValueError, RecursionError):
            continue
        except OSError as error:
            raise DataError(
                f"{path}: {error.strerror}; use a folder that save_pretrained() wrote"
            ) from error
        if not isinstance(content, dict):
            continue
        if name == "tokenizer.json":
            keys = "added_tokens", "model", "post_processor", "padding"
            numbers = _numbers({key: content.get(key) for key in keys})
        elif name == "tokenizer_config.json":
            decoder = content.get("added_tokens_decoder")
            numbers = map(
                float, filter(str.isdecimal, decoder if isinstance(decoder, dict) else ())
            )
        else:
            numbers = _numbers(content)
        if odd := [number for number in numbers if not number < TOKEN_IDS]:
            raise DataError(
                f"{path}: expected token ids below {TOKEN_IDS}, found {str(max(odd))[:40]}; use the "
                "model's own tokenizer"
            )


def _numbers(value: object) -> Iterator[int]:
    """The whole numbers in a value of JSON, whose scores have a point."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) is int:
            yield each
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def copied(folder: str) -> list[str]:
    """The small files of a folder that --export copies, as paths in it. DataError for a link that leads out of it: who
    publishes the export would publish what it names. The hub's cache has its files beside its folders, in blobs."""
    from trainer.data import DataError

    top = Path(folder)
    paths = []
    homes = top.resolve(), top.resolve().parent.parent / "blobs"
    for path in sorted([*top.iterdir(), *top.glob(f"{TEMPLATES}/*")]):
        if path.is_file() and (COPIED.fullmatch(path.name) or path.parent.name == TEMPLATES):
            if not any(path.resolve().is_relative_to(home) for home in homes):
                raise DataError(
                    f"{path}: is a link to a file outside of its folder, which --export does not copy; copy the file"
                )
            paths.append(str(path.relative_to(top)))
    return paths


def export_mark(config: Config) -> str:
    """What --export asks for, and which folder is there. OSError: none that an export has written."""
    file = "adapter_config.json" if config.lora and not config.merge else "config.json"
    folder = os.path.realpath(config.export or "")
    written = os.stat(os.path.join(folder, file)).st_mtime_ns
    return f"{folder} merge={config.merge} keep_eos={config.keep_eos} max_shard_gb={config.max_shard_gb} {written}"


def was_exported(config: Config) -> bool:
    """Whether the run that --save names wrote --export after as many steps: queued once more, it has nothing to do.
    config: without steps these are not asked about."""
    try:
        steps, mark = Path(config.save or "/dev/null", EXPORTED).read_text().split("\n", 1)
        return int(steps) >= (config.steps or 0) and mark == export_mark(config)
    except (OSError, ValueError):
        return False


def check_export(config: Config) -> None:
    """ValueError where --export is there and the run that --save names did not write it."""
    if config.export is not None and os.path.lexists(config.export) and not was_exported(config):
        raise ValueError(f"--export {config.export}: already exists; name a new folder")


def check_paths_and_packages(config: Config, world: int) -> None:
    """ValueError, one line, for what resolved flags name and need outside, the contents of files apart."""
    for flag, name in (("model", "transformers"), ("model", "safetensors"), ("lora", "peft")):
        if getattr(config, flag) and importlib.util.find_spec(name) is None:
            raise ValueError(f"--{flag}: needs {name}; pip install -e '.[hf]'")
    if not os.path.isdir(config.model):
        raise ValueError(
            f"--model {config.model}: is not a folder; name one with config.json, as save_pretrained() writes it"
        )
    check_export(config)
    for name in ("prepared", "export"):
        if (path := getattr(config, name)) is not None:
            check_directory(
                path if name == "prepared" else os.path.dirname(os.path.abspath(path)),
                f"--{name}",
            )
    checks.check_outputs(config)


def check_before_torch(config: Config, world: int) -> None:
    """For rank 0, before torch is imported and with flags as they are given: what `check_paths_and_packages` finds, and
    what is wrong with the files of --model and --data as this rank sees them."""
    from trainer.data import DataError
    from trainer.finetuning.sources import check_files, weighted

    try:
        check_paths_and_packages(config, world)
        check_folder(config.model, weights=not config.random)
        if config.export is not None:
            copied(config.model)
        sources = [path for path, _ in weighted(config.data)]
        files = [file for path in sources for file in check_files(path)]
        if config.eval_data is not None:
            sources.append(config.eval_data)
            files += check_files(config.eval_data, "--eval-data")
        checks.check_apart(
            config, [*files, *filter(os.path.isdir, map(os.path.expanduser, sources))]
        )
    except ValueError as e:
        fail(str(e), 0)
    except DataError as e:
        fail(str(e), 0, 3)

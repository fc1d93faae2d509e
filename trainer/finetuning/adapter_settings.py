"""What the adapter_config.json of a folder of peft says, in flags of finetune.py: --adapter goes on from there.

    adapter_flags("out")      # {"lora": 16, "lora_alpha": 32.0, "lora_targets": ("q_proj", "v_proj"), ..}

ValueError, one line, for adapters that finetune.py does not train. Imports no torch.
"""

import json
from pathlib import Path
from typing import Any

from trainer.terminal.output import regular

SETTINGS = "adapter_config.json"
ALL_LINEAR, EXPERTS = "all-linear", "experts"  # of --lora-targets
# Entries that say nothing of what adapters compute: who made them, of what, how they began, and what shapes tell.
HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path revision inference_mode task_type peft_type peft_version bias fan_in_fan_out "
    "init_lora_weights lora_dropout exclude_modules layers_to_transform layers_pattern megatron_core runtime_config "
    "qalora_group_size ensure_weight_tying loftq_config eva_config corda_config lora_ga_config".split()
)
READ = frozenset("r lora_alpha target_modules target_parameters use_rslora modules_to_save".split())
# Values of init_lora_weights that change the frozen weights, too.
CHANGING = "pissa", "olora", "corda", "loftq", "lora_ga"


def adapter_flags(folder: str) -> dict[str, Any]:
    """The flags with which adapters of a folder are trained on."""
    path = Path(folder, SETTINGS)
    try:
        settings = json.loads(regular(path).read_bytes())
        odd = {name for name, value in settings.items() if value} - HARMLESS - READ
        if settings["peft_type"] != "LORA":
            odd.add("peft_type")
        if settings.get("bias", "none") != "none":
            odd.add("bias")
        if str(settings.get("init_lora_weights")).startswith(CHANGING):
            odd.add("init_lora_weights")
        modules = settings.get("target_modules") or []
        if isinstance(modules, str) and modules != ALL_LINEAR:
            odd.add("target_modules")  # a pattern
        if odd:
            name = min(odd)
            raise ValueError(
                f"{name} {str(settings[name])[:60]}, which finetune.py cannot train; merge these adapters into their "
                "model by peft's merge_and_unload(), and train new ones"
            )
        targets = {modules} if isinstance(modules, str) else {*modules}
        for name in settings.get("target_parameters") or []:
            targets.add(EXPERTS if "expert" in name else name.removesuffix(".weight"))
        return dict(
            lora=int(settings["r"]),
            lora_alpha=float(settings["lora_alpha"]),
            lora_targets=tuple(sorted(targets)),
            lora_rslora=bool(settings.get("use_rslora")),
            lora_modules_to_save=tuple(sorted(settings.get("modules_to_save") or ())),
        )
    except OSError as error:
        raise ValueError(
            f"--adapter {folder}: {SETTINGS}: {error.strerror}; name a folder that peft or --export wrote"
        ) from None
    except (
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
        json.JSONDecodeError,
    ) as error:
        raise ValueError(
            f"--adapter {folder}: {SETTINGS} is not a file of peft ({error}); name a folder that peft or --export wrote"
        ) from None
    except ValueError as error:
        raise ValueError(f"--adapter {folder}: {SETTINGS} has {error}") from None


def adapter_note(folder: str, model: str) -> str:
    """What adapters of a folder were trained with and are not here, though that is no error; empty if nothing."""
    settings = json.loads(Path(folder, SETTINGS).read_bytes())
    base = str(settings.get("base_model_name_or_path") or "")
    notes = []
    if dropout := settings.get("lora_dropout"):
        notes.append(f"lora_dropout {dropout}; training goes on without dropout")
    # A folder of the hub's cache has the model's name further up, and a link its own.
    if Path(base).name not in f"{model} {Path(model).resolve()}":
        notes.append(f"the base model {Path(base).name}; these go on that of --model")
    return f"--adapter {folder}: trained with {' and '.join(notes)}" if notes else ""

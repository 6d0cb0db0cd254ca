"""`msds convert`: GGUF files and MindSpore training checkpoints to Hugging Face folders, and back to MindSpore."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from msds.errors import OptionError
from msds.pretrained import model_folder
from msds_serve.commands import add_command

GGUF, TRAINING, HF = "a GGUF file", "a MindSpore training checkpoint", "a Hugging Face folder"
_GGUF_SUFFIXES = (".gguf", ".whl", ".zip")

_OPTIONS = {
    "dtype": ("--dtype", (GGUF,)),
    "config": ("--config", (TRAINING,)),
    "strategy": ("--strategy", (TRAINING,)),
    "suffix": ("--suffix", (TRAINING,)),
    "compare": ("--compare", (TRAINING, HF)),
    "order": ("--order", (TRAINING, HF)),
    "layout": ("--layout", (HF,)),
}
"""Options that some sources alone understand."""


def add(commands: Any) -> None:
    """Define the command."""
    command = add_command(
        commands,
        "convert",
        run,
        "Turn a GGUF file (llama, qwen2) or a MindSpore training checkpoint into a Hugging Face folder, or back.",
    )
    command.add_argument(
        "source",
        metavar="SOURCE",
        nargs="+",
        type=model_folder,
        help=".gguf file, or a wheel, zip or folder with one; .ckpt or .safetensors of MindSpore, a folder of them or "
        "of rank_N folders; Hugging Face folder (--to mindspore)",
    )
    command.add_argument("target", metavar="TARGET", help="folder to create")
    command.add_argument("--to", choices=("huggingface", "mindspore"), help="default: huggingface")
    command.add_argument("--dtype", help="GGUF: float32 (default), bfloat16 or float16")
    training = command.add_argument_group("training checkpoints")
    training.add_argument(
        "--config",
        metavar="PATH",
        type=model_folder,
        help="folder with config.json and tokenizer, or config.json; default SOURCE",
    )
    training.add_argument(
        "--strategy", metavar="PATH", help="how ranks cut their tensors: MindSpore's strategy file, or folder of them"
    )
    training.add_argument(
        "--suffix", metavar="END", help="end of the file names to read where each rank has several, such as 10_100"
    )
    training.add_argument(
        "--order",
        metavar="KEY=VALUE",
        action="append",
        help="order of fused rows, where names do not say it: qkv=grouped|contiguous, gate_up=interleaved|contiguous, "
        "rope=pairs|halves, experts=out_in|in_out; may be repeated",
    )
    training.add_argument("--layout", help="to write: mindformers (default), mindformers-fused or mcore")
    training.add_argument(
        "--compare",
        metavar="FOLDER",
        type=model_folder,
        help="compare every tensor with this model's and say which layer differs first",
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0; bad input raises."""
    if not options.target or not all(options.source):
        raise OptionError("an empty path is given: name the source and the folder to create")
    kind = _kind(options.source)
    for name, (flag, kinds) in _OPTIONS.items():
        if getattr(options, name) is not None and kind not in kinds:
            raise OptionError(f"{flag} is for {' or '.join(kinds)}; {options.source[0]} is {kind}")
    to = options.to or "huggingface"
    if (kind == HF) != (to == "mindspore"):
        way = "name --to mindspore to have it in a training layout" if kind == HF else "convert it to huggingface first"
        raise OptionError(f"{options.source[0]} is {kind}: {way}")
    if kind == GGUF:
        _from_gguf(options)
    else:
        _between_layouts(options, to)
    print(f"wrote {options.target}")
    return 0


def _kind(sources: list[str]) -> str:
    from msds.layouts import is_training_checkpoint

    path = Path(sources[0])
    if len(sources) > 1 or path.suffix in _GGUF_SUFFIXES or (path.is_dir() and any(path.glob("*.gguf"))):
        return GGUF
    if path.is_file():
        return TRAINING if path.suffix in (".ckpt", ".safetensors") else GGUF
    if not path.is_dir():
        raise OptionError(f"{path} does not exist")
    return TRAINING if is_training_checkpoint(path) else HF


def _from_gguf(options: argparse.Namespace) -> None:
    from msds.checkpoint import convert_gguf

    source = options.source[0] if len(options.source) == 1 else options.source
    convert_gguf(source, options.target, **({} if options.dtype is None else {"dtype": options.dtype}))


def _between_layouts(options: argparse.Namespace, to: str) -> None:
    from msds.layouts import convert_to_hf, convert_to_mindspore, parse_orders

    source, target, orders = Path(options.source[0]), Path(options.target), parse_orders(options.order or ())
    config, strategy, reference = (
        None if given is None else Path(given) for given in (options.config, options.strategy, options.compare)
    )
    if to == "mindspore":
        convert_to_mindspore(source, target, options.layout or "mindformers", orders, compare=reference)
    else:
        read = convert_to_hf(
            source, target, orders, config_from=config, strategy=strategy, suffix=options.suffix, compare=reference
        )
        for reason in dict.fromkeys(read.skipped.values()):
            names = [name for name, why in read.skipped.items() if why == reason]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            print(f"left out, {reason}: {', '.join(names[:3])}{more}")
    if reference is not None:
        print(f"every tensor is bit for bit that of {reference}")

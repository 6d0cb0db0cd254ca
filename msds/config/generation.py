"""What a checkpoint folder says about generating: ids that end a text, and sampling defaults."""

from dataclasses import dataclass, replace
from pathlib import Path

from msds.config.fields import Fields, raise_faults
from msds.config.reading import read_json

# Lengths and ids that requests or config.json decide, and marks of the writer.
_NOT_SAMPLING = {
    "_from_model_config",
    "bos_token_id",
    "max_length",
    "max_new_tokens",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Defaults for requests that leave a value open; None where the folder says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a text: those of config.json, then those that only generation_config.json has."""
    do_sample: bool | None = None
    """false asks for greedy decoding whatever the temperature says."""
    temperature: float | None = None
    """>= 0; 0 is greedy."""
    top_p: float | None = None
    """In (0, 1]."""
    top_k: int | None = None
    """Tokens kept; 0 for all."""
    min_p: float | None = None
    """In [0, 1]."""
    repetition_penalty: float | None = None
    """> 0; 1 for none."""
    not_applied: tuple[str, ...] = ()
    """Further fields of generation_config.json that ask for something and that no sampler here looks at."""


def read_generation_config(folder: str | Path) -> GenerationConfig:
    """Read `generation_config.json` and the eos ids of `config.json`; files that are missing say nothing.

    ConfigError lists every fault of generation_config.json with field and value.
    """
    place = Path(folder)
    eos = _eos_of_config(place / "config.json")
    file = place / "generation_config.json"
    if not file.exists():
        return GenerationConfig(eos_token_ids=eos)
    fields = Fields(read_json(file))
    eos = tuple(dict.fromkeys(eos + fields.token_ids("eos_token_id")))
    config = GenerationConfig(
        eos_token_ids=eos,
        do_sample=None if fields.raw("do_sample") is None else fields.flag("do_sample"),
        temperature=fields.optional_number("temperature", minimum=0.0),
        top_p=fields.optional_number("top_p", above=0.0, maximum=1.0),
        top_k=None if fields.raw("top_k") is None else fields.integer("top_k", minimum=0),
        min_p=fields.optional_number("min_p", minimum=0.0, maximum=1.0),
        repetition_penalty=fields.optional_number("repetition_penalty", above=0.0),
    )
    raise_faults(str(file), fields.faults)
    read = fields.seen | _NOT_SAMPLING
    not_applied = (name for name, value in fields.data.items() if value not in (None, False) and name not in read)
    return replace(config, not_applied=tuple(not_applied))


def _eos_of_config(file: Path) -> tuple[int, ...]:
    if not file.exists():
        return ()
    fields = Fields(read_json(file))
    eos = fields.token_ids("eos_token_id")
    raise_faults(str(file), fields.faults)
    return eos

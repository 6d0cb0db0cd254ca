"""Errors that a user can cause and mend. Each message names the thing, its value and the remedy."""


class MsdsError(ValueError):
    """Base of every error that bad input causes; programs that embed msds can catch this one."""


class ConfigError(MsdsError):
    """A field of config.json, generation_config.json or tokenizer_config.json that cannot be served."""


class CheckpointError(MsdsError):
    """A checkpoint that is damaged, incomplete, or does not fit its config."""


class TokenizerError(MsdsError):
    """A tokenizer or chat template that is missing or cannot be used."""


class PromptError(MsdsError):
    """A prompt or message list that cannot be run: empty, too long, ids outside the vocabulary."""


class SamplingError(MsdsError):
    """A sampling parameter outside its range, or a combination that contradicts itself."""


class ConstraintError(SamplingError):
    """A constraint on the text that cannot be kept: an impossible or unsupported schema, a grammar that is wrong."""


class OptionError(MsdsError):
    """An engine option (dtype, memory, lengths) that this machine or model cannot honour."""


class TrainingError(MsdsError):
    """Training data that cannot be learned from, or a run that cannot go on."""

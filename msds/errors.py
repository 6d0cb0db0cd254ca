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


class ContextLengthError(PromptError):
    """A prompt that leaves no room for what is asked for, with the numbers.

    max_tokens: as asked for; None where the prompt alone is too long, or leaves no room for a single token.
    """

    def __init__(self, *, prompt_index: int, prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> None:
        room = max_model_len - prompt_tokens
        if max_tokens is None:
            text = (
                f"prompt {prompt_index} has {prompt_tokens} tokens, but max_model_len is {max_model_len} and at least "
                "one token must be generated: shorten the prompt or raise max_model_len"
            )
        else:
            text = (
                f"prompt {prompt_index} has {prompt_tokens} tokens and max_tokens is {max_tokens}, together more than "
                f"max_model_len, which is {max_model_len}: lower max_tokens to {room} or raise max_model_len"
            )
        super().__init__(text)
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class SamplingError(MsdsError):
    """A sampling parameter outside its range, or a combination that contradicts itself."""


class ConstraintError(SamplingError):
    """A constraint on the text that cannot be kept: an impossible or unsupported schema, a grammar that is wrong."""


class OptionError(MsdsError):
    """An engine option (dtype, memory, lengths) that this machine or model cannot honour."""


class TrainingError(MsdsError):
    """Training data that cannot be learned from, or a run that cannot go on."""


class RankError(MsdsError):
    """A process of several failed. exit_code: what the program should end with, 2 where its input was bad."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PlacementError(MsdsError):
    """Experts that could not be moved on some rank, and so stay where they are on all of them."""

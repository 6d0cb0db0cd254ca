"""Which quantised checkpoints are read: FP8 (e4m3) with one scale per block, as DeepSeek publishes them."""

from msds.config.fields import Fields

_REMEDY = "load this model's BF16 checkpoint, or its FP8 one with block scales"


def read_weight_block_size(fields: Fields) -> tuple[int, int] | None:
    """`quantization_config.weight_block_size` (rows, columns), None when the checkpoint is not quantised."""
    for name in ("quantize", "compression_config"):
        if fields.raw(name) is not None:
            fields.fail(name, fields.raw(name), f"quantised checkpoints of this kind are not read; {_REMEDY}")
    section = fields.section("quantization_config")
    if section is None:
        return None
    method = section.raw("quant_method", "quant_type")
    if method != "fp8":
        section.fail("quant_method", method, f"the only method read is fp8 with weight_block_size; {_REMEDY}")
        return None
    section.only("fmt", "e4m3", "the other FP8 format is not read")
    section.only("activation_scheme", "dynamic", "activations are not quantised with stored scales")
    section.skip(("scale_fmt", "modules_to_not_convert", "dequantize"))  # the stored scales and dtypes decide
    size = section.raw("weight_block_size")
    section.warn_of_unseen()
    if isinstance(size, list) and len(size) == 2 and all(_is_size(item) for item in size):
        return size[0], size[1]
    section.fail("weight_block_size", size, "[rows, columns] of a scale block is wanted, for example [128, 128]")
    return None


def _is_size(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item > 0

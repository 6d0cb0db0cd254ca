"""A checkpoint folder: config, files against the model's ledger, digests, tokenizer, and room for it here."""

from __future__ import annotations

from pathlib import Path

from msds.checkpoint import Checkpoint, check_checkpoint, read_manifest, shares_embedding, verify_manifest
from msds.config import ModelConfig, config_warnings, read_config, read_generation_config
from msds.config.reading import read_json
from msds.doctor.checks import FAIL, PASS, SKIP, WARN, Finding
from msds.doctor.contradictions import contradiction
from msds.errors import MsdsError, TokenizerError
from msds.inspect.oddities import config_oddities
from msds.layouts import open_checkpoint
from msds.models.specs import model_specs
from msds.planning import make_demand, make_plan
from msds.planning.remedies import smallest_mesh
from msds.planning.units import sized
from msds.presets import is_preset, resolve_model
from msds.text.chat import ChatTemplate
from msds.text.tokenizer import Tokenizer, has_tokenizer
from msds.weights import checkpoint_entries, settle_mtp, stored_skips

NO_CONFIG = Finding(SKIP, "needs a config that can be read, see config")
SHOWN = 5
"""Lines of a checkpoint's faults that a preflight shows."""
HASHED_BYTES = 1 << 30
"""Files up to this size in all are compared with their digests here; more would take minutes."""


def config(path: Path) -> Finding:
    """config.json and generation_config.json can be served."""
    try:
        found = read_config(path)
        generation = read_generation_config(_folder(path))
    except MsdsError as error:
        return Finding(FAIL, str(error), "correct the field, or take the file from where the model was published")
    odd = [*config_warnings(path), *config_oddities(found, generation)]
    if odd:
        return Finding(WARN, "\n".join([found.model_type, *odd]), "legal; see whether it is meant")
    return Finding(PASS, found.model_type)


def preset_config(name: str) -> Finding:
    """A preset's config, which has no file."""
    found = resolve_model(name)
    return Finding(PASS, f"{found.model_type}, the preset {name}")


def absent(name: str) -> Finding:
    """What a name that is no model gets."""
    try:
        resolve_model(name)
    except MsdsError as error:
        return Finding(FAIL, f"no such folder: {error}", "give the path of a folder that is there, or one of the names")
    return Finding(WARN, f"{name} was not there a moment ago", "run it again")


def checkpoint(path: Path) -> Finding:
    """Every parameter has its tensor, of the right shape, in files that are whole. Headers are read, no weights."""
    if not path.is_dir():
        return Finding(SKIP, f"{path} is a file: give the folder to have its weights looked at")
    if (stored := _config_of(path)) is None:
        return NO_CONFIG
    opened: Checkpoint | None = None
    try:
        opened = open_checkpoint(path, stored)
        settled = settle_mtp(opened, stored, None)
        if not opened.faults:
            shares_embedding(opened, stored.tie_word_embeddings)
        entries = checkpoint_entries(model_specs(settled).spec(settled), settled)
        ledger = check_checkpoint(opened, entries, stored_skips(stored, settled))
    except MsdsError as error:
        lines = _few(str(error))
        wrong = None if opened is None else contradiction(opened, read_json(path / "config.json"))
        if wrong is None:
            return Finding(FAIL, lines, "fetch the files that are named again; msds inspect shows what is there")
        next_step = f"set {wrong.field} to {wrong.fitting} in config.json, or take config and weights from one revision"
        return Finding(FAIL, f"{wrong}\n{lines}", next_step)
    finally:
        if opened is not None:
            opened.close()
    found = f"{len(ledger.entries):,} parameters from {len(ledger.used):,} tensors"
    if ledger.strays:
        shown = ", ".join(ledger.strays[:3])
        return Finding(
            WARN, f"{found}; {len(ledger.strays)} tensors that nothing uses: {shown}", "see if they are meant"
        )
    return Finding(PASS, found)


def digests(path: Path) -> Finding:
    """Files against their sha256, where some are known and the files are small enough for a preflight."""
    if not path.is_dir():
        return Finding(SKIP, f"{path} is a file")
    try:
        known = read_manifest(path)
        size = sum((path / name).stat().st_size for name in known if (path / name).is_file())
        if not known:
            return Finding(SKIP, "no SHA256SUMS and no records of a download to compare with")
        if size > HASHED_BYTES:
            later = f"{len(known)} digests known; {size / 2**30:.1f} GiB take minutes and were not compared"
            return Finding(SKIP, later, "msds verify MODEL --check-sha256 compares them")
        return Finding(PASS, f"{verify_manifest(path, progress=False)} files are what their digests say")
    except MsdsError as error:
        return Finding(FAIL, str(error), "fetch the files that are named again")


def tokenizer(path: Path) -> Finding:
    """Tokenizer and chat template can be used; a short text comes back from its ids."""
    folder = _folder(path)
    if not has_tokenizer(folder):
        return Finding(WARN, f"no tokenizer in {folder}", "without tokenizer.json the service takes token ids only")
    try:
        found = Tokenizer.open(folder)
        ids = found.encode("1 + 1 = 2")
    except TokenizerError as error:
        return Finding(FAIL, str(error), "take tokenizer.json and tokenizer_config.json from the model's folder again")
    said = f"{found.vocab_size:,} ids"
    if not ids:
        return Finding(
            FAIL, f"{said}, but a short text has no ids", "take tokenizer.json from the model's folder again"
        )
    try:
        ChatTemplate.open(folder, found)
    except TokenizerError as error:
        return Finding(WARN, f"{said}; {error}", "chat is refused without a chat template; completions work")
    return Finding(PASS, f"{said}, with a chat template")


def room(model: str) -> Finding:
    """Whether weights and cache fit here, as the engine would plan them on this CPU. model: folder, file or preset."""
    if not is_preset(model) and _config_of(Path(model)) is None:
        return NO_CONFIG
    try:
        report = make_plan(make_demand(model, "cpu:1"))
    except MsdsError as error:
        return Finding(FAIL, str(error), "see msds plan MODEL --mesh cpu:1")
    memory = report.memory
    found = f"float32 on this CPU needs {sized(memory.needed)}, {sized(memory.budget)} may be planned with"
    if not report.fits:
        mesh = smallest_mesh(model)
        other = "no mesh was found that holds it" if mesh is None else f"see msds plan {model} --mesh {mesh} for NPUs"
        return Finding(FAIL, found, f"free memory, or {other}")
    return Finding(PASS, f"{found}; room for {report.most_texts:,} texts of {report.demand.max_model_len:,} tokens")


def checkpoint_bytes(path: Path) -> int:
    """Bytes of the weight files, 0 where there are none."""
    if not path.is_dir():
        return 0
    patterns = ("*.safetensors", "*.ckpt", "rank_*/*.safetensors", "rank_*/*.ckpt")
    return sum(file.stat().st_size for pattern in patterns for file in path.glob(pattern))


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _config_of(path: Path) -> ModelConfig | None:
    """None where `config` says what is wrong."""
    try:
        return read_config(path)
    except MsdsError:
        return None


def _few(text: str) -> str:
    """The title of a list of faults and the first few of them."""
    title, *faults = text.splitlines()
    if len(faults) <= SHOWN:
        return text
    return "\n".join([title, *faults[:SHOWN], "  and others"])

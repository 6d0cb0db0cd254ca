"""The `msds` command: parsing here, the work in msds, imported when a command runs so that --help is immediate."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msds import __version__
from msds.errors import MsdsError, RankError
from msds_serve.api_keys import API_KEY_VARIABLE, accepted_keys
from msds_serve.commands import (
    add_command,
    add_model,
    clients,
    compile,
    convert,
    doctor,
    evaluate,
    given,
    plan,
    problems,
    reinforce,
    train,
)
from msds_serve.commands.mesh import (
    BALANCE_OPTIONS,
    add_balance,
    add_mesh,
    check_balance,
    check_single,
    checked_plan,
    common_facts,
    launch_ranks,
    replica_options,
    step_timeout,
)

if TYPE_CHECKING:
    from msds import LLM
    from msds.engine.sequence import Output

ENGINE_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "memory_fraction",
    "block_size",
    "threads",
    "dtype",
    "check_sha256",
    "shard_cache",
    "num_speculative_tokens",
    "deterministic",
)
END_SECONDS = 15.0
"""What processes get to end, beyond the time to drain."""
EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit code: 0 done, 1 a check or an answer failed, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    # MindSpore's own warnings are about its internals; a user who wants them sets the variable.
    os.environ.setdefault("GLOG_v", "3")
    talks = options.verbose or (sys.stderr.isatty() and not getattr(options, "json", False))
    logging.basicConfig(format="msds: %(message)s", level=logging.INFO if talks else logging.WARNING)
    try:
        return int(options.run(options))
    except MsdsError as error:
        print(f"msds: error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, RankError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("msds: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left; nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msds", description="DeepSeek, Qwen2 and Llama checkpoints as pure functions, compiled by MindSpore."
    )
    parser.add_argument("--version", action="version", version=f"msds {__version__}")
    parser.set_defaults(verbose=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_serve(commands)
    _add_verify(commands)
    _add_inspect(commands)
    convert.add(commands)
    clients.add(commands)
    plan.add(commands)
    compile.add(commands)
    doctor.add(commands)
    train.add(commands)
    reinforce.add(commands)
    evaluate.add(commands)
    problems.add(commands)
    return parser


def _add_generate(commands: Any) -> None:
    command = add_command(commands, "generate", _generate, "Answer one prompt.")
    add_model(command, "folder: config.json, and safetensors or a MindSpore training checkpoint", optional=True)
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--token-ids", metavar="1,2,3", type=_token_ids, help="token ids to continue")
    prompt.add_argument("--chat", metavar="TEXT", help="user message, rendered by the model's chat template")
    sampling = command.add_argument_group("sampling (defaults: the model's generation_config.json)")
    sampling.add_argument("--max-tokens", metavar="N", type=int, help="default: the rest of the context")
    sampling.add_argument("--temperature", metavar="T", type=float, help="0 takes the most likely token")
    sampling.add_argument("--top-p", metavar="P", type=float)
    sampling.add_argument("--top-k", metavar="K", type=int)
    sampling.add_argument("--seed", metavar="S", type=int, help="the same seed gives the same tokens")
    sampling.add_argument("--n", metavar="N", type=int, help="answers to generate; default 1")
    sampling.add_argument("--stop", metavar="TEXT", action="append", help="text that ends the answer; may be repeated")
    _add_engine(command)
    add_mesh(command)
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_engine(command: argparse.ArgumentParser) -> None:
    engine = command.add_argument_group("engine")
    engine.add_argument("--max-model-len", metavar="N", type=int, help="default: the model's context, at most 4096")
    engine.add_argument("--memory-fraction", metavar="F", type=float, help="of the free memory; default 0.8")
    engine.add_argument("--block-size", metavar="N", type=int, help="tokens per cache block; default 16")
    engine.add_argument("--max-num-seqs", metavar="N", type=int, help="answers decoded together; default 8")
    engine.add_argument("--threads", metavar="N", type=int, help="cores to use; default all")
    engine.add_argument("--dtype", help="auto (default) or float32")
    engine.add_argument(
        "--num-speculative-tokens", metavar="N", type=int, help="drafts of the MTP layer per round; default 0, none"
    )
    engine.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="answers that do not depend on what else runs, bit for bit; slower",
    )
    _add_sha256(engine)
    engine.add_argument(
        "--shard-cache",
        metavar="FOLDER",
        help="keep converted weights there, a file per model, plan and rank, and load those next time; what a changed "
        "checkpoint supersedes is removed",
    )


def _add_serve(commands: Any) -> None:
    command = add_command(
        commands,
        "serve",
        _serve,
        "Serve a model with OpenAI's protocol.",
        "Exit code: 0 after a SIGTERM on which it drained, 130 after Ctrl-C, 1 where a process failed or another "
        "machine left, 2 for bad input. A SIGTERM before it serves ends it by that signal.",
    )
    add_model(command, "folder: config.json, tokenizer and weights, as for generate", optional=True)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1")
    command.add_argument("--port", type=int, default=8000, help="port to listen on; default 8000")
    command.add_argument(
        "--served-model-name", metavar="NAME", nargs="+", help="names of the model; default the folder's name"
    )
    keys = command.add_argument_group(f"API keys (none: open to all; also from the environment's {API_KEY_VARIABLE})")
    keys.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="accepted keys, one a line, # begins a comment; hidden from ps, unlike --api-key",
    )
    keys.add_argument("--api-key", metavar="KEY", action="append", help="accepted API key; may be repeated")
    command.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        help="web origin that may call; may be repeated; default none",
    )
    command.add_argument("--max-waiting", metavar="N", type=int, default=256, help="answers that may wait; default 256")
    command.add_argument("--max-body-bytes", metavar="N", type=int, help="default 8 MiB")
    command.add_argument("--request-timeout", metavar="SECONDS", type=float, help="default 600; 0 for none")
    command.add_argument(
        "--drain-seconds", metavar="SECONDS", type=float, help="what running requests get on SIGTERM; default 30"
    )
    command.add_argument(
        "--request-log", metavar="FILE", help="append every prompt and answer, for msds replay; default none"
    )
    _add_engine(command)
    add_mesh(command)
    add_balance(command)


def _add_verify(commands: Any) -> None:
    command = add_command(commands, "verify", _verify, "Prove that every way of running a model gives the same logits.")
    add_model(command, "Hugging Face folder")
    command.add_argument("--reference", metavar="NAME", help="transformers: compare with it too, if it is installed")
    command.add_argument("--token-ids", metavar="1,2,3", type=_token_ids, help="text to compare on; at least 16 ids")
    command.add_argument("--tolerance", metavar="X", type=float, help="relative to the logits' scale; default 1e-4")
    _add_sha256(command)
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_sha256(group: Any) -> None:
    group.add_argument(
        "--check-sha256",
        action=argparse.BooleanOptionalAction,
        help="compare every file with its manifest; default: if the folder has SHA256SUMS",
    )


def _add_inspect(commands: Any) -> None:
    command = add_command(commands, "inspect", _inspect, "Say what a checkpoint contains and what is odd about it.")
    add_model(command, "Hugging Face folder, or a bare config.json")
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _generate(options: argparse.Namespace) -> int:
    engine = given(options, ENGINE_OPTIONS)
    _check_cache(options)
    if options.mesh is None:
        from msds import LLM

        check_single(options, "--mesh")
        return generate_with(LLM(options.model, progress=False if options.json else None, **engine), options)
    plan = checked_plan(options.mesh, options.plan, options.model)
    arguments = {
        "path": options.model,
        "plan": str(plan),
        "step_timeout": step_timeout(options),
        "engine": replica_options(engine, plan.dp),
        "options": {name: value for name, value in vars(options).items() if name != "run"},
    }
    launch_ranks(
        "msds_serve.ranks:generate_rank",
        arguments,
        options,
        plan.ranks,
        facts=lambda: common_facts("generate", options.model, plan, arguments["engine"]),
        stop_seconds=1.0,
    )
    return EXIT_OK


def generate_with(llm: LLM, options: argparse.Namespace) -> int:
    """Answer the prompt of the command line and print it; its exit code."""
    explicit = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop")
    sampling = llm.default_sampling(**given(options, explicit))
    streams = not options.json and sampling.n == 1
    show = (lambda prompt, choice, text: print(text, end="", flush=True)) if streams else None
    if options.chat is not None:
        outputs = llm.chat([{"role": "user", "content": options.chat}], sampling, on_text=show)
    else:
        prompt = options.prompt if options.prompt is not None else options.token_ids
        outputs = llm.generate([prompt], sampling, on_text=show)
    if options.json:
        print(json.dumps({"outputs": [_output_json(output) for output in outputs]}, ensure_ascii=False))
    else:
        _print_rest(outputs, streamed=streams, has_text=llm.model.tokenizer is not None)
    for output in outputs:
        if output.error is not None:
            print(f"msds: error: {output.error}", file=sys.stderr)
    return EXIT_FAILED if any(output.error is not None for output in outputs) else EXIT_OK


def _serve(options: argparse.Namespace) -> int:
    _check_cache(options)
    engine = (*ENGINE_OPTIONS, "max_waiting", *BALANCE_OPTIONS)
    service = given(options, ("max_body_bytes", "request_timeout", "drain_seconds"))
    if service.get("request_timeout") == 0:
        service["request_timeout"] = None
    names = tuple(options.served_model_name or (os.path.basename(os.path.abspath(options.model)),))
    keys = accepted_keys(options.api_key or (), options.api_key_file, os.environ.get(API_KEY_VARIABLE))
    arguments = {
        "host": options.host,
        "port": options.port,
        "engine": given(options, engine),
        "service": {
            "model_names": names,
            "api_keys": keys,
            "cors_origins": tuple(options.cors_origin or ()),
            **service,
        },
        "request_log": options.request_log,
    }
    if options.mesh is None:
        from msds_serve.run import serve

        check_single(options, "--mesh")
        serve(options.model, **arguments)
        return EXIT_OK
    from msds_serve.run import check_address, checked_options

    plan = checked_plan(options.mesh, options.plan, options.model)
    arguments["engine"] = replica_options(arguments["engine"], plan.dp)
    check_balance(plan, options)
    drain = checked_options(options.port, arguments["service"]).drain_seconds
    if options.node_rank == 0:
        check_address(options.host, options.port)
    timeout = step_timeout(options)
    per_rank = {"path": options.model, "plan": str(plan), "step_timeout": timeout, "arguments": arguments}
    launch_ranks(
        "msds_serve.ranks:serve_rank",
        per_rank,
        options,
        plan.ranks,
        facts=lambda: common_facts("serve", options.model, plan, arguments["engine"]),
        stop_seconds=drain + END_SECONDS,
        drains=True,
    )
    return EXIT_OK


def _check_cache(options: argparse.Namespace) -> None:
    """Once, and not in each of several processes."""
    from msds.weights import check_shard_cache

    if options.shard_cache is not None:
        check_shard_cache(options.shard_cache, options.model)


def _output_json(output: Output) -> dict[str, Any]:
    usage = output.usage
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
    }


def _print_rest(outputs: Sequence[Output], *, streamed: bool, has_text: bool) -> None:
    """What streaming has not shown: the last line break, several answers, or ids where there is no tokenizer."""
    for output in outputs:
        if not has_text:
            print(",".join(str(token) for token in output.token_ids))
        elif streamed:
            print()
        else:
            print(f"[{output.choice_index}] {output.text}")


def _verify(options: argparse.Namespace) -> int:
    from msds import load
    from msds.verify import verify

    model = load(options.model, progress=False if options.json else None, **given(options, ("check_sha256",)))
    say = None if options.json else (lambda name: print(f"checking {name}", file=sys.stderr))
    report = verify(model, **given(options, ("token_ids", "tolerance", "reference")), progress=say)
    print(json.dumps(report.to_json(), ensure_ascii=False) if options.json else report.render())
    return EXIT_OK if report.passed else EXIT_FAILED


def _inspect(options: argparse.Namespace) -> int:
    from msds.inspect import inspect_model

    inspection = inspect_model(options.model)
    print(json.dumps(inspection.to_json(), ensure_ascii=False) if options.json else inspection.render())
    return EXIT_OK


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None

"""``hushgrad completion``: a script that lets a shell complete commands and options."""

from __future__ import annotations

import importlib

from hushgrad.cli._parser import Parser, say

SHELLS = ("bash", "zsh", "fish")


def _parser() -> Parser:
    parser = Parser(
        "completion",
        "Print a script for your shell; then hushgrad <TAB> completes commands, actions and options.",
        example="hushgrad completion bash >> ~/.bashrc",
    )
    parser.takes("shell SHELL", ", ".join(SHELLS), choices=SHELLS)
    return parser


def run(words: list[str]) -> int:
    """Print the script; see ``hushgrad completion --help``."""
    options = _parser().parse(words)
    script = _fish() if options.shell == "fish" else _bash()
    if options.shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    return say(options, {"shell": options.shell, "script": script}, script.rstrip("\n"))


def words_of(command: str) -> tuple[list[str], list[str]]:
    """What may follow a command: words that it knows (shells, actions), and the long options of all its parsers."""
    module = importlib.import_module(f"hushgrad.cli.{command}")
    actions = list(module._ACTIONS) if command == "ledger" else []
    parsers = [module._parser(action) for action in actions] or [module._parser()]
    arguments = [argument for parser in parsers for argument in parser._actions]
    words = [word for argument in arguments if not argument.option_strings for word in argument.choices or ()]
    options = {option for argument in arguments for option in argument.option_strings if option.startswith("--")}
    return sorted([*actions, *words]), sorted(options)


def _bash() -> str:
    from hushgrad.cli.main import COMMANDS

    cases = "".join(
        f'    {name}) words="{" ".join(words)}" options="{" ".join(options)}" ;;\n'
        for name, (words, options) in ((name, words_of(name)) for name in COMMANDS)
    )
    return f"""_hushgrad() {{
  local words options current="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} --help --version" -- "$current")); return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}  esac
  case "$current" in
    -*) words="$options" ;;
    *) [ "$COMP_CWORD" -eq 2 ] || words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hushgrad hushgrad
"""


def _fish() -> str:
    from hushgrad.cli.main import COMMANDS

    lines = []
    for name, about in COMMANDS.items():
        said = about.replace("'", "\\'")
        lines.append(f"complete -c hushgrad -n __fish_use_subcommand -f -a {name} -d '{said}'")
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        words, options = words_of(name)
        lines += [f"complete -c hushgrad {seen} -a {word}" for word in words]
        lines += [f"complete -c hushgrad {seen} -l {option[2:]}" for option in options]
    return "\n".join(lines) + "\n"

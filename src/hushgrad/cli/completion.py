"""``hushgrad completion``: a script that lets a shell complete commands and options."""

from __future__ import annotations

import importlib
import sys

from hushgrad.cli._parser import Parser, print_json

SHELLS = ("bash", "zsh", "fish")


def _parser() -> Parser:
    parser = Parser(
        "completion",
        "Print a script for your shell; then hushgrad <TAB> completes commands and hushgrad train --<TAB> options.",
        example="hushgrad completion bash >> ~/.bashrc",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return parser


def run(words: list[str]) -> int:
    """Print the script; see ``hushgrad completion --help``."""
    options = _parser().parse(words)
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]()
    if options.json:
        print_json({"shell": options.shell, "script": script})
    else:
        sys.stdout.write(script)
    return 0


def options_of(command: str) -> list[str]:
    """The long options of a command; those of ``ledger`` are the actions."""
    from hushgrad.cli.main import COMMANDS

    module = importlib.import_module(COMMANDS[command][0].split(":")[0])
    if command == "ledger":
        return sorted(module._ACTIONS)
    actions = module._parser()._actions
    return sorted({option for action in actions for option in action.option_strings if option.startswith("--")})


def _bash() -> str:
    from hushgrad.cli.main import COMMANDS

    cases = "".join(f'    {name}) words="{" ".join(options_of(name))}" ;;\n' for name in COMMANDS)
    return f"""_hushgrad() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} --help --version" -- "$current")); return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hushgrad hushgrad
"""


def _zsh() -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash()}"


def _fish() -> str:
    from hushgrad.cli.main import COMMANDS

    lines = []
    for name, (_, about) in COMMANDS.items():
        said = about.replace("'", "\\'")
        lines.append(f"complete -c hushgrad -n __fish_use_subcommand -f -a {name} -d '{said}'")
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for option in options_of(name):
            lines.append(f"complete -c hushgrad {seen} " + (f"-l {option[2:]}" if option.startswith("--") else f"-a {option}"))
    return "\n".join(lines) + "\n"

"""Federated DP-FTRL on Flower: a next-character model of Shakespeare, private for whole speakers.

    python examples/federated_shakespeare.py --data FOLDER          tinyshakespeare (input.txt or input.txt.gz in FOLDER)
    python examples/federated_shakespeare.py --data FOLDER --engine flower --rounds 3     on Flower's simulation engine
    python examples/federated_shakespeare.py                        a few embedded lines, some seconds: shows the code, no result

A user is a speaker with everything that he or she says. Every tenth speaker is held out for testing. Each round the server asks
a cohort of speakers who have rested long enough; each trains a copy of the model on its own lines and sends it back; the
server clips the changes, adds correlated noise and averages by a fixed number. The same run without clipping and noise is
done beside it. ``--pseudo-users N`` cuts every part into pieces of N characters and calls each piece a user: a larger
population, and a promise about N characters of a speaker only, no longer about speakers.
"""

from __future__ import annotations

import argparse
import gzip
import logging
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad import noise
from hushgrad.federated import DPFTRL, DPFedAvg, LocalGrid, MinSeparation, ServerSGD, clip_update
from hushgrad.train import Plan

WINDOW, WINDOWS, BATCH = 32, 64, 16  # characters in a row, rows per round at most, rows per local step
CONTEXT, BLANK = 5, -1  # characters that the model looks back; what fills up a row
EMBEDDED = """\
HAMLET:\nTo be, or not to be, that is the question.\n\nOPHELIA:\nGood my lord, how does your honour for this many a day?\n
MACBETH:\nTomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day.\n
LADY MACBETH:\nOut, damned spot! out, I say!\n\nROMEO:\nBut, soft! what light through yonder window breaks?\n
JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\n\nLEAR:\nBlow, winds, and crack your cheeks! rage! blow!\n
IAGO:\nO, beware, my lord, of jealousy; it is the green-eyed monster.\n\nANTONY:\nFriends, Romans, countrymen, lend me your ears.\n
PROSPERO:\nWe are such stuff as dreams are made on.\n\nPORTIA:\nThe quality of mercy is not strained.\n
JAQUES:\nAll the world's a stage, and all the men and women merely players.\n"""


# The data: one string for each speaker ---------------------------------------------------------------------------------


def speakers(text: str, piece: int | None) -> list[str]:
    """What each speaker says in the whole text, in the order of their names; cut into pieces if asked for."""
    parts: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        name, _, lines = block.strip().partition("\n")
        if name.endswith(":") and lines:
            parts.setdefault(name, []).append(lines)
    whole = ["\n".join(parts[name]) for name in sorted(parts)]
    return whole if piece is None else [part[i : i + piece] for part in whole for i in range(0, len(part), piece)]


def read(folder: str | None) -> str:
    if folder is None:
        return EMBEDDED
    path = Path(folder)
    packed = path / "input.txt.gz"
    return gzip.open(packed, "rt").read() if packed.exists() else (path / "input.txt").read_text()


def windows(text: str, alphabet: str) -> Tensor:
    """Rows of WINDOW + 1 characters; the last one is filled up with BLANK, which nobody has to predict."""
    numbers = [alphabet.index(c) for c in text]
    length = max(1, -(-(len(numbers) - 1) // WINDOW)) * WINDOW + 1
    return torch.tensor(numbers + [BLANK] * (length - len(numbers))).unfold(0, WINDOW + 1, WINDOW)


# The model --------------------------------------------------------------------------------------------------------------


class NextCharacter(nn.Module):
    """The last CONTEXT characters, embedded and joined, through one hidden layer (Bengio et al. 2003)."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 8)
        self.hidden = nn.Linear(8 * CONTEXT, width)
        self.out = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character at every position; before the first character stands number 0, the line's end."""
        context = F.pad(x, (CONTEXT - 1, 0)).unfold(1, CONTEXT, 1)
        return self.out(torch.tanh(self.hidden(self.embedding(context).flatten(2))))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1].clamp(min=0)).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=BLANK)


@torch.no_grad()
def accuracy_of(model: nn.Module, rows: Tensor) -> float:
    right, counts = model(rows[:, :-1].clamp(min=0)).argmax(-1) == rows[:, 1:], rows[:, 1:] != BLANK
    return float(right[counts].double().mean())


# Client and server ------------------------------------------------------------------------------------------------------


def client_of(users: list[Tensor], model: nn.Module, rate: float) -> ClientApp:
    app = ClientApp(mods=[clip_update])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        round = int(message.content["config"]["server-round"])
        rows = users[int(context.node_config["partition-id"])]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(round))[:WINDOWS]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            loss_of(model, rows[batch]).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(rows)})}
        return Message(RecordDict(content), reply_to=message)

    return app


def run(strategy, model, users, test, options) -> float:
    """Train with ``strategy`` and return the accuracy of the released model on the held-out speakers."""
    begin, initial = time.time(), ArrayRecord(NextCharacter(model.out.out_features, options.width).state_dict())

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if round == 0 or round % 10:
            return None
        model.load_state_dict(arrays.to_torch_state_dict())
        accuracy = accuracy_of(model, test)
        print(f"  round {round:3d}  accuracy {accuracy:.3f}  epsilon {strategy.spent().epsilon:.3g}", flush=True)
        return MetricRecord({"accuracy": accuracy})

    def start(grid: Grid) -> Result:
        return strategy.start(grid, initial, num_rounds=options.rounds, evaluate_fn=evaluate)

    app = client_of(users, model, options.client_rate)
    if options.engine == "local":
        result = start(LocalGrid(app, clients=len(users)))
    else:
        result = on_flower(start, app, len(users))
    model.load_state_dict(result.arrays.to_torch_state_dict())
    accuracy = accuracy_of(model, test)
    print(f"  {strategy.rounds} rounds in {time.time() - begin:.0f} s, accuracy {accuracy:.3f}", flush=True)
    return accuracy


def on_flower(start, client_app: ClientApp, clients: int) -> Result:
    """The same on Flower's simulation engine, clients in processes of their own."""
    from flwr.simulation import run_simulation

    server_app, results = ServerApp(), []

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(start(grid))

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"include_dashboard": False}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=backend)
    return results[0]


def plan_of(options, users: int, *, private: bool) -> Plan:
    """Correlated noise at (epsilon, delta) for one user's whole data; or neither clipping nor noise, for comparison."""
    cohort = max(1, round(users / options.gap))
    common = {"delta": options.delta, "batch_size": cohort, "dataset_size": users, "unit": "user", "relation": "zero_out"}
    times = -(-options.planned // options.gap)
    sampler = MinSeparation(cohort=cohort, gap=options.gap, times=times, steps=options.planned)
    if private:
        common |= {"epsilon": options.epsilon, "max_grad_norm": options.clip}
        return Plan.dpftrl(sampling=sampler, noise=noise.BLT(buffers=3), **common)
    return Plan.dpsgd(sampling=sampler, noise_multiplier=0.0, max_grad_norm=1e6, **common)


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with tinyshakespeare's input.txt or input.txt.gz")
    parser.add_argument("--pseudo-users", type=int, metavar="N", help="cut speakers into users of N characters")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--planned", type=int, default=30, help="rounds of the plan")
    parser.add_argument("--rounds", type=int, help="rounds to run now; the plan's by default")
    parser.add_argument("--gap", type=int, default=2, help="rounds from one participation of a user to the next")
    parser.add_argument("--clip", type=float, default=0.7)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--client-rate", type=float, default=2.0)
    parser.add_argument("--server-rate", type=float, default=1.0)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--engine", choices=["local", "flower"], default="local")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or options.planned
    return options


def main(arguments: list[str] | None = None) -> dict[str, float]:
    options = options_of(["--planned", "4", "--width", "8"] if arguments is None else arguments)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.manual_seed(0)
    text = read(options.data)
    alphabet = "".join(sorted({*text, " "}))
    parts = speakers(text, options.pseudo_users)
    users = [windows(part, alphabet) for i, part in enumerate(parts) if i % 10]
    test = torch.cat([windows(part, alphabet) for part in parts[::10]])
    model = NextCharacter(len(alphabet), options.width)
    unit = "speaker" if options.pseudo_users is None else f"piece of {options.pseudo_users} characters (not a speaker)"
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(users)} users (user = {unit}), {len(test)} test windows, {size} parameters")
    server = ServerSGD(learning_rate=options.server_rate, momentum=options.momentum)
    print("without privacy")
    plain = DPFedAvg(FedAvg(), plan_of(options, len(users), private=False), server=server, seed=0)
    scores = {"plain": run(plain, model, users, test, options)}
    plan = plan_of(options, len(users), private=True)
    print(f"private: noise {plan.noise_multiplier:.3g} x clip norm, divided by {plan.batch_size}")
    private = DPFTRL(FedAvg(), plan, server=server)
    scores["private"] = run(private, model, users, test, options)
    print(private.spent())
    print(
        f"accuracy {scores['plain']:.3f} without privacy, {scores['private']:.3f} with it: {scores['plain'] - scores['private']:.3f}"
    )
    return scores


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
